# SPDX-License-Identifier: Apache-2.0
"""One rank's live weights: plan a change, write it, take it back, and say what is there.

Plans are made in a side thread and only read; [`Patcher.commit`] and [`Patcher.undo`] are the only places of the
project that write to a live model, and run on the worker's main thread between two steps.

Letters: `K` changed elements in one region of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from delta_wire import kernels
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest, tensor_keys
from delta_wire.errors import DigestMismatchError, LayoutError
from delta_wire.state import TensorTable
from vllm_delta.blocks import Block
from vllm_delta.computed import Computed
from vllm_delta.layout import refuse
from vllm_delta.pace import Pace
from vllm_delta.pieces import dot, slices
from vllm_delta.regions import Region, Trace
from vllm_delta.staging import read_staged

LanesDict = dict[int, tuple[int, int]]
_SAMPLES = 64
# elements that are made ready at once: until then they take three times as much memory
_BATCH = 1 << 22


@dataclass(frozen=True, slots=True)
class Write:
    """What is written at once: changes on one device, and the region that each belongs to."""

    regions: list[int]
    changes: kernels.Replacements


@dataclass(slots=True)
class Plan:
    """A change of this rank's weights, ready to be written, and what it adds to the digest of each region.

    Args:
        writes: all of it; 6 to 14 bytes an element on a CPU.
        lanes_sha256: of what it adds to the digest; a rank that has written it says so by this.
        pending, num_pending: regions and their changes that are not made ready yet, and elements of these.
        computed: parts of the model to compute anew, → their seals until then. The same on all ranks of
            a tensor-parallel group, whatever each of them holds of the change: computing may need all of them.
    """

    writes: list[Write] = field(default_factory=list)
    pending: list[tuple[int, kernels.Change]] = field(default_factory=list)
    num_pending: int = 0
    lanes: LanesDict = field(default_factory=dict)
    lanes_sha256: str = ""
    num_changed: int = 0
    computed: dict[Computed, Digest | None] = field(default_factory=dict)
    state: Literal["ready", "begun", "written", "undone"] = "ready"


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
        self._orders = trace.orders
        self.computed = list(dict.fromkeys(trace.computed.values()))
        self._table = table
        self._of_tensor: dict[str, list[int]] = {}
        for at, region in enumerate(trace.regions):
            self._of_tensor.setdefault(region.tensor, []).append(at)

    def settle(self) -> None:
        """Arrange the live storages for fast commits. Beside the steps; changes no bit."""
        kernels.use_huge_pages(self._storages)

    @property
    def devices(self) -> list[torch.device]:
        """Where the weights are that plans write to: the live ones, and those in host memory of computed parts."""
        return list(dict.fromkeys(flat.device for flat in self._storages)) or [torch.device("cpu")]

    def plan_delta(self, path: Path) -> Plan:
        """Plan a sparse change from a staged file. Every index is checked before anything is planned.

        Steps become bits here, from the bits that are live now; the commit makes sure that they still are.
        """
        plan = Plan()
        delta = read_staged(path, self._table)
        plan.computed = {part: part.seal for part in self.computed if not delta.keys().isdisjoint(part.tensors)}
        for name, change in delta.items():
            for at in self._of_tensor.get(name, ()):
                chosen, positions = self._regions[at].locate(change.indices)
                if positions.size:
                    relative = None if change.relative is None else change.relative[chosen]
                    self._add(plan, at, positions, change.new[chosen], relative, change.indices[chosen])
                    if self._regions[at].widened:
                        # like what changes, what must not is compared and read back in the commit
                        self._clear(plan, at, positions - 1, expected=0)
        self._ready(plan)
        return plan

    def plan_checkpoint(self, folder: Path) -> Plan:
        """Plan what turns the live weights into those of a checkpoint: only the elements that differ."""
        # whether the computed parts still are what they were computed to is not asked
        plan = Plan(computed={part: part.seal for part in self.computed})
        checkpoint = Checkpoint(folder)
        self._table.require_same(checkpoint.table(), "the loaded checkpoint", str(folder))
        for at, region in enumerate(self._regions):
            bits = checkpoint.bits(region.tensor).reshape(-1)
            for source, target in self._pieces(region):
                wanted = np.lib.stride_tricks.as_strided(
                    bits[source.start :], source.sizes, tuple(2 * step for step in source.steps), writeable=False
                )
                differs = np.nonzero(wanted != self._view(region.storage, target).cpu().numpy().view(np.uint16))
                if differs[0].size:
                    indices, positions = dot(source, differs), dot(target, differs)
                    self._add(plan, at, positions, np.ascontiguousarray(wanted[differs]), None, indices)
            for lower in self._lower_halves(region):
                dirty = np.nonzero(self._view(region.storage, lower).cpu().numpy())
                if dirty[0].size:
                    self._clear(plan, at, dot(lower, dirty), expected=None)
        self._ready(plan)
        return plan

    def _add(
        self,
        plan: Plan,
        at: int,
        positions: np.ndarray,
        values: np.ndarray,
        relative: np.ndarray | None,
        indices: np.ndarray,
    ) -> None:
        """Add a region's change to a plan."""
        region = self._regions[at]
        places, keys = self._ordered(region.storage, positions), tensor_keys(region.tensor)
        self._put(plan, at, kernels.Change(self._storages[region.storage], places, values, relative, indices, keys))
        plan.num_changed += positions.size

    def _clear(self, plan: Plan, at: int, positions: np.ndarray, expected: int | None) -> None:
        """Write zeros into lower halves, which no digest knows of; `expected` if they must be something already."""
        storage = self._regions[at].storage
        places, zeros = self._ordered(storage, positions), np.zeros(positions.size, dtype=np.uint16)
        self._put(plan, at, kernels.Change(self._storages[storage], places, zeros, expected=expected))

    def _put(self, plan: Plan, at: int, change: kernels.Change) -> None:
        plan.pending.append((at, change))
        plan.num_pending += change.positions.size
        if plan.num_pending > _BATCH:
            self._ready(plan)

    def _ready(self, plan: Plan) -> None:
        """Prepare what is pending with the bits that are live now, and take down what it adds to the digests."""
        devices: dict[torch.device, list[tuple[int, kernels.Change]]] = {}
        for at, change in plan.pending:
            devices.setdefault(change.flat.device, []).append((at, change))
        plan.pending, plan.num_pending = [], 0
        for pending in devices.values():
            regions = [at for at, _ in pending]
            try:
                changes = kernels.replacements([change for _, change in pending])
            except kernels.OutsideError as error:
                region = self._regions[regions[error.item]]
                size = self._storages[region.storage].numel()
                raise LayoutError(
                    f"{region.tensor}: a planned position lies outside of {region.param} ({size} elements); nothing "
                    "was written"
                ) from error
            plan.writes.append(Write(regions, changes))
            for at, added in zip(regions, changes.lanes, strict=True):
                total = Digest(*plan.lanes.get(at, (0, 0))) + Digest(*added)
                plan.lanes[at] = (total.lane_0, total.lane_1)

    def commit(self, plan: Plan) -> None:
        """Write a plan, which adds to the digest of each region what the plan says.

        That was computed while planning. Here every bit that is replaced is compared with the bit that was
        planned to be replaced, and every bit that was written is read back, which proves the same without hashing
        while generation stands still.
        """
        if plan.state != "ready":
            raise LayoutError(f"this plan was already {plan.state}; stage the version again")
        plan.state = "begun"
        # all of them, whatever is found
        found = [write.changes.run() for write in plan.writes]
        for write, wrong in zip(plan.writes, found, strict=True):
            for at, (stale, _) in wrong.items():
                name = self._regions[write.regions[at]].tensor
                if stale:
                    raise LayoutError(f"{name} changed between staging and commit; something else writes to it")
                raise LayoutError(f"{name} does not hold what was written to it")
        plan.state = "written"

    def undo(self, plan: Plan) -> bool:
        """Put the old bits back. Returns whether they are all there again, read back from the live weights."""
        if plan.state == "ready":
            return True
        plan.state = "undone"
        # all of them, whatever is found
        restored = [write.changes.undo() for write in plan.writes]
        return all(restored)

    def digest(self, pace: Pace | None = None) -> LanesDict:
        """Digest of every region, over all of its live bits.

        Args:
            pace ([`Pace`], *optional*): where to rest between two pieces; never without it.

        Raises:
            DigestMismatchError: something else has written into a computed part, or what lies beside the bits.
        """
        pace = pace or Pace()
        for part in self.computed:
            if not part.intact(pace):
                raise DigestMismatchError(
                    f"{part.name}: the live tensors are not those that were computed from {', '.join(part.tensors)}"
                )
        result: LanesDict = {}
        for at, region in enumerate(self._regions):
            keys, sums = tensor_keys(region.tensor), Digest()
            for source, target in self._pieces(region):
                sums = sums + Digest(
                    *kernels.digest_dense(
                        self._view(region.storage, target), keys, start=source.start, steps=source.steps
                    )
                )
                pace.rest()
            if wrong := self._num_not_widened(region):
                raise DigestMismatchError(f"{region.param}: {wrong} elements of the live float32 are no bf16 values")
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
            positions = torch.from_numpy(self._ordered(region.storage, dot(region.target, picks))).to(flat.device)
            live = kernels.gather(flat, positions).cpu().numpy().view(np.uint16)
            wanted = checkpoint.bits(region.tensor).reshape(-1)[dot(region.source, picks)]
            wrong = int(np.count_nonzero(live != wanted))
            if wrong:
                problems.setdefault(
                    region.tensor,
                    f"{wrong} of {live.size} samples of the live {region.param} are not what the checkpoint holds: "
                    "the server repacks, quantises or derives it, or loaded other weights",
                )
            if wrong := self._num_not_widened(region):
                problems.setdefault(
                    region.tensor,
                    f"{wrong} elements of the live float32 {region.param} are no bf16 values: the server derives it, "
                    "or loaded other weights",
                )
        return problems

    def _num_not_widened(self, region: Region) -> int:
        return sum(int(torch.count_nonzero(self._view(region.storage, lower))) for lower in self._lower_halves(region))

    def _lower_halves(self, region: Region) -> Iterator[Block]:
        if region.widened:
            for _, lower in self._pieces(replace(region, target=region.lower)):
                yield lower

    def _ordered(self, storage: int, positions: np.ndarray) -> np.ndarray:
        order = self._orders.get(storage)
        return positions if order is None else order(positions)

    def _pieces(self, region: Region) -> Iterator[tuple[Block, Block]]:
        if region.storage in self._orders:
            # what has been permuted is copied together, eight bytes of position an element
            return slices(region, max_elements=1 << 20)
        if self._storages[region.storage].device.type == "cpu":
            # some milliseconds; where there is a device of its own, each piece costs a launch
            return slices(region, max_elements=1 << 21)
        return slices(region)

    def _view(self, storage: int, block: Block) -> torch.Tensor:
        if storage in self._orders:
            positions = self._ordered(
                storage, dot(block, tuple(np.indices(block.sizes).reshape(len(block.sizes), -1)))
            )
            flat = self._storages[storage]
            return kernels.gather(flat, torch.from_numpy(positions).to(flat.device)).reshape(block.sizes)
        return self._storages[storage].as_strided(block.sizes, block.steps, block.start)
