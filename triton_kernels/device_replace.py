# SPDX-License-Identifier: Apache-2.0
"""Changes of live parameters on a device, see [`delta_wire.kernels.replacements`]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from delta_wire.kernels import coding, dispatch
from delta_wire.kernels.devices import on_device, to_torch
from delta_wire.kernels.replacement import Change, OutsideError, Wrong, joined, only_wrong


class OnTriton:
    """All changes by the addresses of their elements, in two launches however many tensors there are.

    14 bytes an element on the device.
    """

    def __init__(self, items: Sequence[Change]):
        from delta_wire.kernels import triton_scatter

        _require_inside(items)
        self._kernels = triton_scatter
        # whose addresses are held
        self._storages = [item.flat for item in items]
        device = items[0].flat.device
        self._bounds = np.cumsum([0, *(item.positions.size for item in items)]).tolist()
        # two bytes an element
        addresses = np.concatenate([item.flat.data_ptr() + 2 * item.positions for item in items])
        self._addresses = to_torch(addresses).to(device)
        self._new = to_torch(np.concatenate([item.values for item in items])).to(device)
        with on_device(self._new):
            self._old = triton_scatter.gather_at(self._addresses)
        self._found = torch.empty_like(self._old)
        self._counts = torch.zeros(2, dtype=torch.int32, device=device)
        relative = joined([item.relative for item in items], np.bool_, items)
        if relative.size:
            self._new = _bits_of_steps(relative, self._old, self._new)
        self.lanes: list[tuple[int, int]] = []
        for item, part in zip(items, self._parts(), strict=True):
            self.lanes.append(_change_of_digest(item, self._old[part], self._new[part]))
            if item.expected is not None:
                self._old[part] = _signed(item.expected)
        _finish(device)

    def run(self) -> Wrong:
        if not any(self._swap(self._new, self._old)):
            return {}
        with on_device(self._new):
            unwritten = self._kernels.gather_at(self._addresses) != self._new
        stale = self._found != self._old
        # what is put back is what was there
        self._old.copy_(self._found)
        counts = [count for part in self._parts() for count in (stale[part].sum(), unwritten[part].sum())]
        return only_wrong(torch.stack(counts).reshape(-1, 2).tolist())

    def undo(self) -> bool:
        _, unwritten = self._swap(self._old, self._new)
        return not unwritten

    def _swap(self, new: torch.Tensor, old: torch.Tensor) -> list[int]:
        """Waits for the device once."""
        with on_device(new):
            self._kernels.exchange(self._addresses, new, old, self._found, self._counts)
        return self._counts.tolist()

    def _parts(self) -> list[slice]:
        return [slice(start, stop) for start, stop in zip(self._bounds, self._bounds[1:], strict=False)]


class OnDevice:
    """Change by change, where there is no Triton; what is found stays there until all are done."""

    def __init__(self, items: Sequence[Change]):
        _require_inside(items)
        self.lanes: list[tuple[int, int]] = []
        # flat, positions, old and new bits
        self._bits: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for item in items:
            device = item.flat.device
            positions = torch.from_numpy(item.positions).to(device)
            old = dispatch.gather(item.flat, positions)
            # a mapped file is read-only and ends with the staging folder
            new = to_torch(item.values.copy()).to(device)
            if item.relative is not None:
                new = _bits_of_steps(item.relative.copy(), old, new)
            self.lanes.append(_change_of_digest(item, old, new))
            if item.expected is not None:
                old.fill_(_signed(item.expected))
            self._bits.append((item.flat, positions, old, new))
        _finish(items[0].flat.device)

    def run(self) -> Wrong:
        counts = []
        for flat, positions, old, new in self._bits:
            found = dispatch.scatter(flat, positions, new)
            stale = (found != old).sum()
            # what is put back is what was there
            old.copy_(found)
            counts += [stale, (dispatch.gather(flat, positions) != new).sum()]
        return only_wrong(torch.stack(counts).reshape(-1, 2).tolist())

    def undo(self) -> bool:
        for flat, positions, old, _ in self._bits:
            dispatch.scatter(flat, positions, old)
        return all(torch.equal(dispatch.gather(flat, positions), old) for flat, positions, old, _ in self._bits)


def _require_inside(items: Sequence[Change]) -> None:
    for at, item in enumerate(items):
        if item.positions.size and not 0 <= item.positions.min() <= item.positions.max() < item.flat.numel():
            raise OutsideError(at)


def _bits_of_steps(relative: np.ndarray, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, with bits in the place of steps, which it holds where `relative` is set."""
    moved = coding.apply_steps(old, new).to(new.device)
    return torch.where(torch.from_numpy(relative).to(new.device), moved, new)


def _finish(device: torch.device) -> None:
    """Wait for what this thread has asked of a device: who carries the changes out may use another stream."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type:
        torch.accelerator.current_stream(device).synchronize()


def _signed(bits: int) -> int:
    return int(np.uint16(bits).view(np.int16))


def _change_of_digest(item: Change, old: torch.Tensor, new: torch.Tensor) -> tuple[int, int]:
    if item.indices is None:
        return 0, 0
    before = dispatch.digest_sparse(item.indices, old, item.keys)
    after = dispatch.digest_sparse(item.indices, new, item.keys)
    return (after[0] - before[0]) % (1 << 64), (after[1] - before[1]) % (1 << 64)
