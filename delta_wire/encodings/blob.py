# SPDX-License-Identifier: Apache-2.0
"""The file of the entropy-coded encodings: blobs of bytes `delta.0`, `delta.1`, … and the usual metadata.

Each blob holds tensors of its own, so that blobs are coded side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from delta_wire.container import TensorFile, write_tensors
from delta_wire.encodings.plain import check_metadata, own_metadata
from delta_wire.errors import FormatError
from delta_wire.shards import WHOLE, Shard
from delta_wire.state import Delta, TensorTable, num_changed

PREFIX = "delta."
MAX_BLOBS = 4096
_FIXED_BYTES = 64 << 10
# directory entry and level counts of a tensor, and a header entry, if it should have a blob of its own
_BYTES_PER_TENSOR = 384
# of an element whose neighbours are in other files, 10,000 at most: its value, and a gap of log2(10,000) + 3 bits
_SCATTERED_BYTES = 5
# a share of work that is worth a blob and a thread: less than a hundredth of the payload is spent on splitting
_CHANGES_PER_BLOB = 1 << 16
_MAX_SHARES = 16
_THREADS = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="delta-coding")


class BlobEncoding:
    """What the encodings in blobs have in common."""

    def check_table(self, table: TensorTable) -> None:
        """Names do not occur in the file, so any will do."""

    def max_bytes(self, table: TensorTable, num_objects: int = 1) -> int:
        """Upper bound of all files: values at 16 bits, their positions as a bitmap, or one by one in several files."""
        overhead_bytes = num_objects * (_FIXED_BYTES + _BYTES_PER_TENSOR * len(table))
        if num_objects > 1:
            return overhead_bytes + _SCATTERED_BYTES * table.num_params
        return overhead_bytes + sum(2 * spec.num_elements + spec.num_elements // 8 for spec in table.values())


def encode(delta: Delta, pack: Callable[[Delta], np.ndarray]) -> list[np.ndarray]:
    """Split a delta into shares of about equal size and code them side by side; at least one blob."""
    shares = _split(delta)
    return list(_THREADS.map(pack, shares)) if len(shares) > 1 else [pack(shares[0])]


def decode(blobs: Iterable[np.ndarray], unpack: Callable[[np.ndarray], Delta], source: str) -> Delta:
    """Inverse of [`encode`]."""
    blobs = list(blobs)
    delta: Delta = {}
    for share in _THREADS.map(unpack, blobs) if len(blobs) > 1 else map(unpack, blobs):
        twice = delta.keys() & share.keys()
        if twice:
            raise FormatError(f"{source}: tensor {min(twice)} is in two blobs")
        delta.update(share)
    # a tensor coded by rank may be listed and have no change
    return {name: part for name, part in delta.items() if part.num_changed}


def write(path: Path, encoding: str, blobs: list[np.ndarray], delta: Delta, seq: int, shard: Shard = WHOLE) -> None:
    """Write blobs into one file."""
    tensors = {f"{PREFIX}{i}": ("U8", blob.shape, blob) for i, blob in enumerate(blobs)}
    metadata = own_metadata(encoding, seq, num_changed(delta))
    if shard.count > 1:
        metadata["shard"] = str(shard)
    write_tensors(path, tensors, metadata)


def read(path: Path, encoding: str, source: str) -> tuple[list[np.ndarray], Shard]:
    """Blobs of a file, uint8, in memory, and the rows that they speak of."""
    file = TensorFile(path, source)
    check_metadata(file.metadata, encoding, source)
    names = file.names()
    expected = {f"{PREFIX}{i}" for i in range(len(names))}
    if not 1 <= len(names) <= MAX_BLOBS or set(names) != expected:
        raise FormatError(f"{source}: expected blobs {PREFIX}0, {PREFIX}1, …, found {names[:4]!r:.200}")
    for name in names:
        dtype, shape = file.spec(name)
        if dtype != "U8" or len(shape) != 1:
            raise FormatError(f"{source}: {name}: expected U8 of one dimension, found {dtype} {list(shape)}")
    shard = Shard.parse(file.metadata["shard"], source) if "shard" in file.metadata else WHOLE
    return [file.array(f"{PREFIX}{i}").copy() for i in range(len(names))], shard


def _split(delta: Delta) -> list[Delta]:
    total = sum(part.num_changed for part in delta.values())
    num_shares = min(max(1, total // _CHANGES_PER_BLOB), len(delta), _MAX_SHARES)
    if num_shares < 2:
        return [delta]
    shares: list[Delta] = [{}]
    taken = 0
    for name in sorted(delta):
        if taken * num_shares >= total * len(shares) and shares[-1]:
            shares.append({})
        shares[-1][name] = delta[name]
        taken += delta[name].num_changed
    return shares
