# SPDX-License-Identifier: Apache-2.0
"""Tensors that are spread over processes (`DTensor`), without importing torch for those that are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_wire.errors import SetupError

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is spread over processes (a `DTensor`)."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies in this process' memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor: itself, or gathered from all processes, which must all call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def sharded_dim(tensor: DTensor, what: str) -> int | None:
    """Dimension of the mesh along which the rows of a tensor are cut; `None` if all its processes hold all of it.

    Args:
        what (`str`): what [`SetupError`] calls a tensor that is cut otherwise.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh = tensor.device_mesh
    found = None
    for dim, placement in enumerate(tensor.placements):
        if mesh.size(dim) == 1 or isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard or placement.dim != 0 or found is not None:
            raise SetupError(
                f"{what} is placed {tensor.placements} on {tuple(mesh.shape)} processes; delta sync knows shards of "
                "the first dimension, cut once, and replicas of them. Train with FSDP2 alone."
            )
        found = dim
    return found
