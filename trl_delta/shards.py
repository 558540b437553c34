# SPDX-License-Identifier: Apache-2.0
"""What one of several training processes owns: its rows of what is sharded, its share of what every process holds.

Nothing is gathered: a process reads, compares and publishes what lies in its own memory, in the coordinates of the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from delta_wire.errors import SetupError
from delta_wire.shards import WHOLE, Shard
from delta_wire.state import TensorSpec, TensorTable
from trl_delta.conversions import Part
from trl_delta.dtensors import is_sharded, sharded_dim
from trl_delta.names import LiveTensor

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def own_tensors(live: Iterable[LiveTensor], rank: int, count: int) -> list[LiveTensor]:
    """Parts of a model that this process owns; every element has exactly one owner.

    Args:
        live (list of [`LiveTensor`]): the whole model, the same on every rank; the factors of adapters in it whole.
        rank, count (`int`): this process, and how many there are.

    Returns:
        Pieces, views of the local memory, with `start` in the checkpoint's tensor. A `DTensor` gives the rows of its
        local shard. A parameter that every process holds is cut into as many shares as there are processes; a
        buffer, which processes need not agree on, belongs to the first.
    """
    pieces = []
    for number, entry in enumerate(live):
        piece = _own_piece(entry, number, rank, count)
        if piece is not None:
            pieces.append(piece)
    return pieces


def coding_shards(
    pieces: Iterable[LiveTensor], table: TensorTable, *, needs_all_rows: bool = False
) -> dict[str, Shard]:
    """The shard in whose rows each piece is coded; whole tensors where a piece is no such shard.

    Args:
        pieces: what this process owns.
        table ([`~delta_wire.state.TensorTable`]): the whole model.
        needs_all_rows (`bool`, *optional*, defaults to `False`): the encoding needs the old bits of all these rows;
            [`SetupError`] if they are on several processes.
    """
    found: dict[str, Shard] = {}
    for piece in pieces:
        stop = piece.start + prod(piece.shape)
        for name in piece.names:
            spec = table[name]
            found[name] = WHOLE
            if (piece.start, stop) == (0, spec.num_elements) or piece.shard is None:
                continue
            if piece.shard.span(spec) == (piece.start, stop):
                found[name] = piece.shard
            elif needs_all_rows:
                raise SetupError(
                    f"tensor {name} is cut across its rows, elements {piece.start} to {stop - 1} are here; encoding "
                    "context needs whole rows. Set delta_sync_encoding to packed."
                )
    return found


def refuse_wrappers(model: torch.nn.Module) -> None:
    """Raise [`SetupError`] for shards that cannot be read where they lie."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise SetupError(
            "the model is wrapped by FSDP1, whose flat parameters belong to no tensor of the checkpoint; train with "
            "FSDP2 (fsdp_version: 2 in the configuration of accelerate)"
        )


def _own_piece(entry: LiveTensor, number: int, rank: int, count: int) -> LiveTensor | None:
    import torch

    if is_sharded(entry.source):
        return _own_rows(entry, entry.source, number)  # type: ignore[arg-type]
    if not isinstance(entry.source, torch.nn.Parameter):
        # what is no parameter may differ from rank to rank; checkpoints are saved by the first
        return entry if rank == 0 else None
    shard = Shard(rank, count)
    start, stop = shard.span(TensorSpec(entry.name, entry.shape))
    if start == stop:
        return None
    before = 0 if entry.part is None else entry.part.start
    piece = replace(entry, part=Part(before + start, (stop - start,)), start=start, shard=shard)
    return piece if entry.merge is None else _without_other_rows(piece)


def _own_rows(entry: LiveTensor, tensor: DTensor, number: int) -> LiveTensor | None:
    """What lies here of a `DTensor`, or of the part of one that is a checkpoint's tensor."""
    shard = _own_shard(entry, tensor, number)
    if shard is None:
        return None
    local = tensor.to_local().detach()
    begin, end = shard.span(TensorSpec(entry.name, tuple(tensor.shape)))
    if local.numel() != end - begin:
        raise SetupError(
            f"parameter {entry.name}: expected the {end - begin} elements of shard {shard}, found {local.numel()}; "
            "delta sync knows shards that are cut as torch.chunk cuts"
        )
    part = entry.part or Part(0, tuple(tensor.shape))
    first, last = max(begin, part.start), min(end, part.stop)
    if first >= last:
        return None
    piece = replace(entry, start=first - part.start, shard=shard)
    if entry.merge is None:
        return replace(piece, source=local.reshape(-1)[first - begin : last - begin], part=None)
    merge = replace(entry.merge, first_row=shard.rows(tensor.shape[0])[0])
    return replace(piece, source=local, part=Part(first - begin, (last - first,)), merge=merge)


def _without_other_rows(piece: LiveTensor) -> LiveTensor:
    """A part of a weight that is computed to be read, with no more rows of the source than it lies in."""
    assert piece.part is not None and piece.merge is not None
    row_elements = prod(piece.source.shape[1:])
    first, last = piece.part.start // row_elements, -(-piece.part.stop // row_elements)
    part = Part(piece.part.start - first * row_elements, piece.part.shape)
    merge = replace(piece.merge, first_row=first)
    return replace(piece, source=piece.source.detach()[first:last], part=part, merge=merge)


def _own_shard(entry: LiveTensor, tensor: DTensor, number: int) -> Shard | None:
    """The shard of a `DTensor` that this process owns, `None` if another replica does."""
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    if at is None:
        return None
    cut = sharded_dim(tensor, f"parameter {entry.name}")
    replica, num_replicas = 0, 1
    for dim in range(mesh.ndim):
        if dim != cut:
            replica, num_replicas = replica * mesh.size(dim) + at[dim], num_replicas * mesh.size(dim)
    # replicas hold the same; they take turns, so that each has its share of the work
    if number % num_replicas != replica:
        return None
    return WHOLE if cut is None else Shard(at[cut], mesh.size(cut))
