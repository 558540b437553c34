# SPDX-License-Identifier: Apache-2.0
"""Encoding `packed`: positions as Rice-coded gaps, values as steps on the monotone bf16 line.

Needs the old bits at the changed positions, nothing else. Positions cost within one per cent of their binary entropy,
steps within two per cent of their order-0 entropy; see docs/FORMAT.md for the bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from delta_wire.encodings import blob as files
from delta_wire.encodings import streams as s
from delta_wire.errors import FormatError
from delta_wire.state import Delta, OldBits, TensorDelta, TensorTable


class PackedEncoding:
    """Self-contained but for the old bits at the changed positions."""

    name = "packed"
    needs_old_weights = False

    def check_table(self, table: TensorTable) -> None:
        """Names do not occur in the file, so any will do."""

    def max_bytes(self, table: TensorTable) -> int:
        return files.max_bytes(table)

    def encode(self, delta: Delta, table: TensorTable, path: Path, seq: int, old_bits: OldBits | None = None) -> None:
        files.write(path, self.name, encode(delta, table), delta, seq)

    def decode(self, path: Path, table: TensorTable, source: str, old_bits: OldBits | None = None) -> Delta:
        return decode(files.read(path, self.name, source), table, source)


def encode(delta: Delta, table: TensorTable) -> list[np.ndarray]:
    """Blobs of a delta: uint8 arrays."""
    return files.encode(delta, lambda share: pack(share, table))


def decode(blobs: list[np.ndarray], table: TensorTable, source: str) -> Delta:
    """Inverse of [`encode`]; parts come with steps or new bits, whichever was shorter."""
    return files.decode(blobs, lambda blob: unpack(blob, table, source), source)


def pack(delta: Delta, table: TensorTable) -> np.ndarray:
    """Code sparse parts.

    Args:
        delta: parts with old bits, every change real (`old != new`).
        table: the model's tensors.

    Returns:
        `np.ndarray`: uint8, a blob of streams.
    """
    numbers, parts = ordered_parts(delta, table)
    sizes = np.array([part.num_changed for part in parts], dtype=np.int64)
    steps = s.encode_steps(*join_values(parts), sizes)
    by_step = s.steps_pay(sizes, steps[0])
    whole = [part for part, pays in zip(parts, by_step, strict=True) if not pays]
    group = sizes[by_step]
    if whole:
        steps = s.encode_steps(*join_values([part for part, pays in zip(parts, by_step, strict=True) if pays]), group)
    counts, level_universes, level_counts, levels, raw = steps
    directory = s.DirectoryWriter(numbers, 2 * sizes + ~by_step)
    low, high = s.encode_segments(
        join_indices([*(part.indices for part in parts), levels]),
        join([[table[part.name].num_elements for part in parts], level_universes], np.int64),
        np.concatenate([sizes, level_counts]),
    )
    values = s.to_words(join([part.new for part in whole], np.uint16))
    return s.Streams(directory.finish(group, counts), low, high, raw, values).to_blob()


def unpack(blob: np.ndarray, table: TensorTable, source: str) -> Delta:
    """Inverse of [`pack`]; parts come with steps or new bits, whichever was shorter.

    Indices need no check of their own: the decoder refuses positions that do not ascend or leave their tensor.
    """
    streams = s.Streams.from_blob(blob, source)
    directory = s.DirectoryReader(streams.directory, len(table), source)
    names = [table.names[number] for number in directory.numbers]
    sizes, by_step = directory.coded >> 1, (directory.coded & 1) == 0
    universes = np.array([table[name].num_elements for name in names], dtype=np.int64)
    if (sizes < 1).any() or (sizes > universes).any():
        raise FormatError(f"{source}: a tensor has more changes than elements, or none")
    group = sizes[by_step]
    counts = directory.finish(group)
    num_changed, num_steps = int(sizes.sum()), int(group.sum())
    s.check_raw(streams, num_steps, counts, num_changed - num_steps, source)
    level_universes, level_counts = s.level_segments(group, counts)
    decoded = s.decode_segments(
        streams, np.concatenate([universes, level_universes]), np.concatenate([sizes, level_counts]), source
    )
    steps = s.decode_steps(decoded[num_changed:], group, counts, streams.raw, source)
    values = s.from_words(streams.values, num_changed - num_steps)
    return cut_parts(names, universes, sizes, by_step, decoded[:num_changed], steps, values)


def cut_parts(
    names: list[str],
    universes: np.ndarray,
    sizes: np.ndarray,
    by_step: np.ndarray,
    indices: np.ndarray,
    steps: np.ndarray,
    values: np.ndarray,
) -> Delta:
    """Cut the arrays of all tensors into parts; indices in the dtype of the tensor's size."""
    narrow = indices.astype(np.int32, copy=False)
    relative = np.ones(steps.size, dtype=bool)
    delta: Delta = {}
    start = step_start = value_start = 0
    for name, universe, size, is_step in zip(names, universes.tolist(), sizes.tolist(), by_step.tolist(), strict=True):
        own = (narrow if universe < 1 << 31 else indices)[start : start + size]
        start += size
        if is_step:
            cut = slice(step_start, step_start + size)
            delta[name] = TensorDelta(name, own, steps[cut], relative=relative[cut])
            step_start += size
        else:
            delta[name] = TensorDelta(name, own, values[value_start : value_start + size])
            value_start += size
    return delta


def ordered_parts(delta: Delta, table: TensorTable) -> tuple[np.ndarray, list[TensorDelta]]:
    """The parts in table order and their numbers in the table."""
    numbers = table.numbers
    parts = sorted(delta.values(), key=lambda part: numbers[part.name])
    return np.array([numbers[part.name] for part in parts], dtype=np.int64), parts


def join(arrays: list, dtype: type[np.generic]) -> np.ndarray:
    """Concatenation of arrays and lists that may be empty."""
    # an empty list would be taken for floats
    parts = [part if isinstance(part, np.ndarray) else np.array(part, dtype=dtype) for part in arrays]
    return np.concatenate([np.empty(0, dtype=dtype), *parts], dtype=dtype, casting="same_kind")


def join_indices(arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenation of indices, int64 only if one of them is."""
    return np.concatenate([np.empty(0, dtype=np.int32), *arrays])


def join_values(parts: list[TensorDelta]) -> tuple[np.ndarray, np.ndarray]:
    """Old and new bits of all parts."""
    if any(part.old is None or part.relative is not None for part in parts):
        raise ValueError("every part needs its old and new bits")
    return join([part.old for part in parts], np.uint16), join([part.new for part in parts], np.uint16)
