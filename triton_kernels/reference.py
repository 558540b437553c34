# SPDX-License-Identifier: Apache-2.0
"""Plain torch forms of the primitives: obviously right, any device, no speed.

They are the oracle of the tests and the path for devices without a kernel of their own.
"""

import torch

_MASK64 = (1 << 64) - 1
# 64-bit finaliser of MurmurHash3 (Appleby, public domain)
_MIX_1 = 0xFF51AFD7ED558CCD
_MIX_2 = 0xC4CEB9FE1A85EC53
ROUNDABLE = (torch.float32, torch.bfloat16, torch.float16)


def round_bits(param: torch.Tensor) -> torch.Tensor:
    """bf16 bit patterns of a tensor, rounded to nearest even in integer arithmetic.

    Args:
        param (`torch.Tensor`): contiguous, float32, bfloat16 or float16, any shape.

    Returns:
        `torch.Tensor`: int16, same shape. NaNs keep their sign and their upper payload bits and stay NaNs, so the
        result does not depend on the device's own conversion.
    """
    if param.dtype == torch.bfloat16:
        return param.view(torch.int16).clone()
    wide = param.to(torch.float32).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    upper = wide >> 16
    rounded = (wide + 0x7FFF + (upper & 1)) >> 16
    is_nan = (wide & 0x7FFFFFFF) > 0x7F800000
    # a NaN whose payload lies only in the lower half would become infinity: set the quiet bit
    rounded = torch.where(is_nan, upper | 0x0040, rounded) & 0xFFFF
    return torch.where(rounded >= 0x8000, rounded - 0x10000, rounded).to(torch.int16)


def extract(param: torch.Tensor, snapshot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.extract`]."""
    bits = round_bits(param).reshape(-1)
    changed = torch.nonzero(bits != snapshot).reshape(-1)
    new = bits[changed]
    old = snapshot[changed]
    snapshot[changed] = new
    return changed, old, new


def _mix(x: int) -> int:
    x ^= x >> 33
    x = (x * _MIX_1) & _MASK64
    x ^= x >> 33
    x = (x * _MIX_2) & _MASK64
    return x ^ (x >> 33)


def element_hash(index: int, bits: int, keys: tuple[int, int]) -> tuple[int, int]:
    """Hash of one element: two 64-bit lanes over `index * 2^16 + bits`, each under its own key of the name."""
    word = ((index << 16) | bits) & _MASK64
    return _mix(word ^ keys[0]), _mix((word + keys[1]) & _MASK64)


def digest_sparse(indices: torch.Tensor, bits: torch.Tensor, keys: tuple[int, int]) -> tuple[int, int]:
    """See [`delta_wire.kernels.digest_sparse`]."""
    lane_0 = lane_1 = 0
    for index, pattern in zip(indices.tolist(), bits.tolist(), strict=True):
        h0, h1 = element_hash(index, pattern & 0xFFFF, keys)
        lane_0, lane_1 = (lane_0 + h0) & _MASK64, (lane_1 + h1) & _MASK64
    return lane_0, lane_1


def gather(flat: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See [`delta_wire.kernels.gather`]."""
    return flat[positions]


def scatter(flat: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """See [`delta_wire.kernels.scatter`]."""
    old = flat[positions]
    flat[positions] = new
    return old


def swap(
    flat: torch.Tensor, positions: torch.Tensor, new: torch.Tensor, indices: torch.Tensor, keys: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.swap`]."""
    old = scatter(flat, positions, new)
    lanes = [*digest_sparse(indices, old, keys), *digest_sparse(indices, flat[positions], keys)]
    signed = [lane - (1 << 64) if lane >= 1 << 63 else lane for lane in lanes]
    return old, torch.tensor(signed, dtype=torch.int64, device=flat.device).reshape(2, 2)
