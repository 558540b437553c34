# SPDX-License-Identifier: Apache-2.0
"""The container of the entropy-coded encodings: five streams of 64-bit words in one blob.

    blob = sizes of the five streams (5 × u64, in words) ‖ directory ‖ low ‖ high ‖ raw ‖ values

`directory` holds counts as exp-Golomb codes, `low` and `high` the segmented Rice codes of positions, `raw` the signs
and the low bits of the steps, `values` the new bits of tensors whose steps would be longer, four to a word. All words
are little endian; see `delta_wire/kernels/cpu_rice.py` for the codes.

Letters: `S` segments, `G` groups of steps with statistics of their own, `K` changed elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from delta_wire.errors import FormatError
from delta_wire.state import index_dtype

_WORD = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class Streams:
    """The five streams, uint64 words each."""

    directory: np.ndarray
    low: np.ndarray
    high: np.ndarray
    raw: np.ndarray
    values: np.ndarray

    def to_blob(self) -> np.ndarray:
        """One uint8 array."""
        parts = (self.directory, self.low, self.high, self.raw, self.values)
        sizes = np.array([part.size for part in parts], dtype=_WORD)
        return np.concatenate([sizes, *parts]).astype(_WORD, copy=False).view(np.uint8)

    @classmethod
    def from_blob(cls, blob: np.ndarray, source: str) -> Streams:
        """Split a blob; `source` names the object in errors."""
        if blob.size < 40 or blob.size % 8:
            raise FormatError(
                f"{source}: a blob of streams is whole 64-bit words, at least 5, found {blob.size} bytes"
            )
        words = np.ascontiguousarray(blob).view(_WORD)
        sizes = [int(size) for size in words[:5]]
        if sum(sizes) + 5 != words.size:
            raise FormatError(f"{source}: the streams are {sizes} words, the blob holds {words.size - 5}")
        bounds = np.cumsum([5, *sizes])
        parts = [words[a:b] for a, b in pairwise(bounds)]
        return cls(*parts)


class DirectoryWriter:
    """Counts as exp-Golomb codes, in the order they are added; the tensors of the blob come first.

    Args:
        numbers (`np.ndarray`): int64, numbers of the tensors in the table, ascending.
        coded (`np.ndarray`): int64, a count for each.
    """

    def __init__(self, numbers: np.ndarray, coded: np.ndarray) -> None:
        from delta_wire.kernels import cpu_bits

        self._words = np.zeros(_words_for(2 * numbers.size + 1), dtype=np.uint64)
        self._at = int(cpu_bits.write_entries(numbers, coded, self._words, 0))

    def add(self, values: np.ndarray, order: np.ndarray | int) -> None:
        from delta_wire.kernels import cpu_bits

        orders = np.broadcast_to(np.asarray(order, dtype=np.int64), values.shape).copy()
        self._make_room(values.size)
        self._at = int(cpu_bits.write_codes(values, orders, self._words, self._at))

    def finish(self, group: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Append the level counts and return the words."""
        from delta_wire.kernels import cpu_bits

        self._make_room(16 * group.size)
        at = int(cpu_bits.write_level_counts(group, counts, self._words, self._at))
        return self._words[: (at + 63) // 64]

    def _make_room(self, num_codes: int) -> None:
        self._words = np.concatenate([self._words, np.zeros(_words_for(num_codes), dtype=np.uint64)])


def _words_for(num_codes: int) -> int:
    # a value below 2^47 takes at most 95 bits
    return 2 * num_codes + 1


class DirectoryReader:
    """Inverse of [`DirectoryWriter`], bounded.

    Args:
        words (`np.ndarray`): the stream.
        num_tensors (`int`): of the table.
        source (`str`): names the object in errors.

    Attributes:
        numbers, coded (`np.ndarray`): int64, the tensors of the blob and a count for each.
    """

    def __init__(self, words: np.ndarray, num_tensors: int, source: str):
        from delta_wire.kernels import cpu_bits

        self._words = words
        self._source = source
        self.numbers, self.coded, end = cpu_bits.read_entries(words, num_tensors)
        if end == -2:
            raise FormatError(f"{source}: a tensor beyond the last of the model's {num_tensors} changed")
        self._advance(end)

    def read(self, count: int, order: np.ndarray | int) -> np.ndarray:
        from delta_wire.kernels import cpu_bits

        # every code takes a bit at least: refuse before memory is taken for more
        if count > 64 * self._words.size - self._at:
            raise FormatError(f"{self._source}: the directory ends before {count} counts")
        values = np.empty(count, dtype=np.int64)
        orders = np.broadcast_to(np.asarray(order, dtype=np.int64), values.shape).copy()
        self._advance(cpu_bits.read_codes(self._words, self._at, orders, values))
        return values

    def finish(self, group: np.ndarray) -> np.ndarray:
        """Level counts, `[G, 16]`; nothing may follow."""
        from delta_wire.kernels import cpu_bits

        counts = np.zeros((group.size, 16), dtype=np.int64)
        self._advance(cpu_bits.read_level_counts(self._words, self._at, group, counts))
        if (self._at + 63) // 64 != self._words.size:
            raise FormatError(
                f"{self._source}: the directory has {self._words.size} words, its counts fill {self._at} bits"
            )
        return counts

    def _advance(self, end: int) -> None:
        if end < 0:
            raise FormatError(f"{self._source}: the directory is torn: a count is missing or out of range")
        self._at = int(end)


def encode_steps(
    old: np.ndarray, new: np.ndarray, group: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Code the steps of `K` elements in groups.

    Args:
        old, new: uint16 `[K]`, in group order.
        group: int64 `[G]`, sizes.

    Returns:
        `(counts, segment universes, segment counts, segment positions, raw words)`.
    """
    from delta_wire.kernels import cpu_steps

    counts, levels, raw = cpu_steps.encode_steps(old, new, group, np.empty(0, dtype=index_dtype(old.size)))
    universes, sizes = level_segments(group, counts)
    return counts, universes, sizes, levels, raw


def level_segments(group: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Universe and count of each level's segment, the empty ones left out."""
    from delta_wire.kernels import cpu_steps

    return cpu_steps.level_segments(group, counts)


def level_counts(old: np.ndarray, new: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The counts of [`encode_steps`] alone, for a decision."""
    from delta_wire.kernels import cpu_steps

    return cpu_steps.level_counts(old, new, group)


def steps_pay(group: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """For each group, whether its steps take fewer bits than its 16-bit values would (`[G]`, bool)."""
    from delta_wire.kernels import cpu_steps

    return cpu_steps.step_bits(group, counts) < 16 * group


def decode_steps(
    levels: np.ndarray, group: np.ndarray, counts: np.ndarray, raw: np.ndarray, source: str
) -> np.ndarray:
    """Steps (uint16, modulo 2^16) of all groups, in group order."""
    from delta_wire.kernels import cpu_steps

    num_changed = int(group.sum())
    steps = np.empty(num_changed, dtype=np.uint16)
    padded = np.append(raw, np.uint64(0))
    if cpu_steps.decode_steps(levels, group, counts, padded, steps) < 0:
        raise FormatError(f"{source}: the stream of raw bits ends before the last step")
    return steps


def encode_segments(positions: np.ndarray, universes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high words of all segments."""
    from delta_wire.kernels import cpu_rice

    low_bits, high_bits = cpu_rice.stream_bounds(universes, counts)
    low = np.zeros(low_bits // 64 + 1, dtype=np.uint64)
    high = np.zeros(high_bits // 64 + 1, dtype=np.uint64)
    low_bits, high_bits = cpu_rice.rice_encode(positions, universes, counts, low, high)
    return low[: (low_bits + 63) // 64], high[: (high_bits + 63) // 64]


def decode_segments(streams: Streams, universes: np.ndarray, counts: np.ndarray, source: str) -> np.ndarray:
    """Positions of all segments, int64 only if a universe needs it; refuses streams that do not fit their counts."""
    from delta_wire.kernels import cpu_rice

    largest = int(universes.max()) if universes.size else 0
    positions = np.empty(int(counts.sum()), dtype=index_dtype(largest))
    end = cpu_rice.rice_decode(streams.low, streams.high, universes, counts, positions)
    low_bits, _ = cpu_rice.stream_bounds(universes, counts)
    if end < 0 or (end + 63) // 64 != streams.high.size or (low_bits + 63) // 64 != streams.low.size:
        raise FormatError(f"{source}: the coded positions do not fit their counts; the object is torn")
    return positions


def check_raw(streams: Streams, num_steps: int, counts: np.ndarray, num_values: int, source: str) -> None:
    """Refuse streams of another size than their counts ask for, before memory is taken for them."""
    raw = (num_steps + int(counts.sum()) + 63) // 64
    values = (num_values + 3) // 4
    if streams.raw.size != raw or streams.values.size != values:
        raise FormatError(
            f"{source}: the streams of raw bits and values are {streams.raw.size} and {streams.values.size} words, "
            f"their counts ask for {raw} and {values}"
        )


def to_words(values: np.ndarray) -> np.ndarray:
    """uint16 values, four to a little-endian word, the last word filled up with zeros."""
    padded = np.zeros((values.size + 3) // 4 * 4, dtype="<u2")
    padded[: values.size] = values
    return padded.view(_WORD).astype(np.uint64, copy=False)


def from_words(words: np.ndarray, count: int) -> np.ndarray:
    """Inverse of [`to_words`]."""
    return words.astype(_WORD, copy=False).view("<u2")[:count].astype(np.uint16)
