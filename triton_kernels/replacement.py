# SPDX-License-Identifier: Apache-2.0
"""Writing a planned change into live parameters: everything that can be prepared is prepared before.

Letters: `M` elements of a storage, `K` changed elements in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from delta_wire.kernels import dispatch
from delta_wire.kernels.devices import is_on_host, require, to_host, to_torch

if TYPE_CHECKING:
    import torch

# elements that a thread takes at a time
_CHUNK = 1 << 15
# that many elements are not worth a second thread
_ALONE = 1 << 17


class Replacement:
    """Bits of one storage that are to take the place of others.

    Args:
        flat (`torch.Tensor`): int16 `[M]`, the storage.
        positions (`torch.Tensor`): int64 `[K]`, no repeats, already checked to lie in `[0, M)`.
        old (`torch.Tensor`): int16 `[K]`, what must be there; becomes what was there.
        new (`torch.Tensor`): int16 `[K]`, what will be there.
    """

    __slots__ = ("flat", "new", "old", "positions")

    def __init__(self, flat: torch.Tensor, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor):
        num_changed = positions.numel()
        require(
            old.numel() == num_changed and new.numel() == num_changed,
            f"Replacement: {num_changed} positions, {old.numel()} old and {new.numel()} new bits",
        )
        self.flat, self.positions, self.old, self.new = flat, positions, old, new

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """On another device: enqueue it; the two counts stay there."""
        found = dispatch.scatter(self.flat, self.positions, self.new)
        stale = (found != self.old).sum()
        self.old.copy_(found)
        return stale, (dispatch.gather(self.flat, self.positions) != self.new).sum()


class Replacements:
    """Replacements of one device, ready to be carried out at once.

    On a CPU one list of addresses is made of them, so that one call of a kernel does what would be hundreds: their
    `old` and `new` bits become views of common arrays.

    Args:
        items (list of `Replacement`): no two of the same element.
    """

    def __init__(self, items: Sequence[Replacement]):
        self.items = items
        self._on_host = bool(items) and is_on_host(items[0].flat)
        if not self._on_host:
            return
        self._bounds = np.cumsum([0, *(item.positions.numel() for item in items)])
        size = int(self._bounds[-1])
        self._addresses = np.empty(size, dtype=np.uint64)
        self._old, self._new = np.empty(size, dtype=np.uint16), np.empty(size, dtype=np.uint16)
        for item, (start, stop) in zip(items, pairwise(self._bounds.tolist()), strict=True):
            part = slice(start, stop)
            # two bytes an element
            np.left_shift(item.positions.numpy().view(np.uint64), 1, out=self._addresses[part])
            self._addresses[part] += np.uint64(item.flat.data_ptr())
            self._old[part], self._new[part] = to_host(item.old, np.uint16), to_host(item.new, np.uint16)
            item.old, item.new = to_torch(self._old[part]), to_torch(self._new[part])

    def run(self) -> list[tuple[int, int]]:
        """Carry them out, all of them whatever is found; the host waits for the device once.

        Returns:
            For each item the number of elements that did not hold the old bits, and of those that do not hold the new
            bits when read back.
        """
        if not self.items:
            return []
        if not self._on_host:
            import torch

            counts = torch.stack([count for item in self.items for count in item.run()]).reshape(-1, 2)
            return [(stale, unwritten) for stale, unwritten in counts.tolist()]
        size = self._addresses.size
        work = iter(range(0, size, _CHUNK))
        # whichever thread is free takes the next piece: the machine may be busy
        beside = [dispatch.beside(self._work, work)] if size > _ALONE else []
        try:
            counts = self._work(work)
        finally:
            # whoever takes it back must not meet a thread that still writes
            wait(beside)
        for future in beside:
            counts += future.result()
        return [(stale, unwritten) for stale, unwritten in counts.tolist()]

    def _work(self, starts: Iterator[int]) -> np.ndarray:
        from delta_wire.kernels import cpu

        counts = np.zeros((len(self.items), 2), dtype=np.int64)
        for start in starts:
            stop = min(start + _CHUNK, self._addresses.size)
            cpu.replace(self._addresses, self._old, self._new, self._bounds, counts, start, stop)
        return counts
