# SPDX-License-Identifier: Apache-2.0
"""Where the parts of segmented Rice codes lie, from what the host knows: universes and counts.

Letters: `S` segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# columns of the table: where a segment's coded elements begin and how many there are, the same for its listed
# members, whether it codes holes, low bits of an element, where they begin, size of the universe
CODED, MEMBERS, HOLES, LOW_BITS, LOW_START, UNIVERSE = 0, 2, 4, 5, 6, 7
COLUMNS = 8


@dataclass(frozen=True)
class Segments:
    """Layout of all segments of a file.

    Attributes:
        table: int64 `[S, COLUMNS]`.
        num_coded, num_members: coded elements and listed positions of all segments.
        low_bits: size of the stream of low bits.
        high_bits: the most that the unary stream can take.
        longest: the longest list of coded elements (`CODED`) and of members (`MEMBERS`) of a segment that codes holes.
    """

    table: np.ndarray
    num_coded: int
    num_members: int
    low_bits: int
    high_bits: int
    longest: dict[int, int]

    @classmethod
    def of(cls, n: np.ndarray, count: np.ndarray) -> Segments:
        """Layout from universes and counts, int64 `[S]` each; see `cpu_rice` for the rules."""
        holes = 2 * count > n
        coded = np.where(holes, n - count, count)
        k = np.zeros_like(n)
        while (short := (coded > 0) & ((2000 * coded << k) < 481 * (2 * n - coded))).any():
            k += short
        low = coded * k
        starts = [np.cumsum(size) - size for size in (coded, count, low)]
        table = np.stack([starts[0], coded, starts[1], count, holes, k, starts[2], n], axis=1).astype(np.int64)
        high_bits = int((coded + ((n - coded) >> k))[coded > 0].sum())
        longest = {CODED: int(coded[holes].max(initial=0)), MEMBERS: int(count[holes].max(initial=0))}
        return cls(table, int(coded.sum()), int(count.sum()), int(low.sum()), high_bits, longest)

    @property
    def has_holes(self) -> bool:
        """Whether any segment codes holes."""
        return bool(self.table[:, HOLES].any())
