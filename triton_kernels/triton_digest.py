# SPDX-License-Identifier: Apache-2.0
"""Digests on a GPU: every program leaves two partial sums, the device adds them up, the host reads two numbers.

Sums wrap modulo 2^64, so neither their order nor the cut into programs matters.

Letters: `N` elements of a block, `K` elements of a list.
"""

from __future__ import annotations

import torch
import triton.language as tl

from delta_wire.kernels.triton_common import (
    device_keys,
    element_lanes,
    jit,
    load_block,
    load_keys,
    num_blocks,
    require_block,
    store_lanes,
)

BLOCK = 2048
_INT32_LIMIT = 1 << 31


@jit("num_elements")
def sparse_kernel(p_indices, p_bits, p_keys, p_lanes, num_elements, BLOCK: tl.constexpr):
    """Two lanes over listed elements. Reads 6 K or 10 K bytes.

    Args:
        p_indices: int32 or int64 `[K]`.
        p_bits: int16 `[K]`.
        p_keys: int64 `[2]`.
        p_lanes: int64 `[programs, 2]`.
    """
    program = tl.program_id(0).to(tl.int64)
    base = program * BLOCK
    left = num_elements - base
    indices = load_block(p_indices + base, left, BLOCK)
    bits = load_block(p_bits + base, left, BLOCK).to(tl.uint16, bitcast=True)
    key_0, key_1 = load_keys(p_keys)
    lane_0, lane_1 = element_lanes(indices, bits, tl.arange(0, BLOCK) < left, key_0, key_1)
    store_lanes(p_lanes + program * 2, lane_0, lane_1)


@jit("start", "num_elements")
def dense_kernel(p_bits, p_keys, p_lanes, start, num_elements, BLOCK: tl.constexpr):
    """Two lanes over consecutive elements, the first of flat index `start`. Reads 2 N bytes."""
    program = tl.program_id(0).to(tl.int64)
    base = program * BLOCK
    left = num_elements - base
    bits = load_block(p_bits + base, left, BLOCK).to(tl.uint16, bitcast=True)
    key_0, key_1 = load_keys(p_keys)
    o = tl.arange(0, BLOCK)
    lane_0, lane_1 = element_lanes(start + base + o, bits, o < left, key_0, key_1)
    store_lanes(p_lanes + program * 2, lane_0, lane_1)


@jit("num_rows", "start", "step_0", "step_1", "step_2")
def strided_kernel(
    p_bits,
    p_keys,
    p_lanes,
    num_rows,
    size_1,
    size_2,
    stride_0,
    stride_1,
    stride_2,
    start,
    step_0,
    step_1,
    step_2,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Two lanes over a 3-D view of any strides; see [`delta_wire.kernels.digest_dense`]. Reads 2 N bytes.

    Rows are the pairs of the first two axes. Accesses are wide where the last axis has stride 1 and its size and the
    other strides are multiples of 16, which Triton finds out by itself from the arguments.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(size_2, COLUMNS)
    rows = (program // tiles) * ROWS + tl.arange(0, ROWS)
    columns = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    i = (rows // size_1).to(tl.int64)
    j = (rows % size_1).to(tl.int64)
    k = columns.to(tl.int64)
    keep = (rows < num_rows)[:, None] & (columns < size_2)[None, :]
    p_rows = p_bits + (i * stride_0 + j * stride_1)
    bits = tl.load(p_rows[:, None] + (k * stride_2)[None, :], mask=keep, other=0).to(tl.uint16, bitcast=True)
    index = (start + i * step_0 + j * step_1)[:, None] + (k * step_2)[None, :]
    key_0, key_1 = load_keys(p_keys)
    lane_0, lane_1 = element_lanes(index, bits, keep, key_0, key_1)
    store_lanes(p_lanes + program.to(tl.int64) * 2, lane_0, lane_1)


def digest_sparse(
    indices: torch.Tensor, bits: torch.Tensor, keys: tuple[int, int], *, block: int = BLOCK
) -> torch.Tensor:
    """See [`delta_wire.kernels.digest_sparse`]. Returns the lanes as int64 `[2]` on the device."""
    require_block(indices, indices.dtype, bits.numel(), "digest_sparse: the indices")
    require_block(bits, torch.int16, indices.numel(), "digest_sparse: the bits")
    programs = num_blocks(bits.numel(), block)
    lanes = torch.empty((programs, 2), dtype=torch.int64, device=bits.device)
    if programs:
        sparse_kernel[(programs,)](indices, bits, device_keys(keys, bits.device), lanes, bits.numel(), BLOCK=block)
    return lanes.sum(0)


def digest_dense(
    bits: torch.Tensor, keys: tuple[int, int], start: int, steps: tuple[int, ...], *, block: int = BLOCK
) -> torch.Tensor:
    """See [`delta_wire.kernels.digest_dense`]. Returns the lanes as int64 `[2]` on the device."""
    if bits.dtype != torch.int16:
        raise ValueError(f"digest_dense: the bits must be int16, found {bits.dtype}")
    device = bits.device
    if not bits.numel():
        return torch.zeros(2, dtype=torch.int64, device=device)
    sizes, strides, steps = _fold(tuple(bits.shape), bits.stride(), steps)
    on_device = device_keys(keys, device)
    if len(sizes) == 1 and strides[0] == steps[0] == 1:
        programs = num_blocks(sizes[0], block)
        lanes = torch.empty((programs, 2), dtype=torch.int64, device=device)
        # strides, not the shape, say which memory is meant
        flat = bits.as_strided((sizes[0],), (1,))
        dense_kernel[(programs,)](flat, on_device, lanes, start, sizes[0], BLOCK=block)
        return lanes.sum(0)
    pad = 3 - len(sizes)
    sizes, strides, steps = (1,) * pad + sizes, (0,) * pad + strides, (0,) * pad + steps
    num_rows = sizes[0] * sizes[1]
    if max(num_rows, sizes[2]) >= _INT32_LIMIT:
        raise ValueError(f"digest_dense: a strided block has fewer than 2^31 rows and columns, found {bits.shape}")
    columns = min(block, max(32, 1 << (sizes[2] - 1).bit_length()))
    rows = block // columns
    programs = num_blocks(num_rows, rows) * num_blocks(sizes[2], columns)
    lanes = torch.empty((programs, 2), dtype=torch.int64, device=device)
    strided_kernel[(programs,)](
        bits, on_device, lanes, num_rows, *sizes[1:], *strides, start, *steps, ROWS=rows, COLUMNS=columns
    )
    return lanes.sum(0)


def _fold(
    sizes: tuple[int, ...], strides: tuple[int, ...], steps: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The same elements in as few axes as possible, memory order; the sum does not care about the order."""
    axes = sorted(
        (axis for axis in zip(strides, steps, sizes, strict=True) if axis[2] != 1), key=lambda axis: -axis[0]
    )
    folded: list[tuple[int, int, int]] = []
    for stride, step, size in axes:
        if folded and folded[-1][0] == stride * size and folded[-1][1] == step * size:
            size *= folded.pop()[2]
        folded.append((stride, step, size))
    folded = folded or [(1, 1, 1)]
    return (
        tuple(size for _, _, size in folded),
        tuple(stride for stride, _, _ in folded),
        tuple(step for _, step, _ in folded),
    )
