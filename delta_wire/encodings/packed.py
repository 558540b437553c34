# SPDX-License-Identifier: Apache-2.0
"""Encoding `packed`: positions as Rice-coded gaps, values as steps on the monotone bf16 line.

Needs the old bits at the changed positions, nothing else. Positions cost within one per cent of their binary entropy,
steps within two per cent of their order-0 entropy; see docs/FORMAT.md for the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from delta_wire.encodings import blob as files
from delta_wire.encodings import streams as s
from delta_wire.errors import FormatError
from delta_wire.shards import WHOLE, Shard
from delta_wire.state import Delta, OldBits, TensorDelta, TensorTable

NO_VALUES = np.empty(0, dtype=np.uint16)


class PackedEncoding(files.BlobEncoding):
    """Self-contained but for the old bits at the changed positions."""

    name = "packed"
    needs_old_weights = False

    def encode(
        self,
        delta: Delta,
        table: TensorTable,
        path: Path,
        seq: int,
        old_bits: OldBits | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        local = shard.to_local(delta, table)
        files.write(path, self.name, encode(local, shard.table(table)), delta, seq, shard)

    def decode(self, path: Path, table: TensorTable, source: str, old_bits: OldBits | None = None) -> Delta:
        blobs, shard = files.read(path, self.name, source)
        return shard.to_global(decode(blobs, shard.table(table), source), table)


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
    found = ordered_parts(delta, table)
    parts, sizes = found.parts, found.sizes
    steps = s.encode_steps(found.old, found.new, sizes)
    by_step = s.steps_pay(sizes, steps[0])
    values = NO_VALUES
    group = sizes
    if not by_step.all():
        chosen = np.repeat(by_step, sizes)
        group, values = sizes[by_step], found.new[~chosen]
        steps = s.encode_steps(found.old[chosen], found.new[chosen], group)
    counts, level_universes, level_counts, levels, raw = steps
    directory = s.DirectoryWriter(found.numbers, 2 * sizes + ~by_step)
    low, high = s.encode_segments(
        join_indices([*(part.indices for part in parts), levels]),
        np.concatenate([table.sizes[found.numbers], level_universes]),
        np.concatenate([sizes, level_counts]),
    )
    return s.Streams(directory.finish(group, counts), low, high, raw, s.to_words(values)).to_blob()


def unpack(blob: np.ndarray, table: TensorTable, source: str) -> Delta:
    """Inverse of [`pack`]; parts come with steps or new bits, whichever was shorter.

    Indices need no check of their own: the decoder refuses positions that do not ascend or leave their tensor.
    """
    streams = s.Streams.from_blob(blob, source)
    directory = s.DirectoryReader(streams.directory, len(table), source)
    names = [table.names[number] for number in directory.numbers]
    sizes, by_step = directory.coded >> 1, (directory.coded & 1) == 0
    universes = table.sizes[directory.numbers]
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


@dataclass(slots=True)
class Parts:
    """Changed tensors in the order of the table.

    Args:
        numbers: int64, their numbers in the table.
        parts: their changes, every one real (`old != new`).
        sizes: int64, how many each has.
        old, new: uint16, bits of all of them, joined.
    """

    numbers: np.ndarray
    parts: list[TensorDelta]
    sizes: np.ndarray
    old: np.ndarray
    new: np.ndarray


def ordered_parts(delta: Delta, table: TensorTable) -> Parts:
    """Parts of a delta with old bits, without elements that are listed and keep theirs: no code stands for them."""
    numbers = table.numbers
    parts = sorted(delta.values(), key=lambda part: numbers[part.name])
    old, new = _join_values(parts)
    if (old == new).any():
        return ordered_parts({part.name: part for part in map(_real_changes, parts) if part.num_changed}, table)
    return Parts(
        np.array([numbers[part.name] for part in parts], dtype=np.int64),
        parts,
        np.array([part.num_changed for part in parts], dtype=np.int64),
        old,
        new,
    )


def _real_changes(part: TensorDelta) -> TensorDelta:
    assert part.old is not None
    changed = part.old != part.new
    return TensorDelta(part.name, part.indices[changed], part.new[changed], part.old[changed])


def join(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Concatenation of any number of arrays."""
    return np.concatenate([np.empty(0, dtype=dtype), *arrays], dtype=dtype, casting="same_kind")


def join_indices(arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenation of indices, int64 only if one of them is."""
    return np.concatenate([np.empty(0, dtype=np.int32), *arrays])


def _join_values(parts: list[TensorDelta]) -> tuple[np.ndarray, np.ndarray]:
    """Old and new bits of all parts."""
    old = [part.old for part in parts if part.old is not None and part.relative is None]
    if len(old) < len(parts):
        raise ValueError("every part needs its old and new bits")
    return join(old, np.uint16), join([part.new for part in parts], np.uint16)
