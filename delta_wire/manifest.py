# SPDX-License-Identifier: Apache-2.0
"""The small JSON objects of a bucket: manifests and the pointer. docs/FORMAT.md is the norm.

Parsing is strict and bounded: what these objects say decides which other objects are read, and how large they may be.
Unknown fields are ignored, a newer `format` is refused.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from delta_wire.acks import MAX_ACK_BYTES, Ack
from delta_wire.adapter import MAX_REFERENCE_CHARS, Adapter, parse_adapter
from delta_wire.digest import Digest
from delta_wire.errors import FormatError
from delta_wire.refs import (
    FORMAT_VERSION,
    MAX_EPOCH,
    MAX_SEQ,
    ObjectRef,
    VersionId,
    load_document,
    manifest_key,
    table_key,
    take_digest,
)
from delta_wire.signing import take_signature
from delta_wire.strict import dump, take, take_float, take_int, take_object, take_sha256, take_text

__all__ = [
    "FORMAT_VERSION",
    "MAX_ACK_BYTES",
    "MAX_MANIFEST_BYTES",
    "MAX_POINTER_BYTES",
    "POINTER_KEY",
    "Ack",
    "AnchorPart",
    "DeltaPart",
    "Manifest",
    "ObjectRef",
    "Parent",
    "Pointer",
    "VersionId",
    "manifest_key",
    "table_key",
]

POINTER_KEY = "LATEST"
MAX_POINTER_BYTES = 64 << 10
MAX_MANIFEST_BYTES = 4 << 20
MAX_OBJECTS = 10_000
_ENCODING = re.compile(r"[a-z0-9_]{1,32}")


@dataclass(frozen=True, slots=True)
class Parent:
    """The version a version follows."""

    seq: int
    epoch: int
    digest: Digest
    manifest_sha256: str


@dataclass(frozen=True, slots=True)
class DeltaPart:
    """Objects that turn the parent's state into the version's."""

    encoding: str
    objects: tuple[ObjectRef, ...]

    @property
    def size_bytes(self) -> int:
        return sum(ref.size_bytes for ref in self.objects)


@dataclass(frozen=True, slots=True)
class AnchorPart:
    """A complete checkpoint with the version's digest: a reference to one that lies elsewhere, or uploaded objects."""

    reference: str | None
    objects: tuple[ObjectRef, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Everything about one version.

    Args:
        version ([`VersionId`]): the version.
        digest ([`Digest`]): of its state.
        table ([`ObjectRef`]): the tensor table.
        num_params, changed_params (`int`): elements of the state, and how many differ from the parent's.
        step (`int`, *optional*): optimizer step of the trainer.
        created_unix_s (`float`): trainer's clock.
        parent ([`Parent`], *optional*): the version before; absent in the first of a run.
        delta ([`DeltaPart`], *optional*): how to get here from the parent.
        anchor ([`AnchorPart`], *optional*): how to get here from nothing. One of both is always there.
        adapter ([`~delta_wire.adapter.Adapter`], *optional*): set if the states of the run are adapters.
        signature (`str`, *optional*): as read, see [`~delta_wire.signing`].
    """

    version: VersionId
    digest: Digest
    table: ObjectRef
    num_params: int
    changed_params: int
    step: int | None
    created_unix_s: float
    parent: Parent | None
    delta: DeltaPart | None
    anchor: AnchorPart | None
    adapter: Adapter | None = None
    signature: str | None = field(default=None, repr=False)
    # as read: fields that a later release added take part in the hash that the next manifest names
    _raw: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def to_bytes(self) -> bytes:
        """The bytes it was read from, or compact JSON."""
        if self._raw is not None:
            return self._raw
        parent, delta, anchor = self.parent, self.delta, self.anchor
        return dump(
            {
                "format": FORMAT_VERSION,
                "version": self.version.to_json(),
                "digest": str(self.digest),
                "table": self.table.to_json(),
                "num_params": self.num_params,
                "changed_params": self.changed_params,
                "step": self.step,
                "created_unix_s": self.created_unix_s,
                "parent": parent
                and {
                    "seq": parent.seq,
                    "epoch": parent.epoch,
                    "digest": str(parent.digest),
                    "manifest_sha256": parent.manifest_sha256,
                },
                "delta": delta and {"encoding": delta.encoding, "objects": [ref.to_json() for ref in delta.objects]},
                "anchor": anchor
                and {"reference": anchor.reference, "objects": [ref.to_json() for ref in anchor.objects]},
            }
            | ({} if self.adapter is None else {"adapter": self.adapter.to_json()})
        )

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> Manifest:
        """Parse and check a manifest; `source` names the object in errors."""
        value = load_document(raw, source, MAX_MANIFEST_BYTES)
        version = VersionId.from_json(take_object(value, "version", source), f"{source}: version")
        num_params = take_int(value, "num_params", source, 0, 1 << 60)
        table = ObjectRef.from_json(take(value, "table", source), f"{source}: table", "tables/")
        if table.key != table_key(table.sha256):
            raise FormatError(f"{source}: table: the key {table.key} does not carry the hash {table.sha256}")
        manifest = cls(
            version=version,
            digest=take_digest(value, source),
            table=table,
            num_params=num_params,
            changed_params=take_int(value, "changed_params", source, 0, num_params),
            step=None if take(value, "step", source) is None else take_int(value, "step", source),
            created_unix_s=take_float(value, "created_unix_s", source),
            parent=_parse_parent(take(value, "parent", source), version, f"{source}: parent"),
            delta=_parse_delta(take(value, "delta", source), f"{source}: delta"),
            anchor=_parse_anchor(take(value, "anchor", source), f"{source}: anchor"),
            adapter=parse_adapter(value.get("adapter"), f"{source}: adapter"),
            signature=take_signature(value, source),
        )
        if manifest.delta is None and manifest.anchor is None:
            raise FormatError(f"{source}: a version needs a delta or an anchor, found neither")
        if manifest.delta is not None and manifest.parent is None:
            raise FormatError(f"{source}: a delta needs a parent to apply to, found none")
        parent = manifest.parent
        if (
            manifest.delta is not None
            and parent
            and (parent.digest == manifest.digest) != (not manifest.changed_params)
        ):
            raise FormatError(
                f"{source}: changed_params is {manifest.changed_params}, but the digest is "
                f"{'that' if parent.digest == manifest.digest else 'not that'} of the parent; one of them is wrong"
            )
        object.__setattr__(manifest, "_raw", raw)
        return manifest


@dataclass(frozen=True, slots=True)
class Pointer:
    """What `LATEST` says: the newest version whose objects are all durable."""

    version: VersionId
    manifest: ObjectRef

    def to_bytes(self) -> bytes:
        return dump({"format": FORMAT_VERSION, "version": self.version.to_json(), "manifest": self.manifest.to_json()})

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> Pointer:
        value = load_document(raw, source, MAX_POINTER_BYTES)
        version = VersionId.from_json(take_object(value, "version", source), f"{source}: version")
        ref = ObjectRef.from_json(take(value, "manifest", source), f"{source}: manifest", "versions/")
        if ref.key != manifest_key(version.seq) or ref.size_bytes > MAX_MANIFEST_BYTES:
            raise FormatError(
                f"{source}: expected the manifest {manifest_key(version.seq)} of at most {MAX_MANIFEST_BYTES} bytes, "
                f"found {ref.key} of {ref.size_bytes}"
            )
        return cls(version, ref)


def _parse_parent(value: object, version: VersionId, source: str) -> Parent | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise FormatError(f"{source}: expected an object, found {value!r:.80}")
    parent = Parent(
        take_int(value, "seq", source, 0, MAX_SEQ),
        take_int(value, "epoch", source, 1, MAX_EPOCH),
        take_digest(value, source),
        take_sha256(value, "manifest_sha256", source),
    )
    if parent.seq >= version.seq or parent.epoch > version.epoch:
        raise FormatError(
            f"{source}: a parent comes before its child, found {parent.epoch}-{parent.seq} before "
            f"{version.epoch}-{version.seq}"
        )
    return parent


def _parse_refs(value: dict[str, Any], source: str, prefix: str) -> tuple[ObjectRef, ...]:
    refs = take(value, "objects", source)
    if not isinstance(refs, list) or len(refs) > MAX_OBJECTS:
        raise FormatError(f"{source}: objects must be a list of at most {MAX_OBJECTS}, found {refs!r:.80}")
    parsed = tuple(ObjectRef.from_json(ref, f"{source}: objects[{i}]", prefix) for i, ref in enumerate(refs))
    if len({ref.key for ref in parsed}) != len(parsed):
        raise FormatError(f"{source}: an object is listed twice")
    return parsed


def _parse_delta(value: object, source: str) -> DeltaPart | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise FormatError(f"{source}: expected an object, found {value!r:.80}")
    encoding = take_text(value, "encoding", source, 32)
    objects = _parse_refs(value, source, "deltas/")
    if not _ENCODING.fullmatch(encoding) or not objects:
        raise FormatError(f"{source}: expected the name of an encoding and at least one object, found {value!r:.200}")
    return DeltaPart(encoding, objects)


def _parse_anchor(value: object, source: str) -> AnchorPart | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise FormatError(f"{source}: expected an object, found {value!r:.80}")
    reference = take(value, "reference", source)
    if reference is not None:
        reference = take_text(value, "reference", source, MAX_REFERENCE_CHARS)
    objects = _parse_refs(value, source, "anchors/")
    if (reference is None) == (not objects):
        raise FormatError(f"{source}: an anchor is either a reference or a list of objects")
    return AnchorPart(reference, objects)
