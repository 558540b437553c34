# SPDX-License-Identifier: Apache-2.0
"""Blocks of flat indices: what a loader copies, and whether a set of them covers something exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

# an axis: its size, and for each of the views described together the distance between neighbours along it
Axis = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `start + Σ i_d · steps_d` for all `0 ≤ i_d < sizes_d`; at least one axis, and no element twice."""

    start: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    @property
    def stop(self) -> int:
        """One behind the last element."""
        return self.start + 1 + sum((size - 1) * step for size, step in zip(self.sizes, self.steps, strict=True))

    @property
    def is_run(self) -> bool:
        """Whether the elements follow each other without a gap."""
        return self.stop - self.start == self.num_elements

    def halves(self, upper: bool) -> Block:
        """The upper or lower halves of elements of twice the size, counted in halves as they lie in memory."""
        return Block(2 * self.start + upper, self.sizes, tuple(2 * step for step in self.steps))

    def merged(self) -> Block:
        """The same elements in as few axes as possible: the form in which blocks of two ranks are compared."""
        axes = merge_axes([(size, (step,)) for size, step in zip(self.sizes, self.steps, strict=True) if size > 1])
        axes = axes or [(1, (1,))]
        return Block(self.start, tuple(size for size, _ in axes), tuple(steps[0] for _, steps in axes))


def merge_axes(axes: list[Axis]) -> list[Axis]:
    """Join neighbouring axes that run on without a jump in every view."""
    merged: list[Axis] = []
    for size, steps in axes:
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    return merged


class Coverage(NamedTuple):
    """How many different elements a set of blocks holds, and whether two of them meet."""

    num_elements: int
    overlaps: bool


def coverage(num_elements: int, blocks: Sequence[Block]) -> Coverage:
    """Count what blocks cover of `[0, num_elements)`.

    Raises:
        ValueError: a block reaches outside.
    """
    for block in blocks:
        if block.start < 0 or block.stop > num_elements:
            raise ValueError(f"a block of [{block.start}, {block.stop}) reaches outside of {num_elements} elements")
    if all(block.is_run for block in blocks):
        ordered = sorted(blocks, key=lambda block: block.start)
        overlaps = any(left.stop > right.start for left, right in pairwise(ordered))
        if not overlaps:
            return Coverage(sum(block.num_elements for block in blocks), False)
    seen = np.zeros(num_elements, dtype=np.bool_)
    overlaps = False
    for block in blocks:
        part = np.lib.stride_tricks.as_strided(seen[block.start :], block.sizes, block.steps)
        overlaps = overlaps or bool(part.any())
        part[...] = True
    return Coverage(int(np.count_nonzero(seen)), overlaps)
