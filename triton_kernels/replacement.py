# SPDX-License-Identifier: Apache-2.0
"""Writing a planned change into live parameters: everything that can be prepared is prepared before.

Letters: `M` elements of a storage, `K` changed elements in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING

import numpy as np

from delta_wire.kernels import dispatch
from delta_wire.kernels.devices import is_on_host, require, to_host

if TYPE_CHECKING:
    import torch

# what a thread takes at a time
_CHUNK = 1 << 13
# that many chunks are not worth a second thread
_ALONE = 16


class Replacement:
    """Bits of one storage that are to take the place of others.

    Args:
        flat (`torch.Tensor`): int16 `[M]`, the storage.
        positions (`torch.Tensor`): int64 `[K]`, no repeats, already checked to lie in `[0, M)`.
        old (`torch.Tensor`): int16 `[K]`, what must be there; becomes what was there.
        new (`torch.Tensor`): int16 `[K]`, what will be there.
    """

    __slots__ = ("_chunks", "flat", "new", "old", "positions")

    def __init__(self, flat: torch.Tensor, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor):
        num_changed = positions.numel()
        require(
            old.numel() == num_changed and new.numel() == num_changed,
            f"Replacement: {num_changed} positions, {old.numel()} old and {new.numel()} new bits",
        )
        self.flat, self.positions, self.old, self.new = flat, positions, old, new
        self._chunks: list[tuple[np.ndarray, ...]] = []
        if is_on_host(flat):
            bits = to_host(flat, np.uint16)
            listed = (positions.numpy(), to_host(old, np.uint16), to_host(new, np.uint16))
            for start in range(0, num_changed, _CHUNK):
                self._chunks.append((bits, *(array[start : start + _CHUNK] for array in listed)))

    @property
    def chunks(self) -> list[tuple[np.ndarray, ...]]:
        """On a CPU: what is there to do, in pieces for several threads."""
        return self._chunks

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """On another device: enqueue it; the two counts stay there."""
        found = dispatch.scatter(self.flat, self.positions, self.new)
        stale = (found != self.old).sum()
        self.old.copy_(found)
        return stale, (dispatch.gather(self.flat, self.positions) != self.new).sum()


def replace(replacements: Sequence[Replacement]) -> list[tuple[int, int]]:
    """Carry out replacements of one device, all of them whatever is found; its host waits for the device once.

    Returns:
        For each one the number of elements that did not hold the old bits, and of those that do not hold the new bits
        when read back.
    """
    if not replacements:
        return []
    if not is_on_host(replacements[0].flat):
        import torch

        counts = torch.stack([count for item in replacements for count in item.run()]).reshape(-1, 2)
        return [(stale, unwritten) for stale, unwritten in counts.tolist()]
    found = [[0, 0] for _ in replacements]
    chunks = [(at, chunk) for at, item in enumerate(replacements) for chunk in item.chunks]
    work = iter(chunks)
    # whichever thread is free takes the next piece: the machine may be busy
    counts = [dispatch.beside(_work, work)] if len(chunks) > _ALONE else []
    try:
        here = _work(work)
    finally:
        # whoever takes it back must not meet a thread that still writes
        wait(counts)
    for at, stale, unwritten in [*here, *(count for future in counts for count in future.result())]:
        found[at][0] += stale
        found[at][1] += unwritten
    return [(stale, unwritten) for stale, unwritten in found]


def _work(chunks: Iterator[tuple[int, tuple[np.ndarray, ...]]]) -> list[tuple[int, int, int]]:
    from delta_wire.kernels import cpu

    return [(at, *cpu.replace(*chunk)) for at, chunk in chunks]
