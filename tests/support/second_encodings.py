# SPDX-License-Identifier: Apache-2.0
"""The second reader's encodings: section 7 of the document, and the shards of section 6.1.

See second_reader.py, whose rules hold here.
"""

import math
import re

from second_format import Changes, Refused, Safetensors, State, Table, need

SLAB = 2**20

# Section 7.1: plain


def decode_plain(file: Safetensors, table: Table) -> Changes:
    changes: Changes = {}
    left = set(file.entries)
    for name, shape in table.items():
        indices, values = f"{name}.indices", f"{name}.values"
        need((indices in left) == (values in left), f"{name} has only one of indices and values")
        if name in left:
            need(indices not in left, f"{name} is stored in both ways")
            changes[name] = dict(enumerate(file.numbers(name, ("BF16",), shape)))
        elif indices in left:
            size = math.prod(shape)
            at = file.numbers(indices, ("I32", "I64") if size < 2**31 else ("I64",), None)
            need(len(file.entries[indices]["shape"]) == 1, f"shape of {indices}")
            need(all(a < b for a, b in zip([-1, *at], [*at, size], strict=True)), f"order or range of {indices}")
            changes[name] = dict(zip(at, file.numbers(values, ("BF16",), [len(at)]), strict=True))
        left -= {name, indices, values}
    need(not left, f"tensors that the table does not have: {sorted(left)}")
    return changes


# Section 7.2: blobs, streams and codes


