# SPDX-License-Identifier: Apache-2.0
"""Changing live parameters: everything that can be prepared is prepared before, also what it adds to the digest.

Letters: `M` elements of a storage, `K` changed elements in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from delta_wire.kernels import second
from delta_wire.kernels.devices import is_on_host, require, uses_triton

if TYPE_CHECKING:
    import torch

# elements that a thread takes at a time
_CHUNK = 1 << 15
# that many elements are not worth a second thread
_ALONE = 1 << 17
# a millisecond or so
_LOOKS = 100_000
# number of a change → elements that did not hold the old bits, and elements that do not hold the new bits when read
# back; of those changes that have any
Wrong = dict[int, tuple[int, int]]


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

    def run(self) -> Wrong:
        """Carry them out, all of them whatever is found; the host waits for the device once. Returns what is wrong."""
        ...

    def undo(self) -> bool:
        """Put back what was there. Returns whether all of it is there again, read back."""
        ...


def replacements(items: Sequence[Change]) -> Replacements:
    """Prepare changes of one device, no two of the same element, from the bits that are live now.

    What they were made of is not kept: on a CPU 6 bytes an element are, and 8 more of each that lies before the last
    one, or more than 65,535 elements after it.

    Raises:
        OutsideError: before anything is read.
    """
    for item in items:
        sizes = {len(part) for part in (item.positions, item.values, item.relative, item.indices) if part is not None}
        require(len(sizes) == 1, f"replacements: arrays of a change have {sorted(sizes)} elements")
    if not items or is_on_host(items[0].flat):
        return _OnHost(items)
    from delta_wire.kernels import device_replace

    form = device_replace.OnTriton if uses_triton(items[0].flat) else device_replace.OnDevice
    return form(items)


class _OnHost:
    """One list of places, so that one call of a kernel does what would be hundreds."""

    def __init__(self, items: Sequence[Change]):
        # vLLM's workers on a CPU do not start where the compiler below it was imported before they fork
        from delta_wire.kernels import cpu_replace

        self._kernels = cpu_replace
        # whose addresses are held
        self._storages = [item.flat for item in items]
        # a thread that comes late must find the stretches that the places were made for
        self._every = _CHUNK
        self._bounds = np.cumsum([0, *(item.positions.size for item in items)])
        size = int(self._bounds[-1])
        addresses, self._new = np.empty(size, dtype=np.uint64), np.empty(size, dtype=np.uint16)
        if items:
            np.concatenate([item.positions for item in items], out=addresses.view(np.int64))
            np.concatenate([item.values for item in items], out=self._new)
        self._gaps, jumps = np.empty(size, dtype=np.uint16), np.empty(size, dtype=np.uint64)
        self._firsts = np.empty(-(-size // self._every), dtype=np.int64)
        outside, num_jumps = cpu_replace.place(
            np.array([item.flat.data_ptr() for item in items], dtype=np.uint64),
            np.array([item.flat.numel() for item in items], dtype=np.uint64),
            self._bounds,
            addresses,
            self._every,
            self._gaps,
            jumps,
            self._firsts,
        )
        if outside >= 0:
            raise OutsideError(int(outside))
        self._jumps = jumps[:num_jumps].copy()
        self._old = np.empty(size, dtype=np.uint16)
        lanes = np.zeros((len(items), 2), dtype=np.uint64)
        cpu_replace.prepare(
            addresses,
            self._bounds,
            joined([item.indices for item in items], np.int32, items),
            joined([item.relative for item in items], np.bool_, items),
            np.array([item.keys for item in items], dtype=np.uint64).reshape(-1, 2),
            self._old,
            self._new,
            lanes,
        )
        self.lanes = [
            (0, 0) if item.indices is None else (lane_0, lane_1)
            for item, (lane_0, lane_1) in zip(items, lanes.tolist(), strict=True)
        ]
        for at, item in enumerate(items):
            if item.expected is not None:
                self._old[self._bounds[at] : self._bounds[at + 1]] = item.expected

    def run(self) -> Wrong:
        return self._swap(self._old, self._new)

    def undo(self) -> bool:
        return not any(unwritten for _, unwritten in self._swap(self._new, self._old).values())

    def _swap(self, old: np.ndarray, new: np.ndarray) -> Wrong:
        progress = np.zeros(3, dtype=np.uint64)
        # of this thread, and of one beside
        counts = np.zeros((2, len(self.lanes), 2), dtype=np.int64)
        beside = second.Handed(lambda: self._work(old, new, progress, counts[1], 0))
        try:
            if self._gaps.size > _ALONE:
                second.hand(beside)
            num_wrong = self._work(old, new, progress, counts[0], _LOOKS)
            # a thread that has found nothing to do is not waited for: the machine may be busy
            error = beside.stop() if num_wrong < 0 else None
        except BaseException:
            # whoever takes it back must not meet a thread that still writes; an interrupt may come anywhere above
            beside.stop()
            raise
        if error:
            raise error
        return only_wrong(counts.sum(axis=0).tolist()) if num_wrong else {}

    def _work(self, old: np.ndarray, new: np.ndarray, progress: np.ndarray, counts: np.ndarray, looks: int) -> int:
        places = self._gaps, self._jumps, self._firsts, self._every
        return self._kernels.replace(*places, old, new, self._bounds, counts, progress, looks)


def only_wrong(counts: list[list[int]]) -> Wrong:
    """Of the two counts of every change those that are not zero."""
    return {at: (stale, unwritten) for at, (stale, unwritten) in enumerate(counts) if stale or unwritten}


def joined(arrays: list[np.ndarray | None], dtype: type[np.generic], items: Sequence[Change]) -> np.ndarray:
    """All entries of all changes, zeros for those that have none; empty if nobody has any."""
    if all(array is None for array in arrays):
        return np.empty(0, dtype=dtype)
    filled = [
        np.zeros(item.positions.size, dtype=dtype) if array is None else array
        for array, item in zip(arrays, items, strict=True)
    ]
    return np.concatenate(filled)
