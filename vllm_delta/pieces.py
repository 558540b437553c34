# SPDX-License-Identifier: Apache-2.0
"""Regions in pieces that a kernel takes, and elements of blocks by their place along each axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from vllm_delta.blocks import Block
from vllm_delta.regions import Region


def slices(region: Region, max_dims: int = 3, max_elements: int = 1 << 26) -> Iterator[tuple[Block, Block]]:
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
        piece = replace(region, source=_cut(source, at, count), target=_cut(target, at, count))
        yield from slices(piece, max_dims, max_elements)


def _cut(block: Block, at: int, count: int) -> Block:
    start = block.start + at * block.steps[0]
    if count == 1 and len(block.sizes) > 1:
        return Block(start, block.sizes[1:], block.steps[1:])
    return Block(start, (count, *block.sizes[1:]), block.steps)


def dot(block: Block, picks: tuple[np.ndarray, ...]) -> np.ndarray:
    """Flat indices of elements of a block, given by an index for each of its axes."""
    positions = np.full(picks[0].shape, block.start, dtype=np.int64)
    for along, step in zip(picks, block.steps, strict=True):
        positions += along * step
    return positions
