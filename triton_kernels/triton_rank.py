# SPDX-License-Identifier: Apache-2.0
"""Ranks within exponent classes on a GPU, restarting at every slab; the numbers are those of `cpu_rank`.

A histogram per block, a prefix sum over the blocks of a slab, and a count within one block give an element's rank;
the way back bisects the prefix sums for the block and finds the element in it. All slabs of a tensor are worked on at
once.

Letters: `N` elements of a tensor, `K` changed elements, `B` blocks, `Q` slabs, 256 exponents.
"""

from __future__ import annotations

import torch
import triton.language as tl

from delta_wire.kernels.triton_common import jit, load_block, num_blocks, require_block

BLOCK = 1024
# changed elements that a program compares with a block at a time, and whose blocks it searches
RANK_CHUNK = 8
SELECT_CHUNK = 4
_CLASSES = tl.constexpr(256)


@jit()
def _exponent(bits):
    return (bits.to(tl.int32) >> 7) & 0xFF


@jit("num_elements")
def histogram_kernel(p_bits, p_counts, num_elements, BLOCK: tl.constexpr):
    """Elements of each exponent in each block. Reads 2 N bytes, writes 1 KiB a block.

    Args:
        p_bits: int16 `[N]`.
        p_counts: int32 `[B, 256]`.
    """
    program = tl.program_id(0).to(tl.int64)
    base = program * BLOCK
    left = num_elements - base
    exponent = _exponent(load_block(p_bits + base, left, BLOCK))
    counts = tl.histogram(exponent, _CLASSES, mask=tl.arange(0, BLOCK) < left)
    tl.store(p_counts + program * _CLASSES + tl.arange(0, _CLASSES), counts)