class Stream:
    def __init__(self, name: str, raw: bytes) -> None:
        self.name, self.raw, self.at, self.bits = name, raw, 0, 8 * len(raw)

    def read(self, bits: int) -> int:
        need(self.at + bits <= self.bits, f"{self.name} ends early")
        first, end = self.at // 8, (self.at + bits + 7) // 8
        value = int.from_bytes(self.raw[first:end], "little") >> self.at % 8
        self.at += bits
        return value & (1 << bits) - 1

    def unary(self) -> int:
        """Reads zeros and the one behind them; returns how many zeros."""
        start = self.at
        while self.at < self.bits:
            window = int.from_bytes(self.raw[self.at // 8 : self.at // 8 + 8], "little") >> self.at % 8
            if window:
                self.at += (window & -window).bit_length()
                return self.at - 1 - start
            self.at = (self.at // 8 + 8) * 8
        raise Refused(f"{self.name} ends early")

    def exp_golomb(self, order: int) -> int:
        zeros = self.unary()
        need(zeros + order <= 62, f"a code of {self.name} is too long")
        return (1 << zeros + order | self.read(zeros + order)) - (1 << order)

    def check_end(self) -> None:
        need(self.bits == -(-self.at // 64) * 64, f"size of {self.name}")


class Blob:
    def __init__(self, raw: bytes) -> None:
        need(len(raw) % 8 == 0 and len(raw) >= 40, "size of a blob")
        sizes = [int.from_bytes(raw[i : i + 8], "little") * 8 for i in range(0, 40, 8)]
        need(40 + sum(sizes) == len(raw), "streams do not fill the blob")
        streams, at = [], 40
        for name, size_bytes in zip(("directory", "low", "high", "raw", "values"), sizes, strict=True):
            streams.append(Stream(name, raw[at : at + size_bytes]))
            at += size_bytes
        self.directory, self.low, self.high, self.raw, self.values = streams

    def segment(self, count: int, n: int) -> list[int]:
        """Positions of `count` elements in the universe [0, n)."""
        inverted = 2 * count > n
        c = n - count if inverted else count
        k = 0
        while c and 2000 * c * 2**k < 481 * (2 * n - c):
            k += 1
        positions, at = [], -1
        for _ in range(c):
            at += 1 + (self.high.unary() << k | self.low.read(k))
            need(at < n, "a position beyond the universe")
            positions.append(at)
        if inverted:
            without = set(positions)
            return [i for i in range(n) if i not in without]
        return positions

    def level_counts(self, size: int) -> list[int]:
        counts: list[int] = []
        while size and len(counts) < 16:
            counts.append(self.directory.exp_golomb(max(0, size.bit_length() - 3)))
            need(counts[-1] <= size, "a level count beyond its level")
            size = counts[-1]
        need(not size, "a magnitude of 2^16 or more")
        return counts

    def steps(self, sizes: list[int], counts: list[list[int]]) -> list[list[int]]:
        """The steps of all groups, given the sizes and level counts of the groups."""
        signs = [[self.raw.read(1) for _ in range(size)] for size in sizes]
        result = []
        for size, group_counts, negative in zip(sizes, counts, signs, strict=True):
            steps, level = [0] * size, list(range(size))
            for j, count in enumerate(group_counts):
                up = self.segment(count, len(level))
                above = set(up)
                for i, element in enumerate(level):
                    if i not in above:
                        magnitude = 1 << j | self.raw.read(j)
                        steps[element] = -magnitude if negative[element] else magnitude
                level = [level[i] for i in up]
            result.append(steps)
        return result


def line(bits: int) -> int:
    return bits if bits < 2**15 else bits ^ 0x7FFF


def stepped(bits: int, step: int) -> int:
    return line((line(bits) + step) % 2**16)


# Sections 7.3 and 7.4: packed and context


def decode_blob(raw: bytes, table: Table, state: State, by_rank: bool) -> Changes:
    blob, names = Blob(raw), list(table)
    directory = blob.directory
    listed: list[tuple[str, int, int]] = []  # name, K, f
    at = -1
    for _ in range(directory.exp_golomb(4)):
        at += 1 + directory.exp_golomb(0)
        need(at < len(names), "a tensor beyond the table")
        count, direct = divmod(directory.exp_golomb(8), 2)
        need(count or (by_rank and not direct), "a tensor without changes")
        need(count <= len(state[names[at]]), "more changes than elements")
        listed.append((names[at], count, direct))

    # Each slab of a tensor coded by rank: exponent -> flat indices of its elements
    slabs: list[tuple[str, dict[int, list[int]]]] = []
    for name, count, _ in listed:
        old = state[name]
        for start in range(0, 0 if count else len(old), SLAB):
            members: dict[int, list[int]] = {}
            for index in range(start, min(start + SLAB, len(old))):
                members.setdefault(old[index] >> 7 & 0xFF, []).append(index)
            slabs.append((name, dict(sorted(members.items()))))
    elements = [sum(len(members.get(e, ())) for _, members in slabs) for e in range(256)]
    changed = [0] * 256
    for e in range(256):
        if elements[e]:
            changed[e] = directory.exp_golomb(8)
            need(changed[e] <= elements[e], "more changes than elements of an exponent")
    slab_counts: list[dict[int, int]] = []
    for _, members in slabs:
        slab_counts.append({})
        for e, indices in members.items():
            expected = len(indices) * (changed[e] * 2**32 // elements[e]) // 2**32
            code = directory.exp_golomb(expected.bit_length() // 2)
            slab_counts[-1][e] = expected + (code // 2 if code % 2 == 0 else -(code + 1) // 2)
            need(0 <= slab_counts[-1][e] <= len(indices), "more changes than elements of a slab")
    for e in range(256):
        need(sum(counts.get(e, 0) for counts in slab_counts) == changed[e], "the slabs' counts do not add up")

    sizes = [count for _, count, direct in listed if count and not direct] + changed * by_rank
    counts = [blob.level_counts(size) for size in sizes]
    directory.check_end()
    raw_bits = sum(sizes)
    for size, levels in zip(sizes, counts, strict=True):
        raw_bits += sum(j * (a - b) for j, (a, b) in enumerate(zip([size, *levels], levels, strict=False)))
    need(blob.raw.bits == -(-raw_bits // 64) * 64, "size of raw")
    value_bits = sum(16 * count for _, count, direct in listed if direct)
    need(blob.values.bits == -(-value_bits // 64) * 64, "size of values")

    places = {name: blob.segment(count, len(state[name])) for name, count, _ in listed if count}
    ranked: list[list[tuple[str, int]]] = [[] for _ in range(256)]  # exponent -> changed elements
    for (name, members), slab_count in zip(slabs, slab_counts, strict=True):
        for e, indices in members.items():
            ranked[e] += [(name, indices[rank]) for rank in blob.segment(slab_count[e], len(indices))]
    groups = [[(name, i) for i in places[name]] for name, count, direct in listed if count and not direct]
    groups += ranked * by_rank

    changes: Changes = {name: {} for name, _, _ in listed}
    for group, steps in zip(groups, blob.steps(sizes, counts), strict=True):
        for (name, index), step in zip(group, steps, strict=True):
            changes[name][index] = stepped(state[name][index], step)
    for name, _, direct in listed:
        if direct:
            changes[name] = {index: blob.values.read(16) for index in places[name]}
    for stream in (blob.low, blob.high, blob.raw, blob.values):
        stream.check_end()
    return changes


def rows_of(shard: str, shape: list[int]) -> tuple[list[int], int]:
    """Section 6.1: the shape of a shard of a tensor, and the flat index of its first element."""
    need(re.fullmatch(r"(0|[1-9][0-9]*)/[1-9][0-9]*", shard), "shard")
    i, n = map(int, shard.split("/"))
    need(i < n <= 10_000, "number of the shard")
    d, *rest = shape or [1]
    step = -(-d // n)
    first = min(i * step, d)
    return [min((i + 1) * step, d) - first, *rest], first * math.prod(rest)


def decode(raw: bytes, encoding: str, table: Table, state: State) -> Changes:
    """Decodes one data file that applies to `state`, which is not changed."""
    file = Safetensors(raw)
    if encoding == "plain":
        need(file.metadata.get("delta_format", "1") == "1", "delta_format")
        need(file.metadata.get("encoding", "plain") == "plain", "encoding")
        return decode_plain(file, table)
    need(encoding in ("packed", "context"), f"unknown encoding {encoding!r}")
    need(file.metadata.get("delta_format") == "1" and file.metadata.get("encoding") == encoding, "metadata")
    blobs = len(file.entries)
    need(1 <= blobs <= 4096 and set(file.entries) == {f"delta.{i}" for i in range(blobs)}, "names of blobs")
    cut = {name: rows_of(file.metadata.get("shard", "0/1"), shape) for name, shape in table.items()}
    rows = {name: shape for name, (shape, _) in cut.items()}
    part_of_state = {name: state[name][at : at + math.prod(shape)] for name, (shape, at) in cut.items()}
    changes: Changes = {}
    for i in range(blobs):
        need(len(file.entries[f"delta.{i}"]["shape"]) == 1, "shape of a blob")
        part = decode_blob(file.bytes(f"delta.{i}", ("U8",), None), rows, part_of_state, encoding == "context")
        need(not part.keys() & changes.keys(), "a tensor is in two blobs")
        changes |= part
    return {
        name: {cut[name][1] + index: bits for index, bits in elements.items()} for name, elements in changes.items()
    }
