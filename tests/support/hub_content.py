# SPDX-License-Identifier: Apache-2.0
"""The content-addressed half of the loopback hub: chunks, xorbs and shards as the real client uploads them."""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import pyarrow

_RECORD_BYTES = 48
_SHARD_HEADER_BYTES = 48
_END = b"\xff" * 32
_CHUNK_HEADER_BYTES = 8
_WITH_VERIFICATION, _WITH_METADATA = 1 << 31, 1 << 30


@dataclass(frozen=True, slots=True)
class Term:
    """A run of chunks of one xorb, `[start, end)`, and the bytes they unpack to."""

    xorb: str
    start: int
    end: int
    size_bytes: int


@dataclass
class Content:
    """Everything that was uploaded; safe for use by several threads."""

    xorbs: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, list[Term]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_xorb(self, name: str, data: bytes) -> None:
        with self.lock:
            self.xorbs[name] = data

    def add_shard(self, shard: bytes) -> None:
        """Learn of which terms the files of a shard consist."""
        at = _SHARD_HEADER_BYTES
        while shard[at : at + 32] != _END:
            name = hash_text(shard[at : at + 32])
            flags, num_terms = struct.unpack_from("<II", shard, at + 32)
            at += _RECORD_BYTES
            terms = []
            for _ in range(num_terms):
                xorb = hash_text(shard[at : at + 32])
                _, size_bytes, start, end = struct.unpack_from("<IIII", shard, at + 32)
                terms.append(Term(xorb, start, end, size_bytes))
                at += _RECORD_BYTES
            if flags & _WITH_VERIFICATION:
                at += num_terms * _RECORD_BYTES
            if flags & _WITH_METADATA:
                at += _RECORD_BYTES
            with self.lock:
                self.files[name] = terms

    def size_bytes(self, file: str) -> int:
        with self.lock:
            return sum(term.size_bytes for term in self.files[file])

    def read(self, file: str) -> bytes:
        """A whole file, put together from its chunks."""
        with self.lock:
            terms = list(self.files[file])
            xorbs = {term.xorb: self.xorbs[term.xorb] for term in terms}
        parts = []
        for term in terms:
            spans = chunk_spans(xorbs[term.xorb])[term.start : term.end]
            unpacked = b"".join(_unpack(xorbs[term.xorb][begin:end]) for begin, end in spans)
            assert len(unpacked) == term.size_bytes, f"{file}: the shard says {term}, found {len(unpacked)} bytes"
            parts.append(unpacked)
        return b"".join(parts)

    def reconstruction(self, file: str, base_url: str) -> dict[str, object]:
        """What a client needs to put a file together itself."""
        with self.lock:
            terms = list(self.files[file])
            xorbs = {term.xorb: self.xorbs[term.xorb] for term in terms}
        fetch: dict[str, list[dict[str, object]]] = {}
        for term in terms:
            spans = chunk_spans(xorbs[term.xorb])
            fetch.setdefault(term.xorb, []).append(
                {
                    "range": {"start": term.start, "end": term.end},
                    "url": f"{base_url}/xorb/{term.xorb}",
                    "url_range": {"start": spans[term.start][0], "end": spans[term.end - 1][1] - 1},
                }
            )
        return {
            "offset_into_first_range": 0,
            "terms": [
                {
                    "hash": term.xorb,
                    "unpacked_length": term.size_bytes,
                    "range": {"start": term.start, "end": term.end},
                }
                for term in terms
            ],
            "fetch_info": fetch,
        }


def hash_text(raw: bytes) -> str:
    """A hash as it is written in addresses: four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def chunk_spans(xorb: bytes) -> list[tuple[int, int]]:
    """Where each chunk of a xorb begins and ends, headers included."""
    spans, at = [], 0
    while at + _CHUNK_HEADER_BYTES <= len(xorb) and xorb[at] == 0:
        packed = int.from_bytes(xorb[at + 1 : at + 4], "little")
        spans.append((at, at + _CHUNK_HEADER_BYTES + packed))
        at = spans[-1][1]
    return spans


def _unpack(chunk: bytes) -> bytes:
    scheme, size_bytes = chunk[4], int.from_bytes(chunk[5:8], "little")
    data = chunk[_CHUNK_HEADER_BYTES:]
    if scheme == 0:
        return data
    unpacked = pyarrow.decompress(data, decompressed_size=size_bytes, codec="lz4", asbytes=True)
    if scheme == 1:
        return unpacked
    assert scheme == 2, f"unknown compression scheme {scheme}"
    # four groups: the first bytes of all words, then the second ones and so on
    grouped = np.frombuffer(unpacked, np.uint8)
    counts = [len(range(first, size_bytes, 4)) for first in range(4)]
    out = np.empty(size_bytes, np.uint8)
    for first, (begin, count) in enumerate(zip([0, *accumulate(counts)][:4], counts, strict=True)):
        out[first::4] = grouped[begin : begin + count]
    return out.tobytes()
