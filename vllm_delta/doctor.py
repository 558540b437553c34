# SPDX-License-Identifier: Apache-2.0
"""What `delta-wire doctor` looks at on the server's side: settings, the plugin, and the flags of `vllm serve`."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from delta_wire.bucket import BucketReader
from delta_wire.doctor import Context, Finding, ok, problem, warning
from delta_wire.errors import DeltaError
from delta_wire.stores import open_store
from vllm_delta.settings import BUCKET, Settings

EXTENSION = "vllm_delta.DeltaWorkerExtension"
PLUGIN = "vllm_delta"
# of vLLM, where --max-lora-rank is not given
_DEFAULT_RANK = "16"
_SHARED = Path("/dev/shm")
# vLLM 0.32 asks for 160 MiB
_SHARED_BYTES = 256 << 20
# docs/COMPATIBILITY.md
_QUANTISED_AND_RUN = ("fp8_per_channel",)


class _Asked(dict[str, str]):
    """An environment that remembers which variables were looked for."""

    def __init__(self, values: Mapping[str, str]):
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default=None):
        self.names.add(name)
        return super().get(name, default)


def _variables() -> frozenset[str]:
    """Whatever the settings read, they are asked, so that this list is never out of date."""
    asked = _Asked({BUCKET: "memory:doctor"})
    Settings.from_env(asked)
    return frozenset(asked.names)


VARIABLES = _variables()


def settings(context: Context) -> Iterator[Finding]:
    """Everything that ends a server's start."""
    env = dict(context.env)
    if not env.get(BUCKET, "").strip() and not context.serve:
        if not context.bucket or not any(name in env for name in VARIABLES):
            # a trainer's machine
            return
        # the bucket was named on the command line
        env[BUCKET] = context.bucket
    try:
        found = Settings.from_env(env)
    except DeltaError as error:
        yield problem("server settings", str(error), "see the message")
        return
    yield ok("server settings", f"server {found.server_id}, looks every {found.poll_s:g} s")


def plugin(context: Context) -> Iterator[Finding]:
    """vLLM must find the plugin and be allowed to load it."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if PLUGIN not in names:
        yield problem("vllm plugin", "not registered", "install delta-weight-sync with pip in vLLM's environment")
        return
    allowed = context.env.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        yield problem(
            "vllm plugin",
            f"VLLM_PLUGINS={allowed!r} leaves {PLUGIN} out",
            f"add {PLUGIN} to VLLM_PLUGINS, or unset it",
        )
    else:
        yield ok("vllm plugin", "registered")


def shared_memory(context: Context) -> Iterator[Finding]:
    """What several processes of vLLM hand to each other lies there; a container has 64 MB of it unless it is told."""
    if not context.serve or not _SHARED.is_dir():
        return
    free_bytes = shutil.disk_usage(_SHARED).free
    if free_bytes < _SHARED_BYTES:
        yield warning(
            "shared memory",
            f"{_SHARED} has {free_bytes / 1e6:.0f} MB free; a server of several processes may not start",
            "start the container with --ipc=host or --shm-size=1g",
        )
    else:
        yield ok("shared memory", f"{_SHARED}, {free_bytes / 1e9:.1f} GB free")


def flags(context: Context) -> Iterator[Finding]:
    """The command that starts the server."""
    if not context.serve:
        return
    given = _parse(context.serve)
    wrong = list(_wrong_flags(given))
    yield from wrong
    yield from _checkpoint(context.serve)
    if not wrong:
        yield ok("vllm flags", " ".join(context.serve))


def _wrong_flags(given: Mapping[str, str]) -> Iterator[Finding]:
    extension = given.get("worker-extension-cls")
    if extension != EXTENSION:
        yield problem(
            "vllm flags",
            f"--worker-extension-cls is {extension or 'not given'}",
            f"add --worker-extension-cls {EXTENSION}",
        )
    quantization = given.get("quantization", "none").lower()
    if quantization not in ("none", *_QUANTISED_AND_RUN):
        yield warning(
            "vllm flags",
            f"--quantization {quantization}: followed only where vLLM's reload quantises a layer twice alike, which "
            f"the server tries at its start; run so far: {', '.join(_QUANTISED_AND_RUN)}",
            "if /delta/status says degraded after the start, serve without --quantization",
        )
    if given.get("dtype", "auto") not in ("auto", "bfloat16", "float32"):
        yield problem("vllm flags", f"--dtype {given['dtype']}", "serve with --dtype bfloat16")
    if given.get("load-format") == "dummy":
        yield problem(
            "vllm flags", "--load-format dummy: the weights are no version of the run", "load the run's checkpoint"
        )
    if given.get("data-parallel-size", "1") != "1":
        yield warning(
            "vllm flags",
            f"--data-parallel-size {given['data-parallel-size']}: refused for mixture-of-experts models",
            "start one server for each replica",
        )
    if given.get("nnodes", "1") != "1" or given.get("distributed-executor-backend") == "ray":
        yield problem(
            "vllm flags", "ranks on several hosts are not followed", "serve with the ranks of one host, without Ray"
        )
    if "speculative-config" in given:
        yield warning(
            "vllm flags",
            "--speculative-config: the drafter's own weights stay those it was loaded with",
            "expect fewer accepted tokens as training goes on; outputs stay right",
        )


def adapter(context: Context) -> Iterator[Finding]:
    """A run of adapters needs a server that has room for one."""
    if not context.serve or not context.bucket:
        return
    try:
        latest = BucketReader(open_store(context.bucket)).latest()
    except DeltaError:
        # the check of the bucket tells what is wrong with it
        return
    if latest is None or latest.adapter is None:
        return
    given, run = _parse(context.serve), latest.adapter
    rank = given.get("max-lora-rank", _DEFAULT_RANK)
    if "enable-lora" not in given:
        found = f"the run is an adapter of rank {run.rank}, and --enable-lora is not given"
    elif rank.isdecimal() and int(rank) < run.rank:
        found = f"the run is an adapter of rank {run.rank}, and --max-lora-rank is {rank}"
    else:
        yield ok("adapter", f"{run.name}, rank {run.rank}")
        return
    yield problem("adapter", found, f"serve with --enable-lora --max-lora-rank {run.rank} or more")


def _checkpoint(words: tuple[str, ...]) -> Iterator[Finding]:
    """A folder that is served must hold bf16 weights that are not quantised."""
    for word in words:
        config = Path(word) / "config.json"
        if not config.is_file():
            continue
        found = json.loads(config.read_text())
        dtype = found.get("dtype") or found.get("torch_dtype")
        if "quantization_config" in found:
            yield problem("checkpoint", f"{config}: it is quantised", "serve the unquantised bf16 checkpoint")
        elif dtype not in (None, "bfloat16"):
            yield problem(
                "checkpoint",
                f"{config}: its weights are {dtype}",
                "serve a bf16 checkpoint: delta-wire checkout BUCKET@0 DIR",
            )
        else:
            yield ok("checkpoint", str(config.parent))


def _parse(words: tuple[str, ...]) -> dict[str, str]:
    """Options by their long names; an option without a value is `""`."""
    short = {"q": "quantization", "tp": "tensor-parallel-size", "dp": "data-parallel-size", "n": "nnodes"}
    given: dict[str, str] = {}
    for word, after in zip(words, (*words[1:], "--"), strict=True):
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            name = short.get(name, name)
        given[name.replace("_", "-")] = value if equals else "" if after.startswith("-") else after
    return given


CHECKS = (settings, plugin, shared_memory, flags, adapter)
