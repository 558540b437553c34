# SPDX-License-Identifier: Apache-2.0
"""Encoding `plain`: changed positions and new values of every tensor, as other readers of sparse deltas expect.

Letters: `N` elements of a tensor, `K` changed elements of it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from delta_wire.container import Source, TensorFile, write_tensors
from delta_wire.errors import FormatError, ModelMismatchError, UnsupportedFormatError
from delta_wire.shards import WHOLE, Shard
from delta_wire.state import (
    DTYPE,
    MAX_NAME_BYTES,
    Delta,
    OldBits,
    TensorDelta,
    TensorSpec,
    TensorTable,
    after,
    check_part,
    index_dtype,
    num_changed,
)

INDICES = ".indices"
VALUES = ".values"
FORMAT = "1"
# two header entries of a tensor, without its name: dtype, shape, offsets, quotes and commas
_HEADER_BYTES_PER_TENSOR = 512
_METADATA_BYTES = 64 << 10


class PlainEncoding:
    """`<name>.indices` and `<name>.values` for a sparse tensor, `<name>` for one that is sent whole."""

    name = "plain"
    needs_old_weights = False

    def check_table(self, table: TensorTable) -> None:
        for name in table:
            for suffix in (INDICES, VALUES):
                if name.endswith(suffix) and name.removesuffix(suffix) in table:
                    raise ModelMismatchError(
                        f"the model has tensors {name.removesuffix(suffix)!r} and {name!r}, which encoding plain "
                        "cannot tell from its own; rename one of them"
                    )
            if len(name.encode()) > MAX_NAME_BYTES - len(INDICES):
                raise ModelMismatchError(
                    f"encoding plain needs names of at most {MAX_NAME_BYTES - len(INDICES)} bytes, found {name!r}"
                )

    def max_bytes(self, table: TensorTable, num_objects: int = 1) -> int:
        # sparse with every element changed; a writer that has the whole tensor stores less
        sizes = [spec.num_elements for spec in table.values()]
        return num_objects * _max_header_bytes(table) + sum(size * (index_dtype(size).itemsize + 2) for size in sizes)

    def encode(
        self,
        delta: Delta,
        table: TensorTable,
        path: Path,
        seq: int,
        old_bits: OldBits | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.check_table(table)
        if shard.count > 1:
            # other readers know flat indices into whole tensors, which cost no more here; other rows are not at hand
            old_bits = None
        tensors: dict[str, tuple[str, tuple[int, ...], Source]] = {}
        for name, part in delta.items():
            spec = table[name]
            if part.relative is not None:
                raise ValueError(
                    f"encoding plain carries bits, {name} has steps; resolve() it against the old bits first"
                )
            positions = index_dtype(spec.num_elements)
            if part.num_changed == spec.num_elements:
                # every element is here, so the positions say nothing: 2 N bytes instead of 6 N
                tensors[name] = (DTYPE, spec.shape, part.new)
                continue
            if old_bits is not None and part.num_changed * (positions.itemsize + 2) > spec.num_elements * 2:
                tensors[name] = (DTYPE, spec.shape, partial(_whole, part, old_bits))
                continue
            shape = (part.num_changed,)
            tensors[name + INDICES] = (
                "I32" if positions.itemsize == 4 else "I64",
                shape,
                part.indices.astype(positions),
            )
            tensors[name + VALUES] = (DTYPE, shape, part.new)
        changed = num_changed(delta)
        unchanged_frac = 1 - changed / table.num_params if table.num_params else 1.0
        metadata = own_metadata(self.name, seq, changed)
        write_tensors(path, tensors, {"sparse": "True", "sparsity": f"{unchanged_frac:.6f}", **metadata})

    def decode(self, path: Path, table: TensorTable, source: str, old_bits: OldBits | None = None) -> Delta:
        self.check_table(table)
        file = TensorFile(path, source, max_header_bytes=_max_header_bytes(table))
        # files of other writers carry neither key
        check_metadata({"delta_format": FORMAT, "encoding": self.name} | file.metadata, self.name, source)
        delta: Delta = {}
        for stored in file.names():
            name, suffix = _split(stored, table, source)
            if suffix == VALUES:
                if name + INDICES not in file:
                    raise FormatError(f"{source}: {stored} comes without {name}{INDICES}")
                continue
            if name in delta:
                raise FormatError(f"{source}: tensor {name} is stored both whole and sparse")
            part = _dense(file, table[name], source) if suffix == "" else _sparse(file, table[name], source)
            check_part(part, table[name], source)
            delta[name] = part
        return {name: part for name, part in delta.items() if part.num_changed}


def _max_header_bytes(table: TensorTable) -> int:
    # names may be written with six-byte escapes
    return _METADATA_BYTES + sum(2 * 6 * len(name.encode()) + _HEADER_BYTES_PER_TENSOR for name in table)


def _whole(part: TensorDelta, old_bits: OldBits) -> np.ndarray:
    """The whole tensor after a change."""
    return after(old_bits(part.name), part)


def own_metadata(encoding: str, seq: int, changed: int) -> dict[str, str]:
    """What every delta file says of itself."""
    return {
        "model_version": str(seq),
        "changed_params": str(changed),
        "delta_format": FORMAT,
        "encoding": encoding,
    }


def check_metadata(metadata: dict[str, str], encoding: str, source: str) -> None:
    """Refuse a file of another format version or encoding."""
    written = metadata.get("delta_format")
    if written != FORMAT:
        raise UnsupportedFormatError(
            f"{source}: delta_format is {written!r:.40}, this release reads {FORMAT!r}; upgrade delta-weight-sync"
        )
    if metadata.get("encoding") != encoding:
        raise FormatError(f"{source}: expected encoding {encoding!r}, found {metadata.get('encoding')!r:.40}")


def _split(stored: str, table: TensorTable, source: str) -> tuple[str, str]:
    if stored in table:
        return stored, ""
    for suffix in (INDICES, VALUES):
        if stored.endswith(suffix) and stored.removesuffix(suffix) in table:
            return stored.removesuffix(suffix), suffix
    raise ModelMismatchError(
        f"{source}: tensor {stored!r} belongs to none of the {len(table)} tensors of the model; the file is of "
        "another model"
    )


def _dense(file: TensorFile, spec: TensorSpec, source: str) -> TensorDelta:
    found = file.spec(spec.name)
    if found != (DTYPE, spec.shape):
        raise ModelMismatchError(
            f"{source}: tensor {spec.name}: expected {DTYPE} {list(spec.shape)}, found {found[0]} {list(found[1])}"
        )
    bits = file.array(spec.name).reshape(-1).copy()
    return TensorDelta(spec.name, np.arange(bits.size, dtype=index_dtype(bits.size)), bits)


def _sparse(file: TensorFile, spec: TensorSpec, source: str) -> TensorDelta:
    indices, values = spec.name + INDICES, spec.name + VALUES
    if values not in file:
        raise FormatError(f"{source}: {indices} comes without {values}")
    dtype, shape = file.spec(indices)
    if dtype not in ("I32", "I64") or len(shape) != 1 or shape[0] > spec.num_elements:
        raise FormatError(
            f"{source}: {indices}: expected I32 or I64 and at most {spec.num_elements} entries, found {dtype} "
            f"{list(shape)}"
        )
    if file.spec(values) != (DTYPE, shape):
        found = file.spec(values)
        raise FormatError(f"{source}: {values}: expected {DTYPE} {list(shape)}, found {found[0]} {list(found[1])}")
    positions = file.array(indices)
    # checked before narrowing, which would wrap; the order is checked by the caller
    if positions.size and (positions.min() < 0 or positions.max() >= spec.num_elements):
        raise FormatError(
            f"{source}: {indices}: positions from {positions.min()} to {positions.max()} are outside of the "
            f"{spec.num_elements} elements of {list(spec.shape)}"
        )
    return TensorDelta(spec.name, positions.astype(index_dtype(spec.num_elements)), file.array(values).copy())
