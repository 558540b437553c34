# SPDX-License-Identifier: Apache-2.0
"""Plain Python forms of the bulk coding: obviously right, no speed. The oracle of the tests.

They take and return what [`delta_wire.kernels.coding`] does. A stream under construction is one large integer.
"""

import numpy as np
import torch

_WORD_BITS = 64


class _Bits:
    """A stream of bits, written in order."""

    def __init__(self) -> None:
        self.value = 0
        self.size = 0

    def put(self, value: int, size: int) -> None:
        self.value |= value << self.size
        self.size += size

    def words(self) -> torch.Tensor:
        raw = self.value.to_bytes((self.size + _WORD_BITS - 1) // _WORD_BITS * 8, "little")
        return torch.from_numpy(np.frombuffer(raw, dtype="<i8").astype(np.int64))


def _integer(words: torch.Tensor) -> int:
    return int.from_bytes(words.numpy().astype("<i8").tobytes(), "little")


def rice_parameter(n: int, coded: int) -> int:
    """Smallest `k` with 2000 · 2^k · coded ≥ 481 (2 n − coded), zero where nothing is coded."""
    k = 0
    while coded and 2000 * coded * 2**k < 481 * (2 * n - coded):
        k += 1
    return k


def rice_encode(positions: torch.Tensor, n: np.ndarray, count: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.rice_encode`]."""
    low, high = _Bits(), _Bits()
    rest = positions.tolist()
    for universe, size in zip(n.tolist(), count.tolist(), strict=True):
        members, rest = rest[:size], rest[size:]
        coded = members if 2 * size <= universe else sorted(set(range(universe)) - set(members))
        k = rice_parameter(universe, len(coded))
        for previous, position in zip([-1, *coded], coded, strict=False):
            gap = position - previous - 1
            low.put(gap % 2**k, k)
            high.put(1 << (gap >> k), (gap >> k) + 1)
    return low.words(), high.words()


def rice_decode(low: torch.Tensor, high: torch.Tensor, n: np.ndarray, count: np.ndarray) -> tuple[torch.Tensor, int]:
    """See [`delta_wire.kernels.rice_decode`]."""
    low_value, high_value = _integer(low), _integer(high)
    low_end, high_end = 64 * low.numel(), 64 * high.numel()
    low_at = high_at = 0
    positions: list[int] = []
    for universe, size in zip(n.tolist(), count.tolist(), strict=True):
        coded: list[int] = []
        num_coded = size if 2 * size <= universe else universe - size
        k = rice_parameter(universe, num_coded)
        for _ in range(num_coded):
            quotient = 0
            while high_at < high_end and not high_value >> high_at & 1:
                quotient, high_at = quotient + 1, high_at + 1
            gap = quotient << k | (low_value >> low_at) % 2**k
            low_at, high_at = low_at + k, high_at + 1
            position = (coded[-1] if coded else -1) + 1 + gap
            if low_at > low_end or high_at > high_end or position >= universe:
                return torch.zeros(int(count.sum()), dtype=torch.int64), -1
            coded.append(position)
        positions += coded if 2 * size <= universe else sorted(set(range(universe)) - set(coded))
    return torch.tensor(positions, dtype=torch.int64), high_at


def _line(bits: int) -> int:
    return bits ^ 0x7FFF if bits & 0x8000 else bits


def _signed(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16)


def encode_steps(
    old: torch.Tensor, new: torch.Tensor, group: np.ndarray
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.encode_steps`]."""
    steps = [(_line(b & 0xFFFF) - _line(a & 0xFFFF)) & 0xFFFF for a, b in zip(old.tolist(), new.tolist(), strict=True)]
    raw = _Bits()
    for step in steps:
        raw.put(int(step > 0x8000), 1)
    magnitudes = [0x10000 - step if step > 0x8000 else step for step in steps]
    counts = np.zeros((group.size, 16), dtype=np.int64)
    levels: list[int] = []
    for g, size in enumerate(group.tolist()):
        current, magnitudes = magnitudes[:size], magnitudes[size:]
        for level in range(16):
            survivors = [rank for rank, magnitude in enumerate(current) if magnitude >= 2 << level]
            for magnitude in current:
                if magnitude < 2 << level:
                    raw.put(magnitude % 2**level, level)
            counts[g, level] = len(survivors)
            levels += survivors
            current = [current[rank] for rank in survivors]
    return counts, torch.tensor(levels, dtype=torch.int64), raw.words()


def decode_steps(levels: torch.Tensor, group: np.ndarray, counts: np.ndarray, raw: torch.Tensor) -> torch.Tensor:
    """See [`delta_wire.kernels.decode_steps`]."""
    bits = _integer(raw)
    signs, bits = bits, bits >> int(group.sum())
    rest = levels.tolist()
    steps: list[int] = []
    for g, size in enumerate(group.tolist()):
        magnitudes = [1] * size
        current = list(range(size))
        for level in range(16):
            survivors, rest = rest[: counts[g, level]], rest[counts[g, level] :]
            for rank, element in enumerate(current):
                if rank not in survivors:
                    magnitudes[element] = 2**level | bits % 2**level
                    bits >>= level
            current = [current[rank] for rank in survivors]
        steps += magnitudes
    return _signed([(-step if signs >> i & 1 else step) & 0xFFFF for i, step in enumerate(steps)])


def apply_steps(old: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """See [`delta_wire.kernels.apply_steps`]."""
    return _signed([_line((_line(a & 0xFFFF) + b) & 0xFFFF) for a, b in zip(old.tolist(), step.tolist(), strict=True)])


def _exponents(bits: torch.Tensor) -> list[int]:
    return [pattern >> 7 & 0xFF for pattern in bits.tolist()]


def class_counts(bits: torch.Tensor, slab_elements: int) -> torch.Tensor:
    """See [`delta_wire.kernels.class_counts`]."""
    counts = torch.zeros((-(-bits.numel() // slab_elements), 256), dtype=torch.int64)
    for i, exponent in enumerate(_exponents(bits)):
        counts[i // slab_elements, exponent] += 1
    return counts


def class_ranks(bits: torch.Tensor, indices: torch.Tensor, slab_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.class_ranks`]."""
    exponents = _exponents(bits)
    exponent = [exponents[i] for i in indices.tolist()]
    rank = [exponents[i // slab_elements * slab_elements : i].count(exponents[i]) for i in indices.tolist()]
    return torch.tensor(exponent, dtype=torch.uint8), torch.tensor(rank, dtype=torch.int64)


def class_select(
    bits: torch.Tensor, ranks: torch.Tensor, changed: torch.Tensor, slab_elements: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`delta_wire.kernels.class_select`]."""
    exponents = _exponents(bits)
    found: list[int] = []
    rest = ranks.tolist()
    for own, size in enumerate(changed.reshape(-1).tolist()):
        slab, exponent = divmod(own, 256)
        base = slab * slab_elements
        members = [base + i for i, e in enumerate(exponents[base : base + slab_elements]) if e == exponent]
        found += [members[rank] for rank in rest[:size]]
        rest = rest[size:]
    indices, slot = torch.sort(torch.tensor(found, dtype=torch.int64))
    return indices, slot
