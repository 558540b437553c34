# SPDX-License-Identifier: Apache-2.0
"""Magnitudes level by level on a GPU: which elements have a higher top bit, and the low bits of those that have not.

See `cpu_steps`. A level's list holds, group by group, the elements that outlived the level before.

Letters: `K` elements, `G` groups with statistics of their own, `L` elements of a level, over all groups.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from delta_wire.kernels.triton_common import get_bits, jit, load_block, or_bits, store_block

# columns of the table of a level: where a group's list, its survivors, its segment and its raw bits begin, survivors
_LIST, _KEPT, _SEGMENT, _RAW, _SIZE = (tl.constexpr(column) for column in range(5))
_ROW = tl.constexpr(5)


@jit("level", "num_members")
def split_kernel(
    p_magnitude,
    p_sums,
    p_group,
    p_table,
    p_levels,
    p_next,
    p_raw,
    level,
    num_members,
    BLOCK: tl.constexpr,
):
    """One level of `cpu_steps`. Reads 16 L bytes, writes 12 a survivor and `level` bits a drop-out.

    Args:
        p_magnitude: int32 `[L]`.
        p_sums: int64 `[L]`, survivors up to and including each element, over all groups.
        p_group: int32 `[L]`.
        p_table: int64 `[G, 5]`.
        p_levels: int64, the segments of all levels.
        p_next: int32, the survivors' magnitudes.
        p_raw: int64 words, zero where nothing was written.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_members - base
    o = tl.arange(0, BLOCK)
    keep = o < left
    magnitude = load_block(p_magnitude + base, left, BLOCK)
    sums = load_block(p_sums + base, left, BLOCK)
    p_row = p_table + load_block(p_group + base, left, BLOCK).to(tl.int64) * _ROW
    survives = keep & ((magnitude >> level) >= 2)
    rank = base + o - tl.load(p_row + _LIST, mask=keep, other=0)
    before = sums - survives.to(tl.int64) - tl.load(p_row + _KEPT, mask=keep, other=0)
    p_segment = p_levels + tl.load(p_row + _SEGMENT, mask=keep, other=0)
    tl.store(p_segment + before, rank, mask=survives)
    tl.store(p_next + sums - 1, magnitude, mask=survives)
    at = tl.load(p_row + _RAW, mask=keep, other=0) + (rank - before) * level
    low = (magnitude & ((1 << level) - 1)).to(tl.int64)
    or_bits(p_raw, at, low, level, keep & ~survives & (level > 0))


@jit("num_survivors")
def survive_kernel(p_list, p_levels, p_group, p_table, p_next, num_survivors, BLOCK: tl.constexpr):
    """Elements that outlive a level. Reads 12 bytes an element and gathers 8, writes 8.

    Args:
        p_list: int64 `[L]`, element numbers.
        p_levels: int64, decoded segments of all levels.
        p_group: int32 `[survivors]`.
        p_table: int64 `[G, 5]`.
        p_next: int64 `[survivors]`, element numbers.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_survivors - base
    o = tl.arange(0, BLOCK)
    keep = o < left
    p_row = p_table + load_block(p_group + base, left, BLOCK).to(tl.int64) * _ROW
    at = base + o - tl.load(p_row + _KEPT, mask=keep, other=0) + tl.load(p_row + _SEGMENT, mask=keep, other=0)
    member = tl.load(p_row + _LIST, mask=keep, other=0) + tl.load(p_levels + at, mask=keep, other=0)
    store_block(p_next + base, tl.load(p_list + member, mask=keep, other=0), left, BLOCK)


@jit("level", "depth", "num_dropped")
def drop_kernel(
    p_list,
    p_levels,
    p_group,
    p_table,
    p_raw,
    p_step,
    level,
    depth,
    num_dropped,
    BLOCK: tl.constexpr,
):
    """Magnitudes of the elements that drop out at a level above zero: those that its segments do not list, found by
    bisection as in `triton_pack.complement_kernel`. Reads 12 bytes an element and up to `8 depth`, writes 2.

    Args:
        p_list: int64 `[L]`, element numbers.
        p_levels: int64, decoded segments of all levels.
        p_group: int32 `[dropped]`.
        p_table: int64 `[G, 5]`.
        p_raw: int64 words.
        p_step: int16 `[K]`.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_dropped - base
    o = tl.arange(0, BLOCK)
    keep = o < left
    p_row = p_table + load_block(p_group + base, left, BLOCK).to(tl.int64) * _ROW
    start = tl.load(p_row + _LIST, mask=keep, other=0)
    p_segment = p_levels + tl.load(p_row + _SEGMENT, mask=keep, other=0)
    # drop-outs before a group are the elements before it that did not survive
    rank = base + o - (start - tl.load(p_row + _KEPT, mask=keep, other=0))
    low = tl.zeros([BLOCK], tl.int64)
    high = tl.load(p_row + _SIZE, mask=keep, other=0)
    for _ in range(depth):
        open = low < high
        middle = (low + high) >> 1
        before = tl.load(p_segment + middle, mask=open, other=0) - middle <= rank
        low = tl.where(open & before, middle + 1, low)
        high = tl.where(open & ~before, middle, high)
    element = tl.load(p_list + start + rank + low, mask=keep, other=0)
    at = tl.load(p_row + _RAW, mask=keep, other=0) + rank * level
    bits = get_bits(p_raw, at, tl.zeros([BLOCK], tl.int64) + level, keep)
    tl.store(p_step + element, ((1 << level) | bits.to(tl.int32)).to(tl.int16), mask=keep)


def owners(sizes: np.ndarray, device: torch.device) -> torch.Tensor:
    """The group that each element of a list belongs to, int32."""
    groups = torch.arange(sizes.size, dtype=torch.int32, device=device)
    return torch.repeat_interleave(groups, torch.from_numpy(sizes).to(device), output_size=int(sizes.sum()))


def level_tables(group: np.ndarray, counts: np.ndarray, raw_bits: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """For each level that holds elements: its number, the groups' sizes, and the table, int64 `[G, 5]`."""
    sizes = np.concatenate([group[:, None], counts[:, :-1]], axis=1)
    dropped_bits = (sizes - counts) * np.arange(16)
    segment = (np.cumsum(counts) - counts.reshape(-1)).reshape(counts.shape)
    raw = raw_bits + (np.cumsum(dropped_bits) - dropped_bits.reshape(-1)).reshape(counts.shape)
    tables = []
    for level in range(16):
        if sizes[:, level].any():
            own, kept = sizes[:, level], counts[:, level]
            columns = (np.cumsum(own) - own, np.cumsum(kept) - kept, segment[:, level], raw[:, level], kept)
            tables.append((level, np.ascontiguousarray(own), np.stack(columns, axis=1)))
    return tables
