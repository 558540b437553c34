# SPDX-License-Identifier: Apache-2.0
"""Which form of a primitive serves a tensor, and zero-copy views between torch and numpy."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton form serves a tensor: it lies on a GPU, and Triton is there."""
    return tensor.device.type == "cuda" and _has_triton()


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
