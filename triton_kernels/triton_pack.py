# SPDX-License-Identifier: Apache-2.0
"""Segmented Rice codes on a GPU; the streams are those of `cpu_rice`, bit for bit.

Which elements a segment codes, where its low bits start and how many there are follows from its universe and count,
which the host knows. Encoding is a map from positions to gaps, a prefix sum over the lengths of the unary codes, and a
map from gaps to bits. Decoding finds the ones of the unary stream (population counts, prefix sum, select), reads the
low bits, and turns gaps into positions by a prefix sum. Where more than half of a universe is listed, the holes are
coded; the same kernel turns members into holes and holes into members.

Letters: `S` segments, `C` coded elements of all of them, `P` listed positions, `W` words of the unary stream.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from delta_wire.kernels.segments import (
    CODED,
    COLUMNS,
    HOLES,
    LOW_BITS,
    LOW_START,
    MEMBERS,
    UNIVERSE,
    Segments,
)
from delta_wire.kernels.triton_common import (
    get_bits,
    jit,
    load_block,
    num_blocks,
    or_bits,
    popcount_wide,
    require_block,
    store_block,
)

BLOCK = 1024
_CODED, _HOLES, _LOW_BITS, _LOW_START, _UNIVERSE = (
    tl.constexpr(column) for column in (CODED, HOLES, LOW_BITS, LOW_START, UNIVERSE)
)
_ROW = tl.constexpr(COLUMNS)


@jit()
def _rows(p_segment, p_table, base, left, BLOCK: tl.constexpr):
    """The rows of the table that a block's elements belong to."""
    return p_table + load_block(p_segment + base, left, BLOCK).to(tl.int64) * _ROW


