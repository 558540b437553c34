# SPDX-License-Identifier: Apache-2.0
"""A delta in several objects, each written by one process that knows nothing of the others' changes.

Every process uploads its own part; the one that owns the run commits them all with one manifest. Digests are sums, so
the parts' changes of it add up to the version's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from delta_wire import encodings
from delta_wire.digest import Digest
from delta_wire.errors import FormatError, ModelMismatchError
from delta_wire.files import sha256_file
from delta_wire.refs import ObjectRef
from delta_wire.shards import WHOLE, Shard
from delta_wire.state import Delta, OldBits, TensorDelta, TensorTable, change_of_digest, check_part, num_changed
from delta_wire.stores.base import Store


@dataclass(frozen=True, slots=True)
class Part:
    """One durable object of a version to come.

    Args:
        ref ([`~delta_wire.refs.ObjectRef`]): the object.
        encoding (`str`): how it is written.
        changed_params (`int`): elements that it changes.
        change ([`~delta_wire.digest.Digest`]): what it adds to the digest of the state.
    """

    ref: ObjectRef
    encoding: str
    changed_params: int
    change: Digest


def upload_part(
    store: Store,
    table: TensorTable,
    delta: Delta,
    *,
    seq: int,
    encoding: str = "packed",
    old_bits: OldBits | None = None,
    shard: Shard = WHOLE,
) -> Part:
    """Check, encode and upload one part of a version. Readers see nothing of it before the manifest.

    Args:
        store ([`~delta_wire.stores.Store`]): the bucket.
        table ([`~delta_wire.state.TensorTable`]): the model.
        delta (`Delta`): changes with old bits and flat indices into whole tensors.
        seq (`int`): number of the version to come.
        encoding (`str`, *optional*, defaults to `"packed"`): how the part is written; the same for all of a version.
        old_bits (`Callable`, *optional*): bits before the change, for encoding `context` and for tensors that are
            smaller sent whole; of the shard's rows only.
        shard ([`~delta_wire.shards.Shard`], *optional*): rows that all changes lie in.
    """
    check_delta(delta, table, f"{store.url}: version {seq}")
    ref = put_delta(store, table, delta, seq=seq, encoding=encoding, old_bits=old_bits, shard=shard)
    return Part(ref, encoding, num_changed(delta), change_of_digest(delta))


def check_delta(delta: Delta, table: TensorTable, source: str) -> None:
    """Refuse a delta that is not one of this model; `source` names the version in errors."""
    for name, part in delta.items():
        if name not in table or part.name != name:
            raise ModelMismatchError(
                f"{source}: tensor {name!r} (named {part.name!r}) is not among the {len(table)} tensors of the run; "
                "the delta is of another model"
            )
        check_part(part, table[name], source)


def put_delta(
    store: Store,
    table: TensorTable,
    delta: Delta,
    *,
    seq: int,
    encoding: str,
    old_bits: OldBits | None = None,
    shard: Shard = WHOLE,
) -> ObjectRef:
    """Encode and upload a delta that has been checked; see [`upload_part`]."""
    with tempfile.TemporaryDirectory(prefix="delta-wire-") as folder:
        path = Path(folder) / "delta.safetensors"
        encodings.get(encoding).encode(delta, table, path, seq, old_bits, shard)
        sha256 = sha256_file(path)
        ref = ObjectRef(f"deltas/{seq:012d}-{sha256[:16]}.safetensors", path.stat().st_size, sha256)
        store.put(ref.key, path)
    return ref


def merge(parts: Sequence[Delta], sources: Sequence[str]) -> Delta:
    """One delta out of parts that have no element in common.

    Args:
        parts (list of `Delta`): checked against the table, without old bits.
        sources (list of `str`): what errors call them.

    Raises [`FormatError`] naming tensor, element and both objects where two parts change the same element.
    """
    if len(parts) == 1:
        return parts[0]
    found: dict[str, list[tuple[TensorDelta, str]]] = {}
    for delta, source in zip(parts, sources, strict=True):
        for name, part in delta.items():
            if part.num_changed:
                found.setdefault(name, []).append((part, source))
    return {name: entries[0][0] if len(entries) == 1 else _join(name, entries) for name, entries in found.items()}


def _join(name: str, entries: list[tuple[TensorDelta, str]]) -> TensorDelta:
    ordered = sorted((part for part, _ in entries), key=lambda part: int(part.indices[0]))
    indices = np.concatenate([part.indices for part in ordered])
    new = np.concatenate([part.new for part in ordered])
    relative = None
    if any(part.relative is not None for part in ordered):
        relative = np.concatenate(
            [np.zeros(part.num_changed, dtype=bool) if part.relative is None else part.relative for part in ordered]
        )
    # rows of one rank come after those of another; only parts cut otherwise interleave
    if any(a.indices[-1] >= b.indices[0] for a, b in pairwise(ordered)):
        order = np.argsort(indices, kind="stable")
        indices, new = indices[order], new[order]
        relative = None if relative is None else relative[order]
        twice = np.flatnonzero(indices[1:] == indices[:-1])
        if twice.size:
            at = int(indices[twice[0]])
            holders = [source for part, source in entries if at in part.indices]
            raise FormatError(
                f"{holders[1]}: tensor {name}: element {at} is also in {holders[0]}; the parts of a delta must not "
                "overlap"
            )
    return TensorDelta(name, indices, new, relative=relative)
