# SPDX-License-Identifier: Apache-2.0
"""Whatever the model, the ranks and the compiler: an updated server answers like a fresh one on the same version.

Versions arrive one by one while requests are in flight, then the inverse of each, which leads back to the base. Tokens
and log probabilities are compared with those of a server that was started on a checkout of the farthest version, with
the same flags and the same binding of threads to cores, so that both use the same kernels; at the end, with those at
the start. Both servers are forks of one warm process, or the matrix would take most of an hour.
"""

import functools
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import Training, move_pointer, pointed_to
from vllm_server import FLAGS, Server, Streams, WarmStart, serve

from delta_wire.bucket import BucketReader
from delta_wire.digest import Digest
from delta_wire.replay import checkout
from delta_wire.stores import open_store

pytestmark = pytest.mark.e2e

# the last one fills more than one block of the prefix cache (128 tokens on a CPU)
PROMPTS = ["What is 12 plus 30?", "First count, then fill. " * 40]
COMPILING = tuple(flag for flag in FLAGS if flag != "--enforce-eager")
QUANTISING = "--quantization=fp8_per_channel"
COMMON = {
    "eager": FLAGS,
    "compiled": COMPILING,
    "fp8": (*FLAGS, QUANTISING),
    "fp8-compiled": (*COMPILING, QUANTISING),
    # of two types the last counts
    "fp32": (*FLAGS, "--dtype=float32"),
    # every linear layer lies below a wrapper
    "lora": (*FLAGS, "--enable-lora", "--max-lora-rank=8"),
}


@dataclass
class Prepared:
    """A run in a bucket that still points to its base: some versions and the inverse of each.

    Args:
        base (`Path`): the checkpoint of version 0, and of the last.
        bucket (`Path`): of the run.
        pointers (list of `bytes`): to each version.
        digests (list of `Digest`): of each version.
        checkout (`Path`): of the version farthest from the base.
    """

    base: Path
    bucket: Path
    pointers: list[bytes]
    digests: list[Digest]
    checkout: Path


