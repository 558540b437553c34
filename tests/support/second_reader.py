# SPDX-License-Identifier: Apache-2.0
"""A second reader of the bucket format, written from docs/FORMAT.md alone.

It uses the standard library only and shares no code with the project, so what both of them understand is what the
document says. It favours plainness over speed: a state is a dict from names to lists of 16-bit patterns, and numbers
are read one at a time. `replay` yields the state of every version from a checkpoint to the newest one.
"""

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from second_signature import manifest_is_signed

State = dict[str, list[int]]
Table = dict[str, list[int]]  # name -> shape, in the order of the names
Changes = dict[str, dict[int, int]]  # name -> flat index -> new bits

M64 = 2**64 - 1
SLAB = 2**20
ITEM_BYTES = {"U8": 1, "BF16": 2, "I32": 4, "I64": 8}
PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.+@=-]{0,199}")


class Refused(Exception):
    """The bucket does not follow the document."""


def need(condition: object, what: str) -> None:
    if not condition:
        raise Refused(what)


# Section 0 and 1: JSON, names, digests


def parse(raw: bytes) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(items)) == len(items), "a key is given twice")
        return dict(items)

    def constant(text: str) -> None:
        raise Refused(f"JSON has {text}")

    try:
        value = json.loads(raw.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"no JSON: {error}") from error
    need(isinstance(value, dict), "JSON is not an object")
    return value


def integer(value: Any, low: int, high: int) -> int:
    need(type(value) is int and low <= value <= high, f"{value!r} is no integer from {low} to {high}")
    return value


def check_name(name: str) -> None:
    need(1 <= len(name.encode("utf-8", "surrogatepass")) <= 1024, "length of a name")
    need(all(c == " " or unicodedata.category(c)[0] not in "CZ" for c in name), f"characters of {name!r}")


def check_shape(shape: Any) -> list[int]:
    need(isinstance(shape, list) and len(shape) <= 8, "shape")
    need(math.prod(integer(size, 0, 2**46) for size in shape) <= 2**46, "number of elements")
    return shape


def mix(x: int) -> int:
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & M64
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & M64
    return x ^ x >> 33


class Digest:
    def __init__(self) -> None:
        self.lanes = [0, 0]

    def add(self, name: str, elements: Any, sign: int = 1) -> None:
        h = hashlib.blake2b(name.encode(), digest_size=16).digest()
        key_0, key_1 = int.from_bytes(h[:8], "little"), int.from_bytes(h[8:], "little")
        for index, bits in elements:
            word = (index << 16) + bits
            self.lanes[0] += sign * mix(word ^ key_0)
            self.lanes[1] += sign * mix(word + key_1 & M64)

    def __str__(self) -> str:
        return "".join(f"{lane & M64:016x}" for lane in self.lanes)


def digest_state(state: State) -> Digest:
    digest = Digest()
    for name, bits in state.items():
        digest.add(name, enumerate(bits))
    return digest


# Sections 5 and 6: tensor tables and safetensors files


def parse_table(raw: bytes) -> Table:
    need(len(raw) <= 64 * 2**20, "size of the table")
    table = {}
    for name, entry in parse(raw).items():
        check_name(name)
        need(
            isinstance(entry, dict) and list(entry) == ["dtype", "shape"] and entry["dtype"] == "BF16", f"entry {name}"
        )
        table[name] = check_shape(entry["shape"])
    need(list(table) == sorted(table) and len(table) <= 2**19, "order or number of tensors")
    form = {name: {"dtype": "BF16", "shape": shape} for name, shape in table.items()}
    need(json.dumps(form, separators=(",", ":")).encode() == raw, "the table is not in canonical form")
    return table


class Safetensors:
    def __init__(self, raw: bytes) -> None:
        size_bytes = int.from_bytes(raw[:8], "little")
        need(len(raw) >= 8 and size_bytes <= min(100_000_000, len(raw) - 8), "length of the header")
        header = parse(raw[8 : 8 + size_bytes].rstrip(b" "))
        self.data = raw[8 + size_bytes :]
        self.metadata = header.pop("__metadata__", {})
        need(isinstance(self.metadata, dict) and all(type(v) is str for v in self.metadata.values()), "metadata")
        self.entries = header
        spans = []
        for name, entry in header.items():
            check_name(name)
            need(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}, f"entry {name}")
            need(entry["dtype"] in ITEM_BYTES, f"dtype of {name}")
            need(isinstance(entry["data_offsets"], list) and len(entry["data_offsets"]) == 2, f"offsets of {name}")
            begin, end = (integer(offset, 0, len(self.data)) for offset in entry["data_offsets"])
            bytes_expected = math.prod(check_shape(entry["shape"])) * ITEM_BYTES[entry["dtype"]]
            need(end - begin == bytes_expected, f"span of {name}")
            spans.append((begin, end))
        at = 0
        for begin, end in sorted(spans):
            need(begin == at, "tensors overlap or leave a gap")
            at = end
        need(at == len(self.data), "tensors do not end with the file")

    def bytes(self, name: str, dtypes: tuple[str, ...], shape: list[int] | None) -> bytes:
        entry = self.entries[name]
        need(entry["dtype"] in dtypes and shape in (None, entry["shape"]), f"dtype or shape of {name}")
        begin, end = entry["data_offsets"]
        return self.data[begin:end]

    def numbers(self, name: str, dtypes: tuple[str, ...], shape: list[int] | None) -> list[int]:
        raw, item_bytes = self.bytes(name, dtypes, shape), ITEM_BYTES[self.entries[name]["dtype"]]
        signed = self.entries[name]["dtype"] in ("I32", "I64")
        if item_bytes == 2:
            return [low | high << 8 for low, high in zip(raw[::2], raw[1::2], strict=True)]
        return [
            int.from_bytes(raw[i : i + item_bytes], "little", signed=signed) for i in range(0, len(raw), item_bytes)
        ]


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


