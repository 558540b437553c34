# SPDX-License-Identifier: Apache-2.0
"""Reading and writing listed elements of live parameters on a GPU.

Letters: `M` elements of the parameter's storage, `K` listed elements.
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
    store_block,
    store_lanes,
)

BLOCK = 1024


@jit("num_positions")
def gather_kernel(p_flat, p_positions, p_out, num_positions, BLOCK: tl.constexpr):
    """`out[i] = flat[positions[i]]`. Reads 8 K bytes and a sector per element, writes 2 K."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_positions - base
    positions = load_block(p_positions + base, left, BLOCK)
    bits = tl.load(p_flat + positions, mask=tl.arange(0, BLOCK) < left, other=0)
    store_block(p_out + base, bits, left, BLOCK)


@jit("num_positions")
def scatter_kernel(p_flat, p_positions, p_new, p_old, num_positions, BLOCK: tl.constexpr):
    """Swap `new` into `flat`, keeping what was there. Reads 10 K bytes and a sector per element, writes as much."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_positions - base
    positions = load_block(p_positions + base, left, BLOCK)
    new = load_block(p_new + base, left, BLOCK)
    m_list = tl.arange(0, BLOCK) < left
    old = tl.load(p_flat + positions, mask=m_list, other=0)
    tl.store(p_flat + positions, new, mask=m_list)
    store_block(p_old + base, old, left, BLOCK)


@jit("num_positions")
def swap_kernel(p_flat, p_positions, p_new, p_indices, p_keys, p_old, p_lanes, num_positions, BLOCK: tl.constexpr):
    """Swap `new` into `flat` and hash what was there and what is there now, read back from memory.

    Reads 14 K or 18 K bytes and a sector per element, writes 2 K and a sector per element.

    Args:
        p_flat: int16 `[M]`.
        p_positions: int64 `[K]`, no repeats.
        p_new, p_old: int16 `[K]`.
        p_indices: int32 or int64 `[K]`, checkpoint indices.
        p_keys: int64 `[2]`.
        p_lanes: int64 `[programs, 4]`, two lanes of the old and two of the new state.
    """
    program = tl.program_id(0).to(tl.int64)
    base = program * BLOCK
    left = num_positions - base
    positions = load_block(p_positions + base, left, BLOCK)
    new = load_block(p_new + base, left, BLOCK)
    m_list = tl.arange(0, BLOCK) < left
    old = tl.load(p_flat + positions, mask=m_list, other=0)
    tl.store(p_flat + positions, new, mask=m_list)
    tl.debug_barrier()
    # volatile, or the compiler would hash the register that it has just stored
    found = tl.load(p_flat + positions, mask=m_list, other=0, volatile=True)
    store_block(p_old + base, old, left, BLOCK)
    # only now, or registers run out on sm_100
    indices = load_block(p_indices + base, left, BLOCK)
    key_0, key_1 = load_keys(p_keys)
    lane_0, lane_1 = element_lanes(indices, old.to(tl.uint16, bitcast=True), m_list, key_0, key_1)
    store_lanes(p_lanes + program * 4, lane_0, lane_1)
    lane_0, lane_1 = element_lanes(indices, found.to(tl.uint16, bitcast=True), m_list, key_0, key_1)
    store_lanes(p_lanes + program * 4 + 2, lane_0, lane_1)


@jit("num_elements")
def gather_at_kernel(p_addresses, p_out, num_elements, BLOCK: tl.constexpr):
    """What is at addresses. Reads 8 K bytes and a sector per element, writes 2 K."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_elements - base
    p_element = load_block(p_addresses + base, left, BLOCK).to(tl.pointer_type(tl.int16))
    bits = tl.load(p_element, mask=tl.arange(0, BLOCK) < left, other=0)
    store_block(p_out + base, bits, left, BLOCK)


@jit("num_elements")
def exchange_kernel(p_addresses, p_new, p_old, p_found, p_counts, num_elements, BLOCK: tl.constexpr):
    """Write `new` to addresses, keep what was there, and count where that was not `old`.

    Reads 12 K bytes and a sector per element, writes 2 K and a sector per element.

    Args:
        p_addresses: int64 `[K]`, of 16-bit elements, no repeats; of as many tensors as there are.
        p_new, p_old, p_found: int16 `[K]`.
        p_counts: int32 `[2]`, the first is added to.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_elements - base
    p_element = load_block(p_addresses + base, left, BLOCK).to(tl.pointer_type(tl.int16))
    new = load_block(p_new + base, left, BLOCK)
    old = load_block(p_old + base, left, BLOCK)
    m_list = tl.arange(0, BLOCK) < left
    found = tl.load(p_element, mask=m_list, other=0)
    tl.store(p_element, new, mask=m_list)
    store_block(p_found + base, found, left, BLOCK)
    _count(p_counts, m_list & (found != old))


@jit("num_elements")
def compare_kernel(p_addresses, p_bits, p_counts, num_elements, BLOCK: tl.constexpr):
    """Count where what is at addresses is not `bits`. Reads 10 K bytes and a sector per element.

    A launch of its own, because it proves what the memory holds: no program may have the element in a register.

    Args:
        p_addresses: as in [`exchange_kernel`].
        p_bits: int16 `[K]`.
        p_counts: int32 `[2]`, the second is added to.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = num_elements - base
    p_element = load_block(p_addresses + base, left, BLOCK).to(tl.pointer_type(tl.int16))
    bits = load_block(p_bits + base, left, BLOCK)
    m_list = tl.arange(0, BLOCK) < left
    found = tl.load(p_element, mask=m_list, other=0)
    _count(p_counts + 1, m_list & (found != bits))