def fuse_experts(source: Path, target: Path) -> Path:
    """The same checkpoint with one tensor for all experts of a layer, as transformers 5 holds them in memory."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target / file.name)
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    fused = {}
    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        # in the order of the experts, of which there are fewer than ten
        layer, found, rest = name.partition(".experts.")
        if found:
            experts.setdefault(layer, {}).setdefault(rest.split(".")[1], []).append(tensor)
        else:
            fused[name] = tensor
    for layer, parts in experts.items():
        gate, up = torch.stack(parts["gate_proj"]), torch.stack(parts["up_proj"])
        fused[f"{layer}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        fused[f"{layer}.experts.down_proj"] = torch.stack(parts["down_proj"])
    save_file(fused, target / "model.safetensors", {"format": "pt"})
    return target


def narrow_experts(source: Path, target: Path) -> Path:
    """The same checkpoint with experts of a width that vLLM's CPU kernel pads before it permutes them."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text())
    width = config["moe_intermediate_size"] - 24
    (target / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": width}))
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = (tensor[:, :width] if "down_proj" in name else tensor[:width]).contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


CHANGED = {"-fused": fuse_experts, "-narrow": narrow_experts}


@pytest.fixture(scope="module")
def prepared(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Prepared]:
    @functools.cache
    def prepare(kind: str, versions: int) -> Prepared:
        folder = tmp_path_factory.mktemp(kind)
        change = next((suffix for suffix in CHANGED if kind.endswith(suffix)), "")
        base = tiny_model(kind.removesuffix(change))
        if change:
            base = CHANGED[change](base, folder / "base")
        training = Training(base, folder / "bucket")
        writer = training.start()
        latest = training.bucket / "LATEST"
        pointers, digests, deltas = [latest.read_bytes()], [training.digest], []

        def published() -> None:
            pointers.append(latest.read_bytes())
            digests.append(training.digest)

        for seq in range(versions):
            old = {name: bits.copy() for name, bits in training.bits.items()}
            deltas.append(training.change())
            writer.publish(
                deltas[-1],
                digest=training.digest,
                step=None,
                encoding=("packed", "context", "plain")[seq % 3],
                old_bits=old.__getitem__,
            )
            published()
        farthest = checkout(
            BucketReader(open_store(training.bucket)), pointed_to(training.bucket), folder / "checkout"
        )
        for delta in reversed(deltas):
            training.take_back(writer, delta)
            published()
        assert digests[-1] == digests[0]
        latest.write_bytes(pointers[0])
        return Prepared(base, training.bucket, pointers, digests, farthest)

    return prepare


def answers(server: Server) -> list[dict[str, Any]]:
    """Tokens and log probabilities of all prompts, one after the other."""
    choices = [server.complete(prompt, max_tokens=16)["logprobs"] for prompt in PROMPTS]
    return [{"tokens": c["tokens"], "logprobs": c["token_logprobs"], "top": c["top_logprobs"]} for c in choices]


KINDS = ["qwen3", "qwen3-tied", "llama", "qwen3-moe"]
EAGER = [(kind, tensor, 1, "eager") for tensor in (1, 2) for kind in KINDS]
# biases, padding of the vocabulary, and a key/value head that both ranks hold
ODD = [("qwen2", 2, 1, "eager"), ("qwen2", 1, 1, "eager")]
# experts of a layer under one name, as in transformers 5
EAGER += [("qwen3-moe-fused", 2, 1, "eager"), ("qwen3-moe-narrow", 1, 1, "eager")]
# compiling takes most of the time. Without it vLLM's CPU build cannot run two pipeline stages: only its warm-up for
# the compiler makes the buffers that pass from one to the next
ALL_COMPILED = [*((kind, tensor, 1, "compiled") for tensor in (1, 2) for kind in KINDS), ("qwen3", 1, 2, "compiled")]
COMPILED = [("llama", 2, 1, "compiled")]
# attention whose factors are views of a loaded projection
LATENT = [("deepseek-v2", 1, 1, "eager")]
# and where they are computed from a quantised one, as all the other projections are from the checkpoint's weights
COMPUTED = [("deepseek-v2", 1, 1, "fp8")]
ALL_COMPUTED = [*COMPUTED, ("qwen3", 2, 1, "fp8"), ("llama", 1, 1, "fp8-compiled")]
# the checkpoint's bits are the upper halves of the live elements
WIDENED = [("qwen3-tied", 1, 1, "fp32"), ("qwen3-moe", 2, 1, "fp32")]
# whole weights, on servers that could serve adapters, too
WRAPPED = [("qwen3-tied", 1, 1, "lora"), ("llama", 2, 1, "lora")]
CELLS = [(*cell, 2) for cell in (*EAGER, *ODD[:1], *COMPILED, *COMPUTED)]
CELLS += [
    pytest.param(*cell, 20, marks=pytest.mark.matrix)
    for cell in (*EAGER, *ODD, *ALL_COMPILED, *LATENT, *ALL_COMPUTED, *WIDENED, *WRAPPED)
]


@pytest.mark.parametrize(("kind", "tensor", "pipeline", "mode", "versions"), CELLS)
def test_an_updated_server_answers_like_a_fresh_one(
    prepared: Callable[[str, int], Prepared],
    warm: WarmStart,
    tmp_path: Path,
    kind: str,
    tensor: int,
    pipeline: int,
    mode: str,
    versions: int,
):
    run = prepared(kind, versions)
    flags = (
        "--worker-extension-cls=vllm_delta.DeltaWorkerExtension",
        "--enable-scale-out",
        f"--tensor-parallel-size={tensor}",
        f"--pipeline-parallel-size={pipeline}",
    )
    buckets = {name: shutil.copytree(run.bucket, tmp_path / name / "bucket") for name in ("live", "fresh")}
    (buckets["fresh"] / "LATEST").write_bytes(run.pointers[versions])

    def start(name: str, model: Path) -> Server:
        cores = "0|1" if tensor * pipeline > 1 else "0"
        env = {
            "DELTA_SYNC_BUCKET": str(buckets[name]),
            "DELTA_SYNC_POLL_S": "0.05",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
        }
        return stack.enter_context(
            serve(model, tmp_path / name / "server.log", *flags, env=env, start=warm, common=COMMON[mode])
        )

    def follow(server: Server, first: int, last: int) -> list[dict[str, Any]]:
        """Bring one version after the other while requests are in flight, and ask about the last."""
        streams = Streams(server, [[5, 6, 7], [8, 9]], 24)
        for seq in range(first, last + 1):
            move_pointer(buckets["live"], run.pointers[seq])
            server.wait(lambda s, seq=seq: s["seq"] == seq, f"version {seq}")
        streams.finish()
        status = server.status()
        assert status["commits"] == last and status["digest"] == str(run.digests[last])
        assert server.verify()["equal"]
        return answers(server)

    with ExitStack() as stack, ThreadPoolExecutor(1) as beside:
        # what one has compiled the other finds; otherwise both start at once
        later = None if "compiled" in mode else beside.submit(start, "fresh", run.checkout)
        server = start("live", run.base)
        server.wait(lambda s: s["state"] == "serving" and s["seq"] == 0, "version 0")
        before = answers(server)
        updated = follow(server, 1, versions)
        assert updated != before
        fresh = later.result() if later else start("fresh", run.checkout)
        recognised = fresh.wait(lambda s: s["state"] == "serving", "the fresh server to recognise its version")
        assert recognised["seq"] == versions and recognised["commits"] == 0
        assert answers(fresh) == updated
        # and back to the base
        assert follow(server, versions + 1, 2 * versions) == before