@jit("depth", "num_out")
def complement_kernel(
    p_source,
    p_segment,
    p_table,
    p_out,
    depth,
    num_out,
    SOURCE: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For segments that code holes, the elements that a list lacks; for the others a copy.

    Element `r` of the complement of an ascending list `a` is `r` plus the number of `i` with `a[i] - i <= r`, found by
    bisection in `depth` steps. Writes 8 bytes an element, reads up to `8 depth`, mostly from the cache.

    Args:
        p_source: int32 or int64, the lists one after another.
        p_segment: int32 `[num_out]`.
        p_table: int64 `[S, 8]`.
        p_out: int64 `[num_out]`.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_out - base
    o = tl.arange(0, BLOCK)
    keep = o < left
    p_row = _rows(p_segment, p_table, base, left, BLOCK)
    rank = base + o - tl.load(p_row + OUT, mask=keep, other=0)
    p_list = p_source + tl.load(p_row + SOURCE, mask=keep, other=0)
    is_hole = keep & (tl.load(p_row + _HOLES, mask=keep, other=0) != 0)
    low = tl.zeros([BLOCK], tl.int64)
    high = tl.load(p_row + (SOURCE + 1), mask=is_hole, other=0)
    for _ in range(depth):
        open = low < high
        middle = (low + high) >> 1
        before = tl.load(p_list + middle, mask=open, other=0).to(tl.int64) - middle <= rank
        low = tl.where(open & before, middle + 1, low)
        high = tl.where(open & ~before, middle, high)
    listed = tl.load(p_list + rank, mask=keep & ~is_hole, other=0).to(tl.int64)
    store_block(p_out + base, tl.where(is_hole, rank + low, listed), left, BLOCK)


@jit()
def _gaps(p_coded, p_segment, p_table, base, left, BLOCK: tl.constexpr):
    """Rows, ranks, low bits and gaps of a block of coded elements."""
    o = tl.arange(0, BLOCK)
    keep = o < left
    p_row = _rows(p_segment, p_table, base, left, BLOCK)
    rank = base + o - tl.load(p_row + _CODED, mask=keep, other=0)
    position = load_block(p_coded + base, left, BLOCK).to(tl.int64)
    p_before = p_coded + base - 1 + o
    previous = tl.load(p_before, mask=keep & (rank > 0), other=-1).to(tl.int64)
    return p_row, rank, tl.load(p_row + _LOW_BITS, mask=keep, other=0), position - previous - 1


@jit("num_coded")
def lengths_kernel(p_coded, p_segment, p_table, p_lengths, num_coded, BLOCK: tl.constexpr):
    """Bits of each element's unary code (int64). Reads 8 or 12 C bytes, writes 8 C."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_coded - base
    _, _, k, gap = _gaps(p_coded, p_segment, p_table, base, left, BLOCK)
    store_block(p_lengths + base, (gap >> k) + 1, left, BLOCK)


@jit("num_coded")
def emit_kernel(p_coded, p_segment, p_table, p_ends, p_low, p_high, num_coded, BLOCK: tl.constexpr):
    """Set every element's bits in the two streams. Reads 16 or 20 C bytes, updates up to three words an element.

    Args:
        p_coded: int32 or int64 `[C]`, strictly ascending within a segment.
        p_segment: int32 `[C]`.
        p_table: int64 `[S, 8]`.
        p_ends: int64 `[C]`, prefix sums of the lengths.
        p_low, p_high: int64 words, zero before.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_coded - base
    keep = tl.arange(0, BLOCK) < left
    p_row, rank, k, gap = _gaps(p_coded, p_segment, p_table, base, left, BLOCK)
    one = load_block(p_ends + base, left, BLOCK) - 1
    # several elements share a word, in whichever order they come
    tl.atomic_or(p_high + (one >> 6), tl.full([BLOCK], 1, tl.int64) << (one & 63), mask=keep, sem="relaxed")
    at = tl.load(p_row + _LOW_START, mask=keep, other=0) + rank * k
    or_bits(p_low, at, gap & ((tl.full([BLOCK], 1, tl.int64) << k) - 1), k, keep & (k > 0))


@jit("num_words")
def count_kernel(p_words, p_counts, num_words, BLOCK: tl.constexpr):
    """Ones of each word (int32). Reads 8 W bytes, writes 4 W."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_words - base
    words = load_block(p_words + base, left, BLOCK).to(tl.uint64, bitcast=True)
    store_block(p_counts + base, popcount_wide(words), left, BLOCK)


@jit("num_words", "num_ones")
def ones_kernel(p_words, p_sums, p_ones, num_words, num_ones, BLOCK: tl.constexpr):
    """Position of the i-th one, for the first `num_ones`. Reads 16 W bytes, writes 8 C.

    Args:
        p_words: int64 `[W]`.
        p_sums: int64 `[W]`, ones up to and including each word.
        p_ones: int64 `[C]`.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_words - base
    words = load_block(p_words + base, left, BLOCK).to(tl.uint64, bitcast=True)
    before = load_block(p_sums + base, left, BLOCK) - popcount_wide(words)
    # [BLOCK, 64]
    bit = tl.arange(0, 64)[None, :].to(tl.uint64)
    below = (tl.full([1, 64], 1, tl.uint64) << bit) - 1
    rank = before[:, None] + popcount_wide(words[:, None] & below)
    is_one = (((words[:, None] >> bit) & 1) != 0) & (rank < num_ones)
    position = (base + tl.arange(0, BLOCK))[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(p_ones + rank, position, mask=is_one)


@jit("num_coded")
def rebuild_kernel(p_ones, p_low, p_segment, p_table, p_bad, p_lengths, num_coded, BLOCK: tl.constexpr):
    """Distance of each coded element from the one before (int64). Reads 12 C bytes and the low stream, writes 8 C.

    Sets `p_bad` (int32 `[1]`) where a gap leaves its universe.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_coded - base
    o = tl.arange(0, BLOCK)
    keep = o < left
    p_row = _rows(p_segment, p_table, base, left, BLOCK)
    rank = base + o - tl.load(p_row + _CODED, mask=keep, other=0)
    one = load_block(p_ones + base, left, BLOCK)
    p_before = p_ones + base - 1 + o
    previous = tl.load(p_before, mask=keep & (base + o > 0), other=-1)
    quotient = one - previous - 1
    k = tl.load(p_row + _LOW_BITS, mask=keep, other=0)
    universe = tl.load(p_row + _UNIVERSE, mask=keep, other=0)
    at = tl.load(p_row + _LOW_START, mask=keep, other=0) + rank * k
    # where the quotient is too large to shift
    is_bad = keep & ((quotient < 0) | (quotient > (universe >> k)))
    gap = (tl.where(is_bad, 0, quotient) << k) | get_bits(p_low, at, k, keep)
    is_bad = is_bad | (keep & (gap >= universe))
    if tl.max(is_bad.to(tl.int32)) > 0:
        tl.store(p_bad, 1)
    store_block(p_lengths + base, tl.where(is_bad, 1, gap + 1), left, BLOCK)


@jit("num_coded")
def place_kernel(p_sums, p_segment, p_table, p_bad, p_coded, num_coded, BLOCK: tl.constexpr):
    """Positions from the running sums of the distances. Reads 12 C bytes, writes 8 C.

    Sets `p_bad` (int32 `[1]`) where a position leaves its universe.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_coded - base
    keep = tl.arange(0, BLOCK) < left
    p_row = _rows(p_segment, p_table, base, left, BLOCK)
    start = tl.load(p_row + _CODED, mask=keep, other=0)
    p_before = p_sums + start - 1
    before = tl.load(p_before, mask=keep & (start > 0), other=0)
    position = load_block(p_sums + base, left, BLOCK) - before - 1
    is_bad = keep & (position >= tl.load(p_row + _UNIVERSE, mask=keep, other=0))
    if tl.max(is_bad.to(tl.int32)) > 0:
        tl.store(p_bad, 1)
    store_block(p_coded + base, position, left, BLOCK)


def rice_encode(
    positions: torch.Tensor, n: np.ndarray, count: np.ndarray, *, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.rice_encode`]. No host round trip.

    Returns:
        `(low, high, high_bits)`: int64 words, those of `high` for the most bits there can be, and how many there are,
        int64 on the device.
    """
    segments = Segments.of(n, count)
    require_block(positions, positions.dtype, segments.num_members, "rice_encode: the positions")
    device = positions.device
    low = torch.zeros((segments.low_bits + 63) // 64, dtype=torch.int64, device=device)
    high = torch.zeros((segments.high_bits + 63) // 64, dtype=torch.int64, device=device)
    if not segments.num_coded:
        return low, high, torch.zeros((), dtype=torch.int64, device=device)
    table = torch.from_numpy(segments.table).to(device, non_blocking=True)
    segment = _owners(table, CODED, segments.num_coded)
    coded = _complement(positions, segments, table, segment, MEMBERS, CODED, block)
    grid = (num_blocks(segments.num_coded, block),)
    lengths = torch.empty(segments.num_coded, dtype=torch.int64, device=device)
    lengths_kernel[grid](coded, segment, table, lengths, segments.num_coded, BLOCK=block)
    ends = torch.cumsum(lengths, 0)
    emit_kernel[grid](coded, segment, table, ends, low, high, segments.num_coded, BLOCK=block)
    return low, high, ends[-1]


def rice_decode(
    low: torch.Tensor, high: torch.Tensor, n: np.ndarray, count: np.ndarray, *, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.rice_decode`]. No host round trip.

    Returns:
        `(positions, end)`: int64 each, on the device; `end` is the number of bits of `high` read, −1 where the streams
        do not fit the segments.
    """
    segments = Segments.of(n, count)
    require_block(low, torch.int64, low.numel(), "rice_decode: the low words")
    require_block(high, torch.int64, high.numel(), "rice_decode: the high words")
    device = low.device
    too_short = segments.low_bits > 64 * low.numel() or segments.num_coded > 64 * high.numel()
    if too_short:
        return torch.zeros(segments.num_members, dtype=torch.int64, device=device), torch.tensor(-1, device=device)
    table = torch.from_numpy(segments.table).to(device, non_blocking=True)
    num_coded = segments.num_coded
    coded = torch.empty(num_coded, dtype=torch.int64, device=device)
    end = torch.zeros((), dtype=torch.int64, device=device)
    if num_coded:
        ones, num_ones = _select(high, num_coded, block)
        segment = _owners(table, CODED, num_coded)
        grid = (num_blocks(num_coded, block),)
        bad = torch.zeros(1, dtype=torch.int32, device=device)
        lengths = torch.empty(num_coded, dtype=torch.int64, device=device)
        rebuild_kernel[grid](ones, low, segment, table, bad, lengths, num_coded, BLOCK=block)
        sums = torch.cumsum(lengths, 0)
        place_kernel[grid](sums, segment, table, bad, coded, num_coded, BLOCK=block)
        end = torch.where((bad[0] == 0) & (num_ones >= num_coded), ones[-1] + 1, -1)
    if not segments.has_holes:
        return coded, end
    segment = _owners(table, MEMBERS, segments.num_members)
    return _complement(coded, segments, table, segment, CODED, MEMBERS, block), end


def _owners(table: torch.Tensor, column: int, total: int) -> torch.Tensor:
    """The segment that each element belongs to, int32."""
    segments = torch.arange(table.shape[0], dtype=torch.int32, device=table.device)
    return torch.repeat_interleave(segments, table[:, column + 1], output_size=total)


def _complement(
    source: torch.Tensor,
    segments: Segments,
    table: torch.Tensor,
    segment: torch.Tensor,
    source_column: int,
    out_column: int,
    block: int,
) -> torch.Tensor:
    """Coded elements from members (`[P]` to `[C]`) or the other way round; the source itself where they are equal."""
    if not segments.has_holes:
        return source
    num_out = segment.numel()
    out = torch.empty(num_out, dtype=torch.int64, device=source.device)
    if num_out:
        grid = (num_blocks(num_out, block),)
        depth = segments.longest[source_column].bit_length()
        complement_kernel[grid](
            source, segment, table, out, depth, num_out, SOURCE=source_column, OUT=out_column, BLOCK=block
        )
    return out


def _select(words: torch.Tensor, num_ones: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the first `num_ones` ones (`[C]`) and the number of ones that there are, both int64."""
    counts = torch.empty(words.numel(), dtype=torch.int32, device=words.device)
    count_kernel[(num_blocks(words.numel(), block),)](words, counts, words.numel(), BLOCK=block)
    sums = torch.cumsum(counts, 0, dtype=torch.int64)
    # zeros, because a torn stream has too few ones to fill it
    ones = torch.zeros(num_ones, dtype=torch.int64, device=words.device)
    # a word is 64 elements of a tile
    rows = max(1, block // 64)
    ones_kernel[(num_blocks(words.numel(), rows),)](words, sums, ones, words.numel(), num_ones, BLOCK=rows)
    return ones, sums[-1]
