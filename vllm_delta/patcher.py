# SPDX-License-Identifier: Apache-2.0
"""One rank's live weights: plan a change, write it, take it back, and say what is there.

Plans are made in a side thread and only read; [`Patcher.commit`] and [`Patcher.undo`] are the only places of the
project that write to a live model, and run on the worker's main thread between two steps.

Letters: `K` changed elements in one region of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from delta_wire import kernels
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest, tensor_keys
from delta_wire.errors import LayoutError
from delta_wire.state import TensorDelta, TensorTable, resolve
from vllm_delta.blocks import Block
from vllm_delta.layout import refuse
from vllm_delta.regions import Region, Trace
from vllm_delta.staging import read_staged

LanesDict = dict[int, tuple[int, int]]
_SAMPLES = 64


@dataclass(slots=True)
class Part:
    """The change of one region.

    Args:
        region (`int`): which region.
        indices (`np.ndarray`): `[K]`, flat checkpoint indices.
        positions (`torch.Tensor`): int64 `[K]`, where they live in the storage.
        new (`torch.Tensor`): int16 `[K]`, on the storage's device.
        old (`torch.Tensor`, *optional*): int16 `[K]`, what was there when the commit began.
    """

    region: int
    indices: np.ndarray
    positions: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor | None = None


@dataclass(slots=True)
class Plan:
    """A change of this rank's weights, ready to be written."""

    parts: list[Part] = field(default_factory=list)
    state: Literal["ready", "saved", "written", "undone"] = "ready"


