# SPDX-License-Identifier: Apache-2.0
"""Read a weight update with nothing but safetensors and numpy: what docs/FORMAT.md says, in one page of code.

    python examples/read_a_delta.py runs/demo/bucket
    python examples/read_a_delta.py runs/demo/bucket --version 3 --old CHECKPOINT

Shows: how a version is found (pointer, manifest, objects by hash), what its delta holds (encodings `plain` and
`packed`), and, given a checkpoint of the version before, that applying it gives exactly the announced version.
Needs: Python, safetensors, numpy, and a bucket in a folder. Nothing of this project is imported.
Takes: a second or two; with --old a minute for each 100 million parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import deserialize, safe_open

DTYPES = {"BF16": np.uint16, "U8": np.uint8, "I32": np.int32, "I64": np.int64}
Changes = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> flat indices, steps or new bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bucket", type=Path)
    parser.add_argument("--version", type=int, help="sequence number; the newest if not given")
    parser.add_argument("--old", type=Path, metavar="CHECKPOINT", help="folder with the weights of the version before")
    arguments = parser.parse_args()
    manifest = read_manifest(arguments.bucket, arguments.version)
    version = manifest["version"]
    print(f"version  {version['run']}-{version['epoch']}-{version['seq']}, optimizer step {manifest['step']}")
    print(f"digest   {manifest['digest']}")
    if manifest["delta"] is None:
        sys.exit("it has no delta: it is the checkpoint that the run started from")
    encoding = manifest["delta"]["encoding"]
    table = json.loads(fetch(arguments.bucket, manifest["table"]))
    changes: Changes = {}
    for ref in manifest["delta"]["objects"]:
        part = read_delta(arguments.bucket / ref["key"], fetch(arguments.bucket, ref), encoding, list(table), table)
        for name, (indices, values) in part.items():
            if name in changes:
                # what several processes trained is written in several parts, which share no element
                indices = np.concatenate([changes[name][0], indices])
                values = np.concatenate([changes[name][1], values])
            order = np.argsort(indices)
            changes[name] = indices[order], values[order]
    size_bytes = sum(ref["size_bytes"] for ref in manifest["delta"]["objects"])
    print(f"changed  {manifest['changed_params']:,} of {manifest['num_params']:,} weights")
    print(f"sent     {size_bytes:,} bytes, coded as {encoding}")
    for name, (indices, values) in changes.items():
        first = ", ".join(f"[{i}] {show(encoding, v)}" for i, v in zip(indices[:3], values[:3], strict=True))
        print(f"  {name:48} {indices.size:8,}   {first}{', …' if indices.size > 3 else ''}")
    if arguments.old is not None:
        prove(arguments.old, manifest, changes, relative=encoding == "packed")


def read_manifest(bucket: Path, seq: int | None) -> dict:
    """The pointer names the newest manifest and its hash; the others have a parent's number."""
    pointer = json.loads(read_object(bucket, "LATEST"))
    if seq is None:
        return json.loads(fetch(bucket, pointer["manifest"]))
    return json.loads(read_object(bucket, f"versions/{seq:012d}.json"))


def read_object(bucket: Path, key: str) -> bytes:
    if not (bucket / key).is_file():
        sys.exit(f"{bucket / key}: there is no such object; give the folder of a bucket, and a version that is in it")
    return (bucket / key).read_bytes()


def fetch(bucket: Path, ref: dict) -> bytes:
    """An object, which is what its manifest says, or nothing."""
    raw = read_object(bucket, ref["key"])
    if hashlib.sha256(raw).hexdigest() != ref["sha256"]:
        sys.exit(f"{ref['key']}: the hash is not that of its manifest")
    return raw


def read_delta(path: Path, raw: bytes, encoding: str, names: list[str], table: dict) -> Changes:
    """Every data file is a safetensors file."""
    with safe_open(path, "np") as file:
        metadata = file.metadata() or {}
    if encoding not in ("plain", "packed") or "shard" in metadata:
        sys.exit(f"{path}: this page reads plain and packed files of whole tensors; use delta-wire checkout")
    arrays = {name: np.frombuffer(entry["data"], DTYPES[entry["dtype"]]) for name, entry in deserialize(raw)}
    sizes = [int(np.prod(table[name]["shape"], dtype=np.int64)) for name in names]
    if encoding == "plain":
        # either indices and values, or the whole tensor
        return {
            name: (arrays[f"{name}.indices"], arrays[f"{name}.values"])
            if f"{name}.indices" in arrays
            else (np.arange(size), arrays[name])
            for name, size in zip(names, sizes, strict=True)
            if f"{name}.indices" in arrays or name in arrays
        }
    changes: Changes = {}
    for blob in arrays.values():
        changes |= dict(read_blob(blob.tobytes(), names, sizes))
    return changes


