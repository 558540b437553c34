# SPDX-License-Identifier: Apache-2.0
"""Steps on the monotone bf16 line on a GPU; the streams are those of `cpu_steps`, bit for bit.

The number of magnitudes above each level is part of the file, so the host reads these counts; everything else has a
size that follows from them. Levels are worked off one after another, each on the survivors of the one before.

Letters: `K` elements, `G` groups with statistics of their own.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from delta_wire.kernels.triton_common import jit, load_block, num_blocks, require_block, store_block
from delta_wire.kernels.triton_levels import drop_kernel, level_tables, owners, split_kernel, survive_kernel

BLOCK = 1024
_LEVELS = tl.constexpr(16)


@jit()
def _line(bits):
    """See `cpu_steps.line`, uint16."""
    return tl.where((bits & 0x8000) != 0, bits ^ 0x7FFF, bits)


@jit("num_elements")
def steps_kernel(
    p_old,
    p_new,
    p_bounds,
    p_groups,
    p_magnitude,
    p_signs,
    p_tops,
    num_elements,
    BLOCK: tl.constexpr,
):
    """Magnitudes and signs of the steps, and a histogram of the magnitudes' top bits. Reads 4 K bytes, writes 4.1 K.

    Args:
        p_old, p_new: int16 `[K]`.
        p_bounds: int64 `[G + 1]`, where the groups begin.
        p_groups: int32 `[programs, 2]`, first and last group that a program meets.
        p_magnitude: int32 `[K]`.
        p_signs: int64 words, one bit an element.
        p_tops: int64 `[G, 16]`, zero before.
    """
    program = tl.program_id(0).to(tl.int64)
    base = program * BLOCK
    left = num_elements - base
    old = load_block(p_old + base, left, BLOCK).to(tl.uint16, bitcast=True)
    new = load_block(p_new + base, left, BLOCK).to(tl.uint16, bitcast=True)
    step = (_line(new) - _line(old)).to(tl.uint16)
    negative = step > 0x8000
    magnitude = tl.where(negative, 0x10000 - step.to(tl.int32), step.to(tl.int32))
    store_block(p_magnitude + base, magnitude, left, BLOCK)
    o_word = tl.arange(0, BLOCK // 64)
    signs = tl.reshape(negative, [BLOCK // 64, 64]).to(tl.uint64) << tl.arange(0, 64)[None, :].to(tl.uint64)
    words = tl.sum(signs, axis=1).to(tl.int64, bitcast=True)
    tl.store(p_signs + base // 64 + o_word, words, mask=o_word * 64 < left)
    # exact: a magnitude has 16 bits
    top = (magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    o = base + tl.arange(0, BLOCK)
    o_level = tl.arange(0, _LEVELS)
    for group in range(tl.load(p_groups + program * 2), tl.load(p_groups + program * 2 + 1) + 1):
        own = (o >= tl.load(p_bounds + group)) & (o < tl.load(p_bounds + group + 1))
        # an element of no magnitude does not occur in a delta and must not leave the table
        tops = tl.histogram(tl.maximum(top, 0), _LEVELS, mask=own)
        p_row = p_tops + group * _LEVELS + o_level
        tl.atomic_add(p_row, tops.to(tl.int64), mask=tops > 0, sem="relaxed")


@jit("num_elements")
def sign_kernel(p_step, p_raw, num_elements, BLOCK: tl.constexpr):
    """Give magnitudes their signs, in place. Reads 2.1 K bytes, writes 2 K."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_elements - base
    magnitude = load_block(p_step + base, left, BLOCK).to(tl.uint16, bitcast=True)
    o_word = tl.arange(0, BLOCK // 64)
    words = tl.load(p_raw + base // 64 + o_word, mask=o_word * 64 < left, other=0).to(tl.uint64, bitcast=True)
    negative = (words[:, None] >> tl.arange(0, 64)[None, :].to(tl.uint64)) & 1
    negative = tl.reshape(negative, [BLOCK]) != 0
    step = tl.where(negative, (magnitude ^ 0xFFFF) + 1, magnitude).to(tl.int16, bitcast=True)
    store_block(p_step + base, step, left, BLOCK)


@jit("num_elements")
def apply_kernel(p_old, p_step, p_new, num_elements, BLOCK: tl.constexpr):
    """`new` = `old` moved by `step` along the monotone line. Reads 4 K bytes, writes 2 K."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_elements - base
    old = load_block(p_old + base, left, BLOCK).to(tl.uint16, bitcast=True)
    step = load_block(p_step + base, left, BLOCK).to(tl.uint16, bitcast=True)
    new = _line((_line(old) + step).to(tl.uint16)).to(tl.int16, bitcast=True)
    store_block(p_new + base, new, left, BLOCK)


def encode_steps(
    old: torch.Tensor, new: torch.Tensor, group: np.ndarray, *, block: int = BLOCK
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.encode_steps`]. The host reads the counts, once."""
    num_elements = int(group.sum())
    require_block(old, torch.int16, num_elements, "encode_steps: the old bits")
    require_block(new, torch.int16, num_elements, "encode_steps: the new bits")
    device = old.device
    magnitude = torch.empty(num_elements, dtype=torch.int32, device=device)
    signs = torch.empty((num_elements + 63) // 64, dtype=torch.int64, device=device)
    tops = torch.zeros((group.size, 16), dtype=torch.int64, device=device)
    if num_elements:
        bounds = np.concatenate([[0], np.cumsum(group)])
        starts = np.arange(0, num_elements, block)
        ends = np.minimum(starts + block, num_elements) - 1
        met = np.stack([np.searchsorted(bounds, edge, side="right") - 1 for edge in (starts, ends)], axis=1)
        steps_kernel[(starts.size,)](
            old,
            new,
            torch.from_numpy(bounds).to(device),
            torch.from_numpy(met.astype(np.int32)).to(device),
            magnitude,
            signs,
            tops,
            num_elements,
            BLOCK=block,
        )
    host = tops.cpu().numpy()
    counts = host.sum(axis=1, keepdims=True) - host.cumsum(axis=1)
    raw = torch.zeros((num_elements + int(counts.sum()) + 63) // 64, dtype=torch.int64, device=device)
    raw[: signs.numel()] = signs
    levels = torch.empty(int(counts.sum()), dtype=torch.int64, device=device)
    for level, sizes, table in level_tables(group, counts, num_elements):
        survivors = int(counts[:, level].sum())
        sums = torch.cumsum(magnitude >= 2 << level, 0, dtype=torch.int64)
        following = torch.empty(survivors, dtype=torch.int32, device=device)
        grid = (num_blocks(magnitude.numel(), block),)
        split_kernel[grid](
            magnitude,
            sums,
            owners(sizes, device),
            torch.from_numpy(table).to(device),
            levels,
            following,
            raw,
            level,
            magnitude.numel(),
            BLOCK=block,
        )
        magnitude = following
    return counts, levels, raw


def decode_steps(
    levels: torch.Tensor, group: np.ndarray, counts: np.ndarray, raw: torch.Tensor, *, block: int = BLOCK
) -> torch.Tensor:
    """See [`delta_wire.kernels.decode_steps`]. No host round trip."""
    num_elements = int(group.sum())
    require_block(levels, torch.int64, int(counts.sum()), "decode_steps: the levels")
    require_block(raw, torch.int64, (num_elements + int(counts.sum()) + 63) // 64, "decode_steps: the raw words")
    device = levels.device
    step = torch.ones(num_elements, dtype=torch.int16, device=device)
    current = torch.arange(num_elements, dtype=torch.int64, device=device)
    for level, sizes, table in level_tables(group, counts, num_elements):
        rows = torch.from_numpy(table).to(device)
        kept = counts[:, level]
        dropped = sizes - kept
        if level and dropped.any():
            num_dropped = int(dropped.sum())
            drop_kernel[(num_blocks(num_dropped, block),)](
                current,
                levels,
                owners(dropped, device),
                rows,
                raw,
                step,
                level,
                int(kept.max()).bit_length(),
                num_dropped,
                BLOCK=block,
            )
        survivors = int(kept.sum())
        following = torch.empty(survivors, dtype=torch.int64, device=device)
        if survivors:
            survive_kernel[(num_blocks(survivors, block),)](
                current, levels, owners(kept, device), rows, following, survivors, BLOCK=block
            )
        current = following
    if num_elements:
        sign_kernel[(num_blocks(num_elements, block),)](step, raw, num_elements, BLOCK=block)
    return step


def apply_steps(old: torch.Tensor, step: torch.Tensor, *, block: int = BLOCK) -> torch.Tensor:
    """See [`delta_wire.kernels.apply_steps`]."""
    require_block(old, torch.int16, step.numel(), "apply_steps: the old bits")
    require_block(step, torch.int16, old.numel(), "apply_steps: the steps")
    new = torch.empty_like(old)
    if old.numel():
        apply_kernel[(num_blocks(old.numel(), block),)](old, step, new, old.numel(), BLOCK=block)
    return new
