# SPDX-License-Identifier: Apache-2.0
"""Tensors that are spread over processes (`DTensor`), without importing torch for those that are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is spread over processes (a `DTensor`)."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies in this process' memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor: itself, or gathered from all processes, which must all call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
