# SPDX-License-Identifier: Apache-2.0
"""Change detection on a GPU: two passes over all tensors of a model, one number read by the host per tensor, at once.

The first pass reads every parameter and snapshot once and leaves one bit per element and one count per block; the
second reads the bits and touches only what changed. Both take the tensors from a table, so the number of launches does
not grow with the number of tensors.

Letters: `T` tensors, `N` elements of all of them, `K` changed elements, `B` blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl

from delta_wire.kernels.triton_common import FP32, KINDS, bf16_bits, jit, load_block, num_blocks, popcount, store_block

BLOCK = 2048
_ROW = tl.constexpr(5)
_INT32_LIMIT = 1 << 31
_INTEGER = {4: torch.int32, 2: torch.int16}


@jit("num_elements")
def round_kernel(p_param, p_bits, num_elements, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """bf16 patterns of a parameter. Reads 4 N or 2 N bytes, writes 2 N."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_elements - base
    pattern = load_block(p_param + base, left, BLOCK)
    pattern = pattern.to(tl.uint32 if KIND == FP32 else tl.uint16, bitcast=True)
    bits = bf16_bits(pattern, KIND).to(tl.int16, bitcast=True)
    store_block(p_bits + base, bits, left, BLOCK)


@jit()
def _locate(p_table, p_row, KIND: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """This program's block: pointers to its first element, elements left from there, flat index, number of block."""
    program = tl.program_id(0)
    p_own = p_table + tl.load(p_row + program).to(tl.int64) * _ROW
    within = program - tl.load(p_own + 3)
    base = within * BLOCK
    if KIND == FP32:
        p_param = tl.load(p_own).to(tl.pointer_type(tl.uint32)) + base
    else:
        p_param = tl.load(p_own).to(tl.pointer_type(tl.uint16)) + base
    p_snapshot = tl.load(p_own + 1).to(tl.pointer_type(tl.uint16)) + base
    if ALIGNED:
        p_param = tl.multiple_of(p_param, 16)
        p_snapshot = tl.multiple_of(p_snapshot, 16)
    return p_param, p_snapshot, tl.load(p_own + 2) - base, base, tl.load(p_own + 4) + within


@jit()
def mark_kernel(p_table, p_row, p_words, p_counts, KIND: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """One bit per element, whether it changed, and the number of changes of each block.

    Reads 6 N bytes for fp32, 4 N for bf16 and fp16, writes N / 8.

    Args:
        p_table: int64 `[T, 5]`: addresses of parameter and snapshot, elements, first program, first block.
        p_row: int32 `[programs]`, the row that a program works on.
        p_words: int32 `[B, BLOCK / 32]`.
        p_counts: int32 `[B]`.
    """
    p_param, p_snapshot, left, _, block = _locate(p_table, p_row, KIND, ALIGNED, BLOCK)
    pattern = load_block(p_param, left, BLOCK)
    held = load_block(p_snapshot, left, BLOCK)
    changed = (bf16_bits(pattern, KIND) != held) & (tl.arange(0, BLOCK) < left)
    bits = tl.reshape(changed, [BLOCK // 32, 32]).to(tl.uint32) << tl.arange(0, 32)[None, :].to(tl.uint32)
    words = tl.sum(bits, axis=1)
    tl.store(p_words + block * (BLOCK // 32) + tl.arange(0, BLOCK // 32), words.to(tl.int32, bitcast=True))
    tl.store(p_counts + block, tl.sum(popcount(words)))


@jit()
def compact_kernel(
    p_table,
    p_row,
    p_words,
    p_ends,
    p_indices,
    p_old,
    p_new,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The changed elements in ascending order, and the snapshot brought up to date.

    Reads N / 8 bytes and 6 K (4 K for bf16 and fp16), writes 10 K, in ever fuller sectors as K grows.

    Args:
        p_table, p_row, p_words: see [`mark_kernel`].
        p_ends: int64 `[B + 1]`, changes before each block.
        p_indices: int32 or int64 `[K]`.
        p_old, p_new: int16 `[K]`.
    """
    p_param, p_snapshot, _, base, block = _locate(p_table, p_row, KIND, ALIGNED, BLOCK)
    first = tl.load(p_ends + block)
    if tl.load(p_ends + block + 1) > first:
        words = tl.load(p_words + block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)).to(tl.uint32, bitcast=True)
        ones = popcount(words)
        before = tl.cumsum(ones, 0) - ones
        # [BLOCK / 32, 32]
        bit = tl.arange(0, 32)[None, :].to(tl.uint32)
        o = tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        changed = ((words[:, None] >> bit) & 1) != 0
        below = (tl.full([1, 32], 1, tl.uint32) << bit) - 1
        slot = first + before[:, None] + popcount(words[:, None] & below)
        new = bf16_bits(tl.load(p_param + o, mask=changed, other=0), KIND)
        old = tl.load(p_snapshot + o, mask=changed, other=0)
        tl.store(p_snapshot + o, new, mask=changed)
        tl.store(p_indices + slot, base + o, mask=changed)
        tl.store(p_old + slot, old.to(tl.int16, bitcast=True), mask=changed)
        tl.store(p_new + slot, new.to(tl.int16, bitcast=True), mask=changed)


def round_bits(param: torch.Tensor, *, block: int = BLOCK) -> torch.Tensor:
    """See [`delta_wire.kernels.round_bits`]."""
    bits = torch.empty(param.shape, dtype=torch.int16, device=param.device)
    if param.numel():
        grid = (num_blocks(param.numel(), block),)
        pattern = param.view(_INTEGER[param.element_size()])
        round_kernel[grid](pattern, bits, param.numel(), KIND=KINDS[param.dtype], BLOCK=block)
    return bits


def extract_many(
    params: Sequence[torch.Tensor], snapshots: Sequence[torch.Tensor], *, block: int = BLOCK
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """See [`delta_wire.kernels.extract_many`]. Takes N / 8 bytes of scratch; the host reads `T + 1` numbers, once."""
    if not params:
        return []
    device = params[0].device
    sizes = np.array([param.numel() for param in params], dtype=np.int64)
    blocks = -(-sizes // block)
    bounds = np.concatenate([[0], np.cumsum(blocks)])
    num_blocks = int(bounds[-1])
    words = torch.empty((num_blocks, block // 32), dtype=torch.int32, device=device)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    launches = _launches(params, snapshots, blocks, bounds)
    for kind, aligned, table, row in launches:
        mark_kernel[(row.numel(),)](table, row, words, counts, KIND=kind, ALIGNED=aligned, BLOCK=block)
    ends = torch.zeros(num_blocks + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 0, dtype=torch.int64, out=ends[1:])
    cuts = ends[torch.from_numpy(bounds).to(device)].tolist()
    index_dtype = torch.int32 if int(sizes.max()) < _INT32_LIMIT else torch.int64
    indices = torch.empty(cuts[-1], dtype=index_dtype, device=device)
    old = torch.empty(cuts[-1], dtype=torch.int16, device=device)
    new = torch.empty(cuts[-1], dtype=torch.int16, device=device)
    for kind, aligned, table, row in launches if cuts[-1] else []:
        compact_kernel[(row.numel(),)](
            table, row, words, ends, indices, old, new, KIND=kind, ALIGNED=aligned, BLOCK=block
        )
    parts = []
    for size, a, b in zip(sizes.tolist(), cuts[:-1], cuts[1:], strict=True):
        own = indices[a:b].to(torch.int32 if size < _INT32_LIMIT else torch.int64)
        parts.append((own, old[a:b], new[a:b]))
    return parts


def _launches(
    params: Sequence[torch.Tensor], snapshots: Sequence[torch.Tensor], blocks: np.ndarray, bounds: np.ndarray
) -> list[tuple[int, bool, torch.Tensor, torch.Tensor]]:
    """Kind, alignment, table and rows of programs for each group of tensors that one compilation serves."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for at, (param, snapshot) in enumerate(zip(params, snapshots, strict=True)):
        if param.numel():
            aligned = (param.data_ptr() | snapshot.data_ptr()) % 16 == 0
            groups.setdefault((KINDS[param.dtype], aligned), []).append(at)
    launches = []
    for (kind, aligned), members in groups.items():
        programs = np.cumsum(blocks[members]) - blocks[members]
        rows = [
            (params[at].data_ptr(), snapshots[at].data_ptr(), params[at].numel(), int(first), int(bounds[at]))
            for at, first in zip(members, programs, strict=True)
        ]
        device = params[0].device
        table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
        num_programs = torch.from_numpy(blocks[members]).to(device, non_blocking=True)
        row = torch.repeat_interleave(
            torch.arange(len(members), dtype=torch.int32, device=device),
            num_programs,
            output_size=int(blocks[members].sum()),
        )
        launches.append((kind, aligned, table, row))
    return launches
