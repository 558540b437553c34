# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels share: block loads and stores, rounding, hashing, bit counting.

House rules of the `triton_*` modules. A kernel works on blocks of `BLOCK` consecutive elements, a power of two; the
base of a block is added to the pointer in int64, offsets within it are int32. Only the last block is masked, so every
other access is as wide as the hardware allows. Sizes are not specialised: one compilation serves every size. Nothing
is rounded by the device's own conversions, and nothing is compared as a float.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_MIX_1 = tl.constexpr(0xFF51AFD7ED558CCD)
_MIX_2 = tl.constexpr(0xC4CEB9FE1A85EC53)
# smallest subnormal of fp16
_TINY = tl.constexpr(2.0**-24)


def jit(*sizes: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` for functions whose arguments `sizes` take any value without another compilation."""
    return triton.jit(do_not_specialize=list(sizes))


def num_blocks(num_elements: int, block: int) -> int:
    """Blocks that hold so many elements."""
    return -(-num_elements // block)


@jit()
def load_block(p_block, left, BLOCK: tl.constexpr):
    """`BLOCK` elements from `p_block` on, zeros from `left` on."""
    o = tl.arange(0, BLOCK)
    if left >= BLOCK:  # noqa: SIM108 - no expression can branch in a kernel
        block = tl.load(p_block + o)
    else:
        block = tl.load(p_block + o, mask=o < left, other=0)  # last block
    return block


@jit()
def store_block(p_block, block, left, BLOCK: tl.constexpr):
    """The first `left` elements of `block` to `p_block`."""
    o = tl.arange(0, BLOCK)
    if left >= BLOCK:
        tl.store(p_block + o, block)
    else:
        tl.store(p_block + o, block, mask=o < left)  # last block


@jit()
def bf16_bits(pattern, KIND: tl.constexpr):
    """bf16 patterns (uint16) of fp32 (uint32), bf16 or fp16 (uint16) patterns; see `reference.round_bits`."""
    if KIND == BF16:
        return pattern
    wide = pattern.to(tl.uint32)
    if KIND == FP16:
        magnitude = wide & 0x7FFF
        finite = (magnitude << 13) + (112 << 23)
        subnormal = (magnitude.to(tl.float32) * _TINY).to(tl.uint32, bitcast=True)
        finite = tl.where(magnitude < 0x0400, subnormal, finite)
        wide = ((wide & 0x8000) << 16) | tl.where(magnitude >= 0x7C00, (magnitude << 13) | 0x7F800000, finite)
    upper = wide >> 16
    rounded = (wide + 0x7FFF + (upper & 1)) >> 16
    return tl.where((wide & 0x7FFFFFFF) > 0x7F800000, upper | 0x0040, rounded).to(tl.uint16)


@jit()
def popcount(word):
    """Number of ones of uint32 words. Written out: the compiler finds the instruction, the interpreter has none."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@jit()
def popcount_wide(word):
    """Number of ones of uint64 words."""
    return popcount(word.to(tl.uint32)) + popcount((word >> 32).to(tl.uint32))


@jit()
def or_bits(p_words, at, value, size, keep):
    """Set `size` bits (1 to 63) of `value` at bit `at` of zeroed int64 words, for the elements of a block to keep."""
    shift = (at & 63).to(tl.uint64)
    bits = value.to(tl.uint64)
    p_word = p_words + (at >> 6)
    tl.atomic_or(p_word, (bits << shift).to(tl.int64, bitcast=True), mask=keep, sem="relaxed")
    crosses = keep & ((at & 63) + size > 64)
    rest = bits >> tl.where(crosses, 64 - shift, 0)
    tl.atomic_or(p_word + 1, rest.to(tl.int64, bitcast=True), mask=crosses, sem="relaxed")


@jit()
def get_bits(p_words, at, size, keep):
    """Inverse of [`or_bits`], zero where not kept or of size zero."""
    keep = keep & (size > 0)
    shift = (at & 63).to(tl.uint64)
    p_word = p_words + (at >> 6)
    bits = tl.load(p_word, mask=keep, other=0).to(tl.uint64, bitcast=True) >> shift
    crosses = keep & ((at & 63) + size > 64)
    rest = tl.load(p_word + 1, mask=crosses, other=0).to(tl.uint64, bitcast=True)
    bits |= tl.where(crosses, rest << tl.where(crosses, 64 - shift, 0), 0)
    mask = (tl.full(at.shape, 1, tl.uint64) << size.to(tl.uint64)) - 1
    return (bits & mask).to(tl.int64, bitcast=True)


@jit()
def mix(x):
    """64-bit finaliser of MurmurHash3 (Appleby, public domain), uint64."""
    x ^= x >> 33
    x *= _MIX_1
    x ^= x >> 33
    x *= _MIX_2
    return x ^ (x >> 33)


@jit()
def element_lanes(index, bits, keep, key_0, key_1):
    """Sums of the two lanes of `reference.element_hash` over a tile.

    Args:
        index: flat checkpoint indices, any integer.
        bits: uint16.
        keep: elements that count.
        key_0, key_1: uint64.
    """
    word = (index.to(tl.uint64) << 16) | bits.to(tl.uint64)
    zero = tl.zeros_like(word)
    lane_0 = tl.where(keep, mix(word ^ key_0), zero)
    lane_1 = tl.where(keep, mix(word + key_1), zero)
    return lane_0, lane_1


@jit()
def load_keys(p_keys):
    """The two keys of a name."""
    return tl.load(p_keys).to(tl.uint64, bitcast=True), tl.load(p_keys + 1).to(tl.uint64, bitcast=True)


@jit()
def store_lanes(p_lanes, lane_0, lane_1):
    """One program's sums."""
    tl.store(p_lanes, tl.sum(lane_0).to(tl.int64, bitcast=True))
    tl.store(p_lanes + 1, tl.sum(lane_1).to(tl.int64, bitcast=True))


def device_keys(keys: tuple[int, int], device: torch.device) -> torch.Tensor:
    """The keys as int64 on the device: as arguments they would be compiled in."""
    signed = [key - (1 << 64) if key >= 1 << 63 else key for key in keys]
    return torch.tensor(signed, dtype=torch.int64).to(device, non_blocking=True)


def require_block(tensor: torch.Tensor, dtype: torch.dtype, size: int, what: str) -> None:
    """Refuse a tensor that a kernel would misread."""
    if tensor.dtype != dtype or tensor.dim() != 1 or tensor.numel() != size or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous {dtype} [{size}], found {tensor.dtype} {list(tensor.shape)} "
            f"with strides {list(tensor.stride())}"
        )
