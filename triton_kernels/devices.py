# SPDX-License-Identifier: Apache-2.0
"""Which form of a primitive serves a tensor, and zero-copy views between torch and numpy."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

# by these OpenMP is told to bind the first thread of a process when it is loaded, as vLLM tells its workers on a CPU
_BINDING = ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# of Linux 6.1 and newer; the module mmap does not know it
_MADV_COLLAPSE = 25
_HUGE_BYTES = 1 << 21


def unbind_thread() -> None:
    """Let this thread run wherever its process may, and not only where OpenMP has bound the first thread.

    A thread starts on the cores of its maker. If that one is bound to a single core, both would share it while others
    are idle.
    """
    if bound_cores():
        os.sched_setaffinity(0, _allowed_cores())


def bound_cores() -> list[int]:
    """The cores that OpenMP has bound the first thread of this process to; empty if it has not."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    own = os.sched_getaffinity(os.getpid())
    return sorted(own) if own < _allowed_cores() else []


def keep_off(cores: Iterable[int]) -> None:
    """Let this thread, and those it makes, run on other cores than these, if there are any others."""
    cores = set(cores)
    if cores and (others := _allowed_cores() - cores):
        os.sched_setaffinity(0, others)


def _allowed_cores() -> set[int]:
    """Where this process might run before OpenMP bound its first thread, which the one that started it knows."""
    own = os.sched_getaffinity(os.getpid())
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or not any(name in os.environ for name in _BINDING):
        return own
    try:
        return own | os.sched_getaffinity(parent.pid)
    except OSError:
        # the parent has gone
        return own


def use_huge_pages(tensors: Sequence[torch.Tensor]) -> int:
    """Ask the system to keep CPU tensors in huge pages: a change scattered over all of them then waits for far fewer
    page tables. Contents stay as they are, and a system that cannot or will not is no error.

    Returns:
        `int`: bytes of the ranges that the system has gathered into huge pages.
    """
    on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes]
    if sum(tensor.nbytes for tensor in on_cpu) < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return 0
    advise = ctypes.CDLL(None).madvise
    # page by page: neighbours in memory may share the first and the last, and what reaches outside of a mapping, or
    # over the seam of two, is refused alone
    pages = {
        page
        for tensor in on_cpu
        for page in range(tensor.data_ptr() // _HUGE_BYTES, (tensor.data_ptr() + tensor.nbytes - 1) // _HUGE_BYTES + 1)
    }
    gathered = [
        page
        for page in sorted(pages)
        if not advise(ctypes.c_void_p(page * _HUGE_BYTES), ctypes.c_size_t(_HUGE_BYTES), _MADV_COLLAPSE)
    ]
    return len(gathered) * _HUGE_BYTES


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton form serves a tensor: it lies on a GPU, and Triton is there."""
    return tensor.device.type == "cuda" and _has_triton()


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of this process."""
    return tensor.device.type == "cpu"


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, which is where Triton launches."""
    import torch

    return torch.cuda.device_of(tensor)


def to_host(tensor: torch.Tensor, dtype: type[np.generic]) -> np.ndarray:
    """Zero-copy numpy view of a CPU tensor's bits."""
    import torch

    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(integer).numpy().view(dtype)


def to_torch(bits: np.ndarray) -> torch.Tensor:
    """Zero-copy CPU tensor of 16-bit patterns or 64-bit words, int16 or int64."""
    import torch

    return torch.from_numpy(bits.view({2: np.int16, 8: np.int64}[bits.itemsize]))


def require(condition: bool, message: str) -> None:
    """Refuse arguments that a kernel would misread."""
    if not condition:
        raise ValueError(message)
