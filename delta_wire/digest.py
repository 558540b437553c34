# SPDX-License-Identifier: Apache-2.0
"""The 128-bit digest of a state: a set hash over (tensor name, flat index, bits).

The digest of a state is the sum of the hashes of all its elements, in two lanes modulo 2^64. Sums do not care for
order or sharding: digests of parts add up, and a change of `K` elements updates the digest by what it adds and
removes. It proves that two states are equal against accidents and lost updates; it is not a signature.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from delta_wire.errors import FormatError

_MASK64 = (1 << 64) - 1
_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Digest:
    """Two lanes of 64 bits; forms a group under addition.

    Args:
        lane_0 (`int`): below 2^64.
        lane_1 (`int`): below 2^64.
    """

    lane_0: int = 0
    lane_1: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.lane_0 + other.lane_0) & _MASK64, (self.lane_1 + other.lane_1) & _MASK64)

    def __sub__(self, other: Digest) -> Digest:
        return Digest((self.lane_0 - other.lane_0) & _MASK64, (self.lane_1 - other.lane_1) & _MASK64)

    def __str__(self) -> str:
        return f"{self.lane_0:016x}{self.lane_1:016x}"

    @classmethod
    def parse(cls, text: object) -> Digest:
        """Read the 32 lower-case hexadecimal digits that `str()` writes."""
        if not isinstance(text, str) or not _HEX.fullmatch(text):
            raise FormatError(f"a digest is 32 lower-case hexadecimal digits, found {text!r:.80}")
        return cls(int(text[:16], 16), int(text[16:], 16))


@lru_cache(maxsize=1 << 18)
def tensor_keys(name: str) -> tuple[int, int]:
    """The two 64-bit keys of a checkpoint name: halves of its 16-byte BLAKE2b hash, little endian."""
    raw = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


def digest_tensor(name: str, bits: np.ndarray, start: int = 0) -> Digest:
    """Digest of a whole tensor, or of a contiguous part of one.

    Args:
        name (`str`): checkpoint name.
        bits (`np.ndarray`): 16-bit integers in checkpoint order, any shape.
        start (`int`, *optional*, defaults to `0`): flat checkpoint index of the first.
    """
    from delta_wire import kernels

    return Digest(*kernels.digest_dense(bits.reshape(-1), tensor_keys(name), start))


def digest_change(name: str, indices: np.ndarray, old: np.ndarray, new: np.ndarray) -> Digest:
    """What a sparse change adds to a state's digest.

    Args:
        name (`str`): checkpoint name.
        indices (`np.ndarray`): `[K]`, int32 or int64.
        old, new (`np.ndarray`): `[K]`, 16-bit integers.
    """
    from delta_wire import kernels

    keys = tensor_keys(name)
    return Digest(*kernels.digest_sparse(indices, new, keys)) - Digest(*kernels.digest_sparse(indices, old, keys))