@jit()
def _count(p_count, wrong):
    num_wrong = tl.sum(wrong.to(tl.int32))
    if num_wrong > 0:
        tl.atomic_add(p_count, num_wrong, sem="relaxed")


def gather(flat: torch.Tensor, positions: torch.Tensor, *, block: int = BLOCK) -> torch.Tensor:
    """See [`delta_wire.kernels.gather`]."""
    _require_list(flat, positions)
    out = torch.empty(positions.numel(), dtype=torch.int16, device=flat.device)
    if positions.numel():
        grid = (num_blocks(positions.numel(), block),)
        gather_kernel[grid](flat, positions, out, positions.numel(), BLOCK=block)
    return out


def scatter(flat: torch.Tensor, positions: torch.Tensor, new: torch.Tensor, *, block: int = BLOCK) -> torch.Tensor:
    """See [`delta_wire.kernels.scatter`]."""
    _require_list(flat, positions)
    require_block(new, torch.int16, positions.numel(), "scatter: the new bits")
    old = torch.empty(positions.numel(), dtype=torch.int16, device=flat.device)
    if positions.numel():
        grid = (num_blocks(positions.numel(), block),)
        scatter_kernel[grid](flat, positions, new, old, positions.numel(), BLOCK=block)
    return old


def gather_at(addresses: torch.Tensor, *, block: int = BLOCK) -> torch.Tensor:
    """Bits at addresses (int64 `[K]`) of 16-bit elements on the same device: int16 `[K]`."""
    require_block(addresses, torch.int64, addresses.numel(), "gather_at: the addresses")
    out = torch.empty(addresses.numel(), dtype=torch.int16, device=addresses.device)
    if addresses.numel():
        grid = (num_blocks(addresses.numel(), block),)
        gather_at_kernel[grid](addresses, out, addresses.numel(), BLOCK=block)
    return out


def exchange(
    addresses: torch.Tensor,
    new: torch.Tensor,
    old: torch.Tensor,
    found: torch.Tensor,
    counts: torch.Tensor,
    *,
    block: int = BLOCK,
) -> None:
    """Write to addresses, compare what was there and read back what was written, without waiting for the device.

    Args:
        addresses (`torch.Tensor`): int64 `[K]`, of 16-bit elements on the same device, no repeats. Nothing checks
            them: whoever makes them has.
        new, old (`torch.Tensor`): int16 `[K]`.
        found (`torch.Tensor`): int16 `[K]`, for what was there.
        counts (`torch.Tensor`): int32 `[2]`, for the elements that did not hold `old`, and for those that do not hold
            `new` afterwards.
    """
    size = addresses.numel()
    require_block(addresses, torch.int64, size, "exchange: the addresses")
    for bits, what in ((new, "new"), (old, "old"), (found, "found")):
        require_block(bits, torch.int16, size, f"exchange: the {what} bits")
    require_block(counts, torch.int32, 2, "exchange: the counts")
    counts.zero_()
    if size:
        grid = (num_blocks(size, block),)
        exchange_kernel[grid](addresses, new, old, found, counts, size, BLOCK=block)
        compare_kernel[grid](addresses, new, counts, size, BLOCK=block)


def swap(
    flat: torch.Tensor,
    positions: torch.Tensor,
    new: torch.Tensor,
    indices: torch.Tensor,
    keys: tuple[int, int],
    *,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.swap`]."""
    _require_list(flat, positions)
    require_block(new, torch.int16, positions.numel(), "swap: the new bits")
    require_block(indices, indices.dtype, positions.numel(), "swap: the indices")
    programs = num_blocks(positions.numel(), block)
    old = torch.empty(positions.numel(), dtype=torch.int16, device=flat.device)
    lanes = torch.empty((programs, 4), dtype=torch.int64, device=flat.device)
    if programs:
        on_device = device_keys(keys, flat.device)
        swap_kernel[(programs,)](flat, positions, new, indices, on_device, old, lanes, positions.numel(), BLOCK=block)
    return old, lanes.sum(0).reshape(2, 2)


def _require_list(flat: torch.Tensor, positions: torch.Tensor) -> None:
    require_block(flat, torch.int16, flat.numel(), "the parameter's view")
    require_block(positions, torch.int64, positions.numel(), "the positions")