# Sections 2, 3, 4, 8 and 11: the bucket


def fetch(bucket: Path, ref: Any) -> bytes:
    key = ref["key"]
    need(1 <= len(key) <= 512 and all(PART.fullmatch(part) for part in key.split("/")), f"key {key!r}")
    raw = (bucket / key).read_bytes()
    need(len(raw) == integer(ref["size_bytes"], 0, 2**53 - 1), f"size of {key}")
    need(hashlib.sha256(raw).hexdigest() == ref["sha256"], f"hash of {key}")
    return raw


def fetch_manifest(bucket: Path, seq: int, ref: Any, keys: tuple[bytes, ...]) -> dict[str, Any]:
    need(ref["key"] == f"versions/{seq:012d}.json", "key of a manifest")
    raw = fetch(bucket, ref)
    need(len(raw) <= 4 * 2**20, "size of a manifest")
    manifest = parse(raw)
    need(not keys or manifest_is_signed(raw, manifest.get("signature"), keys), "signature of a manifest")
    need(integer(manifest["format"], 1, M64) == 1, "this reader knows format 1 only: upgrade it")
    need(manifest["version"]["seq"] == seq, "number of a manifest")
    need(manifest["table"]["key"] == f"tables/{manifest['table']['sha256']}.json", "key of the table")
    need(manifest["delta"] or manifest["anchor"], "neither delta nor anchor")
    if manifest["delta"]:
        same = manifest["digest"] == manifest["parent"]["digest"]
        need((manifest["changed_params"] == 0) == same, "changed_params and digest of a manifest")
    if manifest.get("adapter") is not None:
        check_adapter(manifest["adapter"])
    return manifest


def check_adapter(adapter: dict[str, Any]) -> None:
    need(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", adapter["name"]), "name of an adapter")
    integer(adapter["rank"], 1, 65_536)
    need(re.fullmatch(r"[0-9a-f]{32}", adapter["base"]["digest"]), "digest of an adapter's base")
    need(adapter["base"]["reference"] is None or isinstance(adapter["base"]["reference"], str), "reference")


def load_checkpoint(folder: Path) -> State:
    """A model's files, or those of an adapter (section 8.1)."""
    adapter = folder / "adapter_model.safetensors"
    index = folder / "model.safetensors.index.json"
    files = set(parse(index.read_bytes())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    if adapter.exists():
        files = {adapter.name}
    state: State = {}
    for file in map(Safetensors, (folder.joinpath(name).read_bytes() for name in sorted(files))):
        state |= {name: file.numbers(name, ("BF16",), None) for name in file.entries}
    return state


def replay(bucket: Path, anchor: Path, keys: tuple[bytes, ...] = ()) -> Iterator[tuple[dict[str, Any], State]]:
    """Yields manifest and state of every version from the checkpoint's to the newest one; with public keys (32 bytes
    each) only those are read that one of them has signed."""
    state = load_checkpoint(anchor)
    digest = digest_state(state)
    pointer = parse((bucket / "LATEST").read_bytes())
    need(integer(pointer["format"], 1, M64) == 1, "this reader knows format 1 only: upgrade it")
    chain = [fetch_manifest(bucket, pointer["version"]["seq"], pointer["manifest"], keys)]
    need(chain[0]["version"] == pointer["version"], "version of the pointer")
    while chain[-1]["digest"] != str(digest):
        child, parent = chain[-1], chain[-1]["parent"]
        need(parent and child["delta"], "no version of the chain has the checkpoint's digest")
        need(parent["seq"] < child["version"]["seq"] and parent["epoch"] <= child["version"]["epoch"], "parent")
        key = f"versions/{parent['seq']:012d}.json"
        size_bytes = (bucket / key).stat().st_size
        ref = {"key": key, "size_bytes": size_bytes, "sha256": parent["manifest_sha256"]}
        chain.append(fetch_manifest(bucket, parent["seq"], ref, keys))
        need(chain[-1]["version"]["run"] == child["version"]["run"], "run of the parent")
        need(chain[-1]["version"]["epoch"] == parent["epoch"] and chain[-1]["digest"] == parent["digest"], "parent")
        need(chain[-1]["table"] == child["table"], "table of the parent")
        need(chain[-1].get("adapter") == child.get("adapter"), "adapter of the parent")
    table = parse_table(fetch(bucket, chain[0]["table"]))
    need({name: math.prod(shape) for name, shape in table.items()} == {n: len(b) for n, b in state.items()}, "tensors")
    need(all(m["num_params"] == sum(map(len, state.values())) for m in chain), "num_params")
    yield chain.pop(), state
    for manifest in reversed(chain):
        changes: Changes = {}
        for ref in manifest["delta"]["objects"]:
            need(ref["key"].startswith("deltas/"), "key of a delta")
            part = decode(fetch(bucket, ref), manifest["delta"]["encoding"], table, state)
            for name, elements in part.items():
                need(not elements.keys() & changes.get(name, {}).keys(), f"an element of {name} is in two parts")
                changes[name] = changes.get(name, {}) | elements
        new_state, changed = dict(state), 0
        for name, elements in changes.items():
            digest.add(name, ((i, state[name][i]) for i in elements), -1)
            digest.add(name, elements.items())
            changed += sum(bits != state[name][i] for i, bits in elements.items())
            new_state[name] = state[name].copy()
            for index, bits in elements.items():
                new_state[name][index] = bits
        need(str(digest) == manifest["digest"], f"digest of version {manifest['version']['seq']}")
        need(changed == manifest["changed_params"], "changed_params")
        state = new_state
        yield manifest, state