class Patcher:
    """The live weights of one rank, seen through a trace.

    Args:
        trace (`Trace`): the regions of this rank.
        table (`TensorTable`): the checkpoint's tensors.
    """

    def __init__(self, trace: Trace, table: TensorTable):
        refuse(trace.problems)
        self._regions = trace.regions
        self._storages = trace.storages
        self._table = table
        self._of_tensor: dict[str, list[int]] = {}
        for at, region in enumerate(trace.regions):
            self._of_tensor.setdefault(region.tensor, []).append(at)

    def plan_delta(self, path: Path) -> Plan:
        """Plan a sparse change from a staged file. Every index is checked before anything is planned.

        Steps become bits here, from the bits that are live now; the commit's digest is of the bits that are live then.
        """
        plan = Plan()
        for name, change in read_staged(path, self._table).items():
            for at in self._of_tensor.get(name, ()):
                chosen, positions = self._regions[at].locate(change.indices)
                if positions.size:
                    own = TensorDelta(
                        name,
                        change.indices[chosen],
                        change.new[chosen],
                        relative=None if change.relative is None else change.relative[chosen],
                    )
                    plan.parts.append(self._part(at, own, positions))
        return plan

    def plan_checkpoint(self, folder: Path) -> Plan:
        """Plan what turns the live weights into those of a checkpoint: only the elements that differ."""
        plan = Plan()
        checkpoint = Checkpoint(folder)
        self._table.require_same(checkpoint.table(), "the loaded checkpoint", str(folder))
        for at, region in enumerate(self._regions):
            bits = checkpoint.bits(region.tensor).reshape(-1)
            for source, target in _slices(region):
                wanted = np.lib.stride_tricks.as_strided(
                    bits[source.start :], source.sizes, tuple(2 * step for step in source.steps), writeable=False
                )
                differs = np.nonzero(wanted != self._view(region.storage, target).cpu().numpy().view(np.uint16))
                if differs[0].size:
                    indices, positions = _dot(source, differs), _dot(target, differs)
                    own = TensorDelta(region.tensor, indices, np.ascontiguousarray(wanted[differs]))
                    plan.parts.append(self._part(at, own, positions))
        return plan

    def _part(self, at: int, change: TensorDelta, positions: np.ndarray) -> Part:
        flat = self._storages[self._regions[at].storage]
        if positions.min() < 0 or positions.max() >= flat.numel():
            raise LayoutError(
                f"{self._regions[at].tensor}: a planned position lies outside of {self._regions[at].param} "
                f"({flat.numel()} elements); nothing was written"
            )
        places = torch.from_numpy(positions).to(flat.device)
        if change.relative is not None:
            change = resolve(change, kernels.gather(flat, places).cpu().numpy().view(np.uint16))
        # a mapped file is read-only and ends with the staging folder
        new = torch.from_numpy(change.new.view(np.int16).copy()).to(flat.device)
        return Part(at, change.indices, places, new)

    def predict(self, plan: Plan) -> LanesDict:
        """What the plan would add to the digest of each region, from the bits that are live now. Writes nothing."""
        return self._change(plan, [kernels.gather(self._flat(part), part.positions) for part in plan.parts])

    def commit(self, plan: Plan) -> LanesDict:
        """Write a plan, read it back, and return what that added to the digest of each region.

        All old bits are saved before the first write, so that [`Patcher.undo`] works whatever happens in between.
        """
        if plan.state != "ready":
            raise LayoutError(f"this plan was already {plan.state}; stage the version again")
        for part in plan.parts:
            part.old = kernels.gather(self._flat(part), part.positions)
        plan.state = "saved"
        for part in plan.parts:
            kernels.scatter(self._flat(part), part.positions, part.new)
        plan.state = "written"
        found = [kernels.gather(self._flat(part), part.positions) for part in plan.parts]
        return self._change(plan, [part.old for part in plan.parts if part.old is not None], found)

    def undo(self, plan: Plan) -> bool:
        """Put the old bits back. Returns whether they are all there again, read back from the live weights."""
        if plan.state == "ready":
            return True
        restored = True
        for part in plan.parts:
            if part.old is not None:
                kernels.scatter(self._flat(part), part.positions, part.old)
        for part in plan.parts:
            if part.old is not None:
                restored &= torch.equal(kernels.gather(self._flat(part), part.positions), part.old)
        plan.state = "undone"
        return restored

    def digest(self) -> LanesDict:
        """Digest of every region, over all of its live bits."""
        result: LanesDict = {}
        for at, region in enumerate(self._regions):
            keys, sums = tensor_keys(region.tensor), Digest()
            for source, target in _slices(region):
                sums = sums + Digest(
                    *kernels.digest_dense(
                        self._view(region.storage, target), keys, start=source.start, steps=source.steps
                    )
                )
            result[at] = (sums.lane_0, sums.lane_1)
        return result

    def sample(self, folder: Path) -> dict[str, str]:
        """Compare random elements of every region with the checkpoint. Returns name → reason of what differs."""
        checkpoint = Checkpoint(folder)
        chooser = np.random.default_rng(0)
        problems: dict[str, str] = {}
        for region in self._regions:
            picks = tuple(chooser.integers(0, size, _SAMPLES) for size in region.source.sizes)
            flat = self._storages[region.storage]
            positions = torch.from_numpy(_dot(region.target, picks)).to(flat.device)
            live = kernels.gather(flat, positions).cpu().numpy().view(np.uint16)
            wanted = checkpoint.bits(region.tensor).reshape(-1)[_dot(region.source, picks)]
            wrong = int(np.count_nonzero(live != wanted))
            if wrong:
                problems.setdefault(
                    region.tensor,
                    f"{wrong} of {live.size} samples of the live {region.param} are not what the checkpoint holds: "
                    "the server repacks, quantises or derives it, or loaded other weights",
                )
        return problems

    def _flat(self, part: Part) -> torch.Tensor:
        return self._storages[self._regions[part.region].storage]

    def _view(self, storage: int, block: Block) -> torch.Tensor:
        return self._storages[storage].as_strided(block.sizes, block.steps, block.start)

    def _change(self, plan: Plan, before: list[torch.Tensor], after: list[torch.Tensor] | None = None) -> LanesDict:
        sums: dict[int, Digest] = {}
        for part, old, new in zip(plan.parts, before, after or [p.new for p in plan.parts], strict=True):
            keys = tensor_keys(self._regions[part.region].tensor)
            change = Digest(*kernels.digest_sparse(part.indices, new, keys)) - Digest(
                *kernels.digest_sparse(part.indices, old, keys)
            )
            sums[part.region] = sums.get(part.region, Digest()) + change
        return {at: (change.lane_0, change.lane_1) for at, change in sums.items()}


def _slices(region: Region, max_dims: int = 3, max_elements: int = 1 << 26) -> Iterator[tuple[Block, Block]]:
    """Cut a region into blocks of at most three axes and a bounded size, both sides alike."""
    source, target = region.source, region.target
    if len(source.sizes) <= max_dims and source.num_elements <= max_elements:
        yield source, target
        return
    size = source.sizes[0]
    # too many axes: one index at a time; too many elements: as many as fit
    per = 1 if len(source.sizes) > max_dims else max(1, max_elements // (source.num_elements // size))
    for at in range(0, size, per):
        count = min(per, size - at)
        piece = Region(
            region.tensor,
            region.param,
            region.storage,
            _cut(source, at, count),
            _cut(target, at, count),
        )
        yield from _slices(piece, max_dims, max_elements)


def _cut(block: Block, at: int, count: int) -> Block:
    start = block.start + at * block.steps[0]
    if count == 1 and len(block.sizes) > 1:
        return Block(start, block.sizes[1:], block.steps[1:])
    return Block(start, (count, *block.sizes[1:]), block.steps)


def _dot(block: Block, picks: tuple[np.ndarray, ...]) -> np.ndarray:
    positions = np.full(picks[0].shape, block.start, dtype=np.int64)
    for along, step in zip(picks, block.steps, strict=True):
        positions += along * step
    return positions
