# SPDX-License-Identifier: Apache-2.0
"""Changing live parameters: everything that can be prepared is prepared before, also what it adds to the digest.

Letters: `M` elements of a storage, `K` changed elements in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from delta_wire.kernels import coding, dispatch
from delta_wire.kernels.devices import is_on_host, require, to_torch

if TYPE_CHECKING:
    import torch

# elements that a thread takes at a time
_CHUNK = 1 << 15
# that many elements are not worth a second thread
_ALONE = 1 << 17
# elements that did not hold the old bits, and elements that do not hold the new bits when read back
Counts = tuple[int, int]


# not frozen: a plan has one for every region, and freezing triples what making one costs
@dataclass(slots=True)
class Change:
    """What elements of one storage are to become.

    Args:
        flat (`torch.Tensor`): int16 `[M]`, the storage.
        positions (`np.ndarray`): int64 `[K]`, no repeats.
        values (`np.ndarray`): uint16 `[K]`, new bits; steps where `relative` is set.
        relative (`np.ndarray`, *optional*): bool `[K]`, marks steps on the monotone bf16 line.
        indices (`np.ndarray`, *optional*): int32 or int64 `[K]`, the flat checkpoint indices, for the digest. `None`
            if no digest knows these elements.
        keys (`tuple`, *optional*, defaults to `(0, 0)`): the two 64-bit keys of the tensor's name.
        expected (`int`, *optional*): bits that must be there, whatever is there while this is prepared.
    """

    flat: torch.Tensor
    positions: np.ndarray
    values: np.ndarray
    relative: np.ndarray | None = None
    indices: np.ndarray | None = None
    keys: tuple[int, int] = (0, 0)
    expected: int | None = None


class OutsideError(ValueError):
    """A position lies outside of its storage.

    Attributes:
        item (`int`): number of the change.
    """

    def __init__(self, item: int):
        super().__init__(f"change {item} has a position outside of its storage")
        self.item = item


class Replacements(Protocol):
    """Changes on one device, ready to be carried out at once.

    Attributes:
        lanes: for each change what it adds to the digest, two lanes modulo 2^64.
    """

    lanes: list[tuple[int, int]]

    def run(self) -> list[Counts]:
        """Carry them out, all of them whatever is found; the host waits for the device once."""
        ...

    def undo(self) -> bool:
        """Put back what was there. Returns whether all of it is there again, read back."""
        ...


def replacements(items: Sequence[Change]) -> Replacements:
    """Prepare changes of one device, no two of the same element, from the bits that are live now.

    What they were made of is not kept: 12 bytes an element are, on a CPU.

    Raises:
        OutsideError: before anything is read.
    """
    for item in items:
        sizes = {len(part) for part in (item.positions, item.values, item.relative, item.indices) if part is not None}
        require(len(sizes) == 1, f"replacements: arrays of a change have {sorted(sizes)} elements")
    on_host = not items or is_on_host(items[0].flat)
    return _OnHost(items) if on_host else _OnDevice(items)


class _OnHost:
    """One list of addresses, so that one call of a kernel does what would be hundreds."""

    def __init__(self, items: Sequence[Change]):
        from delta_wire.kernels import cpu_replace

        self._bounds = np.cumsum([0, *(item.positions.size for item in items)])
        size = int(self._bounds[-1])
        # of positions here; the kernel makes addresses of them, and bits of steps
        self._addresses, self._new = np.empty(size, dtype=np.uint64), np.empty(size, dtype=np.uint16)
        self._old = np.empty(size, dtype=np.uint16)
        lanes = np.zeros((len(items), 2), dtype=np.uint64)
        if items:
            np.concatenate([item.positions for item in items], out=self._addresses.view(np.int64))
            np.concatenate([item.values for item in items], out=self._new)
        wrong = cpu_replace.prepare(
            np.array([item.flat.data_ptr() for item in items], dtype=np.uint64),
            np.array([item.flat.numel() for item in items], dtype=np.uint64),
            self._bounds,
            _joined([item.indices for item in items], np.int32, items),
            _joined([item.relative for item in items], np.bool_, items),
            np.array([item.keys for item in items], dtype=np.uint64).reshape(-1, 2),
            self._addresses,
            self._old,
            self._new,
            lanes,
        )
        if wrong >= 0:
            raise OutsideError(int(wrong))
        self.lanes = [
            (0, 0) if item.indices is None else (lane_0, lane_1)
            for item, (lane_0, lane_1) in zip(items, lanes.tolist(), strict=True)
        ]
        for at, item in enumerate(items):
            if item.expected is not None:
                self._old[self._bounds[at] : self._bounds[at + 1]] = item.expected

    def run(self) -> list[Counts]:
        return self._swap(self._old, self._new)

    def undo(self) -> bool:
        return not any(unwritten for _, unwritten in self._swap(self._new, self._old))

    def _swap(self, old: np.ndarray, new: np.ndarray) -> list[Counts]:
        work = iter(range(0, self._addresses.size, _CHUNK))
        # whichever thread is free takes the next piece: the machine may be busy
        beside = [dispatch.beside(self._work, work, old, new)] if self._addresses.size > _ALONE else []
        try:
            counts = self._work(work, old, new)
        finally:
            # whoever takes it back must not meet a thread that still writes
            wait(beside)
        for future in beside:
            counts += future.result()
        return [(stale, unwritten) for stale, unwritten in counts.tolist()]

    def _work(self, starts: Iterator[int], old: np.ndarray, new: np.ndarray) -> np.ndarray:
        from delta_wire.kernels import cpu_replace

        counts = np.zeros((len(self.lanes), 2), dtype=np.int64)
        for start in starts:
            stop = min(start + _CHUNK, self._addresses.size)
            cpu_replace.replace(self._addresses, old, new, self._bounds, counts, start, stop)
        return counts


def _joined(arrays: list[np.ndarray | None], dtype: type[np.generic], items: Sequence[Change]) -> np.ndarray:
    """All entries of all changes, zeros for those that have none; empty if nobody has any."""
    if all(array is None for array in arrays):
        return np.empty(0, dtype=dtype)
    filled = [
        np.zeros(item.positions.size, dtype=dtype) if array is None else array
        for array, item in zip(arrays, items, strict=True)
    ]
    return np.concatenate(filled)


class _OnDevice:
    """Change by change; what is found stays there until all are done."""

    def __init__(self, items: Sequence[Change]):
        import torch

        for at, item in enumerate(items):
            if item.positions.size and not 0 <= item.positions.min() <= item.positions.max() < item.flat.numel():
                raise OutsideError(at)
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
                relative = torch.from_numpy(item.relative.copy()).to(device)
                new = torch.where(relative, coding.apply_steps(old, new).to(device), new)
            self.lanes.append(_change_of_digest(item, old, new))
            if item.expected is not None:
                old.fill_(int(np.uint16(item.expected).view(np.int16)))
            self._bits.append((item.flat, positions, old, new))

    def run(self) -> list[Counts]:
        import torch

        if not self._bits:
            return []
        counts = []
        for flat, positions, old, new in self._bits:
            found = dispatch.scatter(flat, positions, new)
            stale = (found != old).sum()
            # what is put back is what was there
            old.copy_(found)
            counts += [stale, (dispatch.gather(flat, positions) != new).sum()]
        return [(stale, unwritten) for stale, unwritten in torch.stack(counts).reshape(-1, 2).tolist()]

    def undo(self) -> bool:
        import torch

        for flat, positions, old, _ in self._bits:
            dispatch.scatter(flat, positions, old)
        return all(torch.equal(dispatch.gather(flat, positions), old) for flat, positions, old, _ in self._bits)


def _change_of_digest(item: Change, old: torch.Tensor, new: torch.Tensor) -> tuple[int, int]:
    if item.indices is None:
        return 0, 0
    before = dispatch.digest_sparse(item.indices, old, item.keys)
    after = dispatch.digest_sparse(item.indices, new, item.keys)
    return (after[0] - before[0]) % (1 << 64), (after[1] - before[1]) % (1 << 64)