class Stream:
    """Bits of a stream, lowest first."""

    def __init__(self, raw: bytes):
        self.bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
        self.ones = np.flatnonzero(self.bits)
        self.at = 0

    def read(self, count: int) -> int:
        bits = self.bits[self.at : self.at + count]
        self.at += count
        return sum(int(bit) << i for i, bit in enumerate(bits))

    def unary(self) -> int:
        end = int(self.ones[np.searchsorted(self.ones, self.at)])
        zeros, self.at = end - self.at, end + 1
        return zeros

    def exp_golomb(self, order: int) -> int:
        width = self.unary() + order
        return (1 << width | self.read(width)) - (1 << order)


def read_blob(raw: bytes, names: list[str], sizes: list[int]) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Section 7.3: a directory, then Rice-coded gaps, then signs and magnitudes of steps."""
    words = np.frombuffer(raw[:40], "<u8")
    ends = 40 + 8 * np.cumsum(words).astype(int)
    directory, low, high, rest, _ = (
        Stream(raw[end - 8 * int(count) : end]) for end, count in zip(ends, words, strict=True)
    )
    listed, at = [], -1
    for _ in range(directory.exp_golomb(4)):
        at += 1 + directory.exp_golomb(0)
        count, direct = divmod(directory.exp_golomb(8), 2)
        listed.append((at, count, bool(direct)))
    if any(direct for _, _, direct in listed):
        sys.exit("a tensor of this version carries values, not steps; use delta-wire checkout")
    levels = [level_counts(directory, count) for _, count, _ in listed]
    places = [segment(low, high, count, sizes[number]) for number, count, _ in listed]
    signs = [np.array([rest.read(1) for _ in range(count)], dtype=bool) for _, count, _ in listed]
    for (number, count, _), indices, negative, counts in zip(listed, places, signs, levels, strict=True):
        steps, level = np.zeros(count, np.int64), np.arange(count)
        for j, num_above in enumerate(counts):
            above = np.zeros(level.size, bool)
            above[segment(low, high, num_above, level.size)] = True
            for element in level[~above]:
                steps[element] = 1 << j | rest.read(j)
            level = level[above]
        yield names[number], (indices, np.where(negative, -steps, steps))


def level_counts(directory: Stream, size: int) -> list[int]:
    counts = []
    while size:
        size_after = directory.exp_golomb(max(0, size.bit_length() - 3))
        counts.append(size_after)
        size = size_after
    return counts


def segment(low: Stream, high: Stream, count: int, n: int) -> np.ndarray:
    """`count` places out of `n`, as gaps in a Rice code; those left out, where that is shorter."""
    inverted = 2 * count > n
    coded = n - count if inverted else count
    k = 0
    while coded and 2000 * coded * 2**k < 481 * (2 * n - coded):
        k += 1
    places, at = [], -1
    for _ in range(coded):
        at += 1 + (high.unary() << k | low.read(k))
        places.append(at)
    return np.setdiff1d(np.arange(n), places) if inverted else np.array(places, np.int64)


def line(bits: np.ndarray) -> np.ndarray:
    """bf16 patterns on a line on which they are in numeric order; its own inverse."""
    return np.where(bits < 0x8000, bits, bits ^ 0x7FFF).astype(np.uint16)


def show(encoding: str, value: int) -> str:
    if encoding == "packed":
        return f"{value:+d}"
    return f"{np.array([int(value) << 16], np.uint32).view(np.float32)[0]:.5g}"


def prove(old: Path, manifest: dict, changes: Changes, relative: bool) -> None:
    """Sections 1 and 7: apply the changes to the weights before, and compare digests."""
    files = sorted(old.glob("*.safetensors"))
    state = {
        name: np.frombuffer(entry["data"], np.uint16).copy()
        for file in files
        for name, entry in deserialize(file.read_bytes())
    }
    if digest(state) != manifest["parent"]["digest"]:
        sys.exit(f"{old}: these are not the weights of the version before")
    for name, (indices, values) in changes.items():
        bits = state[name]
        bits[indices] = line(line(bits[indices]) + values.astype(np.uint16)) if relative else values
    if digest(state) != manifest["digest"]:
        sys.exit("the digest after the delta is not the announced one")
    print(f"proven   {old} and this delta give exactly the announced version")


def digest(state: dict[str, np.ndarray]) -> str:
    """Section 1: two sums of a hash of (name, flat index, bits)."""
    lanes = [0, 0]
    for name, bits in state.items():
        keys = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), "<u8")
        words = (np.arange(bits.size, dtype=np.uint64) << np.uint64(16)) + bits
        for lane, mixed in enumerate((words ^ keys[0], words + keys[1])):
            lanes[lane] = (lanes[lane] + int(mix(mixed).sum(dtype=np.uint64))) % 2**64
    return "".join(f"{lane:016x}" for lane in lanes)


def mix(x: np.ndarray) -> np.ndarray:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return x ^ (x >> np.uint64(33))


if __name__ == "__main__":
    # `| head` ends it quietly
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
