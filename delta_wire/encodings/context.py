# SPDX-License-Identifier: Apache-2.0
"""Encoding `context`: positions and steps coded per exponent of the old value, which both sides hold.

An optimizer step has about the same size whatever the weight, so the chance to reach another bf16 value doubles with
every step down in the old value's exponent. Coding each exponent's elements by themselves, as ranks within the
exponent, halves the payload. Ranks restart every slab of 2^20 elements, so a slab's positions decode alone. Tensors
for which this does not pay are coded as `packed` does. See docs/FORMAT.md for the bytes.

Letters: `B` slabs, `C` = 256 exponents.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from delta_wire.encodings import blob as files
from delta_wire.encodings import streams as s
from delta_wire.encodings.packed import (
    cut_parts,
    join,
    join_indices,
    ordered_parts,
)
from delta_wire.errors import FormatError
from delta_wire.shards import WHOLE, Shard
from delta_wire.state import Delta, OldBits, TensorDelta, TensorTable

SLAB_ELEMENTS = 1 << 20
ORDER_CLASS = 8
_CLASSES = 256
_SCALE_BITS = 32


class ContextEncoding(files.BlobEncoding):
    """Needs the whole old weights on both sides."""

    name = "context"
    needs_old_weights = True

    def encode(
        self,
        delta: Delta,
        table: TensorTable,
        path: Path,
        seq: int,
        old_bits: OldBits | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        if old_bits is None:
            raise ValueError("context: the old weights are needed to code a delta")
        local = shard.to_local(delta, table)
        files.write(path, self.name, encode(local, shard.table(table), old_bits), delta, seq, shard)

    def decode(self, path: Path, table: TensorTable, source: str, old_bits: OldBits | None = None) -> Delta:
        if old_bits is None:
            raise ValueError("context: the old weights are needed to decode a delta")
        blobs, shard = files.read(path, self.name, source)
        delta = decode(blobs, shard.table(table), source, shard.old_bits(old_bits, table))
        return shard.to_global(delta, table)


def encode(delta: Delta, table: TensorTable, old_bits: OldBits) -> list[np.ndarray]:
    """Blobs of a delta: uint8 arrays."""
    return files.encode(delta, lambda share: pack(share, table, lambda name: old_bits(name).reshape(-1)))


def decode(blobs: list[np.ndarray], table: TensorTable, source: str, old_bits: OldBits) -> Delta:
    """Inverse of [`encode`]; parts come with steps or new bits, whichever was shorter."""
    return files.decode(
        blobs, lambda blob: unpack(blob, table, source, lambda name: old_bits(name).reshape(-1)), source
    )


def pack(delta: Delta, table: TensorTable, old_bits: OldBits) -> np.ndarray:
    """Code sparse parts with the old weights as side information; see [`delta_wire.encodings.packed.pack`]."""
    found = ordered_parts(delta, table)
    parts, sizes = found.parts, found.sizes
    by_step = s.steps_pay(sizes, s.level_counts(found.old, found.new, sizes))
    ranked = [_Ranked(part, old_bits(part.name)) for part in parts]
    by_rank = np.array([_pays(*pair) for pair in zip(parts, ranked, strict=True)], dtype=bool) & by_step
    chosen = [entry for entry, rank in zip(ranked, by_rank, strict=True) if rank]
    others = [part for part, rank in zip(parts, by_rank, strict=True) if not rank]
    stepped = np.repeat(by_step & ~by_rank, sizes)

    # a count of zero cannot occur and marks a tensor coded by rank
    directory = s.DirectoryWriter(found.numbers, np.where(by_rank, 0, 2 * sizes + ~by_step))
    held = _stack([entry.held for entry in chosen])
    changed = _stack([entry.changed for entry in chosen])
    totals = changed.sum(axis=0)
    directory.add(totals[held.sum(axis=0) > 0], ORDER_CLASS)
    present = held > 0
    expected = _expected(held, totals)[present]
    residual = changed[present] - expected
    directory.add(np.where(residual < 0, -2 * residual - 1, 2 * residual), _residual_order(expected))

    by_class = np.argsort(join([entry.exponent for entry in chosen], np.uint8), kind="stable")
    old = np.concatenate([found.old[stepped], join([entry.old for entry in chosen], np.uint16)[by_class]])
    new = np.concatenate([found.new[stepped], join([entry.new for entry in chosen], np.uint16)[by_class]])
    group = np.concatenate([sizes[by_step & ~by_rank], totals])
    counts, level_universes, level_counts, levels, raw = s.encode_steps(old, new, group)
    low, high = s.encode_segments(
        join_indices([*(part.indices for part in others), *(entry.rank for entry in chosen), levels]),
        np.concatenate([table.sizes[found.numbers[~by_rank]], held[present], level_universes]),
        np.concatenate([sizes[~by_rank], changed[present], level_counts]),
    )
    values = s.to_words(found.new[np.repeat(~by_step, sizes)])
    return s.Streams(directory.finish(group, counts), low, high, raw, values).to_blob()


def unpack(blob: np.ndarray, table: TensorTable, source: str, old_bits: OldBits) -> Delta:
    """Inverse of [`pack`]; parts come with steps or new bits, whichever was shorter."""
    streams = s.Streams.from_blob(blob, source)
    directory = s.DirectoryReader(streams.directory, len(table), source)
    names = [table.names[number] for number in directory.numbers]
    coded = directory.coded
    by_rank = coded == 0
    sizes, by_step = coded[~by_rank] >> 1, (coded[~by_rank] & 1) == 0
    others = [name for name, rank in zip(names, by_rank, strict=True) if not rank]
    chosen = [name for name, rank in zip(names, by_rank, strict=True) if rank]
    universes = table.sizes[directory.numbers[~by_rank]]
    if (sizes < 1).any() or (sizes > universes).any():
        raise FormatError(f"{source}: a tensor has more changes than elements, or none")

    held = _stack([_class_counts(old_bits(name)) for name in chosen])
    changed, totals = _read_class_counts(directory, held, source)
    present = held > 0
    group = np.concatenate([sizes[by_step], totals])
    counts = directory.finish(group)
    num_others, num_ranked = int(sizes.sum()), int(totals.sum())
    num_steps = int(sizes[by_step].sum())
    s.check_raw(streams, num_steps + num_ranked, counts, num_others - num_steps, source)
    level_universes, level_counts = s.level_segments(group, counts)
    decoded = s.decode_segments(
        streams,
        np.concatenate([universes, held[present], level_universes]),
        np.concatenate([sizes, changed[present], level_counts]),
        source,
    )
    steps = s.decode_steps(decoded[num_others + num_ranked :], group, counts, streams.raw, source)
    values = s.from_words(streams.values, num_others - num_steps)
    delta = cut_parts(others, universes, sizes, by_step, decoded[:num_others], steps[:num_steps], values)
    ranks = decoded[num_others : num_others + num_ranked]
    delta |= _select(chosen, table, changed, ranks, steps[num_steps:], old_bits)
    return {name: delta[name] for name in names}


def _read_class_counts(directory: s.DirectoryReader, held: np.ndarray, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Changed elements of each slab and exponent (`[B, C]`) and of each exponent (`[C]`)."""
    all_held = held.sum(axis=0)
    totals = np.zeros(_CLASSES, dtype=np.int64)
    totals[all_held > 0] = directory.read(int((all_held > 0).sum()), ORDER_CLASS)
    if (totals > all_held).any():
        raise FormatError(f"{source}: more elements of one exponent changed than the model holds")
    present = held > 0
    expected = _expected(held, totals)[present]
    coded = directory.read(expected.size, _residual_order(expected))
    changed = np.zeros_like(held)
    changed[present] = expected + np.where(coded & 1, -(coded + 1) // 2, coded // 2)
    if (changed < 0).any() or (changed > held).any() or (changed.sum(axis=0) != totals).any():
        raise FormatError(f"{source}: the changed counts per exponent contradict each other or the old weights")
    return changed, totals


class _Ranked:
    """One tensor's changes by slab and exponent: counts `[B, C]` held and changed, and, in that order, exponent, rank,
    old and new bits."""

    def __init__(self, part: TensorDelta, bits: np.ndarray):
        from delta_wire.kernels import cpu_rank

        if part.old is None:
            raise ValueError("context: every part needs its old bits")
        bounds = np.arange(0, bits.size + SLAB_ELEMENTS, SLAB_ELEMENTS).clip(max=bits.size)
        cuts = np.searchsorted(part.indices, bounds)
        exponent = np.empty(part.num_changed, dtype=np.uint8)
        rank = np.empty(part.num_changed, dtype=np.int32)
        for base, end, a, b in zip(bounds[:-1], bounds[1:], cuts[:-1], cuts[1:], strict=True):
            cpu_rank.class_ranks(bits[base:end], base, part.indices[a:b], exponent[a:b], rank[a:b])
        slab = np.repeat(np.arange(bounds.size - 1), np.diff(cuts))
        order = np.lexsort((exponent, slab))
        self.held = _class_counts(bits)
        key = slab * _CLASSES + exponent
        self.changed = np.bincount(key, minlength=self.held.size).reshape(self.held.shape)
        self.exponent, self.rank = exponent[order], rank[order]
        self.old, self.new = part.old[order], part.new[order]


def _pays(part: TensorDelta, entry: _Ranked) -> bool:
    """Whether a tensor's positions cost less by exponent, the counts that they need included."""
    from delta_wire.kernels import cpu_rice

    present = entry.held > 0
    by_rank = sum(cpu_rice.stream_bounds(entry.held[present], entry.changed[present]))
    alone = sum(cpu_rice.stream_bounds(entry.held.sum(keepdims=True)[0], np.array([part.num_changed])))
    count_bits = 2 * np.log2(1 + np.sqrt(entry.changed[present])).sum() + present.sum()
    return bool(by_rank + count_bits < alone)


def _class_counts(bits: np.ndarray) -> np.ndarray:
    """Elements of each exponent in each slab, `[B, C]`."""
    from delta_wire.kernels import cpu_rank

    num_slabs = -(-bits.size // SLAB_ELEMENTS)
    held = np.zeros((num_slabs, _CLASSES), dtype=np.int64)
    for slab in range(num_slabs):
        cpu_rank.class_counts(bits[slab * SLAB_ELEMENTS : (slab + 1) * SLAB_ELEMENTS], held[slab])
    return held


def _expected(held: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """What each slab's share of an exponent's changes would be if they were spread evenly, `[B, C]`.

    In exact integers: floor(held · floor(total · 2^32 / all held) / 2^32); held is below 2^21.
    """
    all_held = held.sum(axis=0)
    density = [(int(t) << _SCALE_BITS) // int(n) if n else 0 for t, n in zip(totals, all_held, strict=True)]
    return (held * np.array(density, dtype=np.int64)) >> _SCALE_BITS


def _residual_order(expected: np.ndarray) -> np.ndarray:
    """Exp-Golomb order for the distance from the expected count: half the bits of that count."""
    size = np.zeros(expected.shape, dtype=np.int64)
    positive = expected > 0
    size[positive] = np.floor(np.log2(expected[positive])).astype(np.int64) + 1
    return size >> 1


def _select(
    names: list[str],
    table: TensorTable,
    changed: np.ndarray,
    ranks: np.ndarray,
    steps_by_class: np.ndarray,
    old_bits: OldBits,
) -> Delta:
    """Turn ranks back into flat indices, slab by slab, and put every step at its element."""
    from delta_wire.kernels import cpu_rank

    exponent = np.repeat(np.tile(np.arange(_CLASSES), changed.shape[0]), changed.reshape(-1))
    steps = np.empty_like(steps_by_class)
    steps[np.argsort(exponent, kind="stable")] = steps_by_class
    indices = np.empty(ranks.size, dtype=np.int64)
    ordered = np.empty_like(steps)
    sizes, universes = [], []
    row = at = 0
    for name in names:
        bits = old_bits(name)
        begin = at
        for base in range(0, bits.size, SLAB_ELEMENTS):
            start = np.concatenate([[0], np.cumsum(changed[row])]) + at
            size = int(changed[row].sum())
            slot = np.empty(size, dtype=np.int64)
            own = indices[at : at + size]
            cpu_rank.class_select(bits[base : base + SLAB_ELEMENTS], base, ranks, start, own, slot)
            ordered[at : at + size] = steps[slot]
            at += size
            row += 1
        sizes.append(at - begin)
        universes.append(table[name].num_elements)
    by_step = np.ones(len(names), dtype=bool)
    return cut_parts(names, np.array(universes), np.array(sizes), by_step, indices, ordered, ordered[:0])


def _stack(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros((0, _CLASSES), dtype=np.int64), *arrays])