@jit("num_elements")
def rank_kernel(
    p_bits,
    p_before,
    p_indices,
    p_bounds,
    p_exponent,
    p_rank,
    num_elements,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Exponent and rank of listed elements, block by block. Reads 2 N bytes and 10 K, writes 9 K.

    Args:
        p_bits: int16 `[N]`.
        p_before: int32 `[B, 256]`, elements of each exponent before each block, within its slab.
        p_indices: int32 or int64 `[K]`, ascending.
        p_bounds: int64 `[B + 1]`, where each block's listed elements begin.
        p_exponent: uint8 `[K]`.
        p_rank: int64 `[K]`.
    """
    program = tl.program_id(0).to(tl.int64)
    base = program * BLOCK
    stop = tl.load(p_bounds + program + 1)
    start = tl.load(p_bounds + program)
    if stop > start:
        o = tl.arange(0, BLOCK)
        exponents = _exponent(load_block(p_bits + base, num_elements - base, BLOCK))
        for chunk in range(start, stop, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            keep = at < stop
            within = (tl.load(p_indices + at, mask=keep, other=0).to(tl.int64) - base).to(tl.int32)
            p_listed = p_bits + base + within
            exponent = _exponent(tl.load(p_listed, mask=keep, other=0))
            # [CHUNK, BLOCK]
            earlier = (exponents[None, :] == exponent[:, None]) & (o[None, :] < within[:, None])
            before = tl.load(p_before + program * _CLASSES + exponent, mask=keep, other=0)
            rank = before + tl.sum(earlier.to(tl.int32), axis=1)
            tl.store(p_exponent + at, exponent.to(tl.uint8), mask=keep)
            tl.store(p_rank + at, rank.to(tl.int64), mask=keep)


@jit("blocks_per_slab", "depth", "num_ranks")
def select_kernel(
    p_bits,
    p_before,
    p_ranks,
    p_class,
    p_indices,
    num_elements,
    blocks_per_slab,
    depth,
    num_ranks,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Flat indices of elements given by slab, exponent and rank. Reads a block of `2 BLOCK` bytes an element, mostly
    from the cache, and `4 depth` bytes; writes 8.

    Accesses to the weights are wide where `N` is a multiple of 16, which Triton finds out by itself.

    Args:
        p_bits: int16 `[N]`.
        p_before: int32 `[Q * blocks_per_slab, 256]`, see [`rank_kernel`].
        p_ranks: int64 `[K]`.
        p_class: int32 `[K]`, slab times 256 plus exponent.
        p_indices: int64 `[K]`.
    """
    base = tl.program_id(0).to(tl.int64) * CHUNK
    at = base + tl.arange(0, CHUNK)
    keep = at < num_ranks
    rank = tl.load(p_ranks + at, mask=keep, other=0)
    own = tl.load(p_class + at, mask=keep, other=0)
    exponent = own % _CLASSES
    first = (own // _CLASSES).to(tl.int64) * blocks_per_slab
    # the last block that at most `rank` elements precede
    p_column = p_before + first * _CLASSES + exponent
    low = tl.zeros([CHUNK], tl.int64)
    high = tl.zeros([CHUNK], tl.int64) + blocks_per_slab
    for _ in range(depth):
        open = high - low > 1
        middle = (low + high) >> 1
        reached = tl.load(p_column + middle * _CLASSES, mask=keep & open, other=0) <= rank
        low = tl.where(open & reached, middle, low)
        high = tl.where(open & ~reached, middle, high)
    within = rank - tl.load(p_column + low * _CLASSES, mask=keep, other=0)
    # [CHUNK, BLOCK]
    o = (first + low)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = keep[:, None] & (o < num_elements)
    bits = tl.load(p_bits + o, mask=inside, other=0)
    match = inside & (_exponent(bits) == exponent[:, None])
    seen = tl.cumsum(match.to(tl.int32), 1)
    hit = match & (seen - 1 == within[:, None])
    tl.store(p_indices + at, tl.sum(tl.where(hit, o, 0), axis=1), mask=keep)


def class_counts(bits: torch.Tensor, slab_elements: int, *, block: int = BLOCK) -> torch.Tensor:
    """See [`delta_wire.kernels.class_counts`]."""
    return _histogram(bits, slab_elements, block).sum(1, dtype=torch.int64)


def class_ranks(
    bits: torch.Tensor, indices: torch.Tensor, slab_elements: int, *, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.class_ranks`]. Takes N bytes of scratch twice; no host round trip."""
    require_block(indices, indices.dtype, indices.numel(), "class_ranks: the indices")
    before = _before(_histogram(bits, slab_elements, block))
    exponent = torch.empty(indices.numel(), dtype=torch.uint8, device=bits.device)
    rank = torch.empty(indices.numel(), dtype=torch.int64, device=bits.device)
    programs = num_blocks(bits.numel(), block)
    if indices.numel():
        edges = torch.arange(programs + 1, dtype=torch.int64, device=bits.device) * block
        bounds = torch.searchsorted(indices.to(torch.int64), edges)
        rank_kernel[(programs,)](
            bits, before, indices, bounds, exponent, rank, bits.numel(), BLOCK=block, CHUNK=RANK_CHUNK
        )
    return exponent, rank


def class_select(
    bits: torch.Tensor, ranks: torch.Tensor, changed: torch.Tensor, slab_elements: int, *, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.class_select`]. Takes N bytes of scratch twice; no host round trip."""
    require_block(ranks, torch.int64, ranks.numel(), "class_select: the ranks")
    histogram = _histogram(bits, slab_elements, block)
    slabs, blocks_per_slab, _ = histogram.shape
    classes = torch.arange(slabs * 256, dtype=torch.int32, device=bits.device)
    own = torch.repeat_interleave(classes, changed.reshape(-1), output_size=ranks.numel())
    found = torch.empty(ranks.numel(), dtype=torch.int64, device=bits.device)
    if ranks.numel():
        select_kernel[(num_blocks(ranks.numel(), SELECT_CHUNK),)](
            bits,
            _before(histogram),
            ranks,
            own,
            found,
            bits.numel(),
            blocks_per_slab,
            blocks_per_slab.bit_length(),
            ranks.numel(),
            BLOCK=block,
            CHUNK=SELECT_CHUNK,
        )
    indices, slot = torch.sort(found)
    return indices, slot


def _histogram(bits: torch.Tensor, slab_elements: int, block: int) -> torch.Tensor:
    """Elements of each exponent in each block, int32 `[Q, blocks of a slab, 256]`."""
    require_block(bits, torch.int16, bits.numel(), "the bits of a tensor")
    if slab_elements % block:
        raise ValueError(f"a slab is whole blocks of {block} elements, found {slab_elements}")
    slabs = num_blocks(bits.numel(), slab_elements)
    programs = num_blocks(bits.numel(), block)
    # a tensor smaller than a slab needs no empty blocks
    per_slab = slab_elements // block if slabs > 1 else programs
    counts = torch.empty((slabs * per_slab, 256), dtype=torch.int32, device=bits.device)
    if programs:
        counts[programs:] = 0
        histogram_kernel[(programs,)](bits, counts, bits.numel(), BLOCK=block)
    return counts.reshape(slabs, per_slab, 256)


def _before(histogram: torch.Tensor) -> torch.Tensor:
    """Elements of each exponent before each block of its slab, int32, same shape."""
    return torch.cumsum(histogram, 1, dtype=torch.int32) - histogram
