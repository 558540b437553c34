# SPDX-License-Identifier: Apache-2.0
"""The small JSON objects of a bucket: manifests, the pointer, acks. docs/FORMAT.md is the norm.

Parsing is strict and bounded: what these objects say decides which other objects are read, and how large they may be.
Unknown fields are ignored, a newer `format` is refused.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from delta_wire.digest import Digest
from delta_wire.errors import FormatError, UnsupportedFormatError
from delta_wire.stores.base import MAX_KEY_CHARS, is_key
from delta_wire.strict import (
    dump,
    load_object,
    take,
    take_float,
    take_int,
    take_object,
    take_sha256,
    take_text,
)

FORMAT_VERSION = 1
POINTER_KEY = "LATEST"
MAX_POINTER_BYTES = 64 << 10
MAX_MANIFEST_BYTES = 4 << 20
MAX_ACK_BYTES = 16 << 10
MAX_OBJECTS = 10_000
MAX_SEQ = 10**12 - 1
MAX_REFERENCE_CHARS = 4096
MAX_REASON_CHARS = 2000
_RUN = re.compile(r"[A-Za-z0-9]{1,64}")
_ENCODING = re.compile(r"[a-z0-9_]{1,32}")
_SERVER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"([A-Za-z0-9]{1,64})-([0-9]{1,15})-([0-9]{1,12})")


@dataclass(frozen=True, slots=True)
class VersionId:
    """Names a version of a run.

    Args:
        run (`str`): random, one per bucket.
        epoch (`int`): grows by one each time a trainer takes the run over.
        seq (`int`): grows with every version; sorts as an integer.
    """

    run: str
    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.run}-{self.epoch}-{self.seq}"

    @classmethod
    def parse(cls, text: str) -> VersionId:
        """Read what `str()` writes."""
        match = _VERSION.fullmatch(text)
        if not match:
            raise FormatError(f"expected a version of the form run-epoch-seq, found {text!r:.120}")
        return cls(match[1], int(match[2]), int(match[3]))

    def to_json(self) -> dict[str, Any]:
        return {"run": self.run, "epoch": self.epoch, "seq": self.seq}

    @classmethod
    def from_json(cls, value: dict[str, Any], source: str) -> VersionId:
        run = take_text(value, "run", source, 64)
        if not _RUN.fullmatch(run):
            raise FormatError(f"{source}: run must be 1 to 64 letters or digits, found {run!r}")
        return cls(run, take_int(value, "epoch", source, 1, 10**15 - 1), take_int(value, "seq", source, 0, MAX_SEQ))


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object by key, size and hash; a reader takes nothing else for it."""

    key: str
    size_bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "size_bytes": self.size_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: object, source: str, prefix: str) -> ObjectRef:
        if not isinstance(value, dict):
            raise FormatError(f"{source}: expected a reference to an object, found {value!r:.80}")
        key = take_text(value, "key", source, MAX_KEY_CHARS)
        if not is_key(key) or not key.startswith(prefix):
            raise FormatError(f"{source}: the key {key!r} is not allowed here, expected {prefix}…")
        return cls(key, take_int(value, "size_bytes", source), take_sha256(value, "sha256", source))


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
        )

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> Manifest:
        """Parse and check a manifest; `source` names the object in errors."""
        value = _load(raw, source, MAX_MANIFEST_BYTES)
        version = VersionId.from_json(take_object(value, "version", source), f"{source}: version")
        num_params = take_int(value, "num_params", source, 0, 1 << 60)
        table = ObjectRef.from_json(take(value, "table", source), f"{source}: table", "tables/")
        if table.key != table_key(table.sha256):
            raise FormatError(f"{source}: table: the key {table.key} does not carry the hash {table.sha256}")
        manifest = cls(
            version=version,
            digest=_take_digest(value, source),
            table=table,
            num_params=num_params,
            changed_params=take_int(value, "changed_params", source, 0, num_params),
            step=None if take(value, "step", source) is None else take_int(value, "step", source),
            created_unix_s=take_float(value, "created_unix_s", source),
            parent=_parse_parent(take(value, "parent", source), version, f"{source}: parent"),
            delta=_parse_delta(take(value, "delta", source), f"{source}: delta"),
            anchor=_parse_anchor(take(value, "anchor", source), f"{source}: anchor"),
        )
        if manifest.delta is None and manifest.anchor is None:
            raise FormatError(f"{source}: a version needs a delta or an anchor, found neither")
        if manifest.delta is not None and manifest.parent is None:
            raise FormatError(f"{source}: a delta needs a parent to apply to, found none")
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
        value = _load(raw, source, MAX_POINTER_BYTES)
        version = VersionId.from_json(take_object(value, "version", source), f"{source}: version")
        ref = ObjectRef.from_json(take(value, "manifest", source), f"{source}: manifest", "versions/")
        if ref.key != manifest_key(version.seq) or ref.size_bytes > MAX_MANIFEST_BYTES:
            raise FormatError(
                f"{source}: expected the manifest {manifest_key(version.seq)} of at most {MAX_MANIFEST_BYTES} bytes, "
                f"found {ref.key} of {ref.size_bytes}"
            )
        return cls(version, ref)


@dataclass(frozen=True, slots=True)
class Ack:
    """What a server says about itself.

    Args:
        server (`str`): its id, 1 to 128 letters, digits or `._-`.
        version ([`VersionId`], *optional*), digest ([`Digest`], *optional*): what it serves.
        state (`str`): `"serving"` or `"degraded"`.
        reason (`str`, *optional*): why it is degraded.
        pause_ms (`float`, *optional*): how long the last commit held generation up.
        served_unix_s (`float`): since when, by the server's clock.
    """

    server: str
    version: VersionId | None
    digest: Digest | None
    state: Literal["serving", "degraded"]
    reason: str | None
    pause_ms: float | None
    served_unix_s: float

    @property
    def key(self) -> str:
        if not _SERVER.fullmatch(self.server):
            raise FormatError(f"a server id is 1 to 128 letters, digits or ._-, found {self.server!r:.200}")
        return f"acks/{self.server}.json"

    def to_bytes(self) -> bytes:
        return dump(
            {
                "format": FORMAT_VERSION,
                "server": self.server,
                "version": self.version and self.version.to_json(),
                "digest": None if self.digest is None else str(self.digest),
                "state": self.state,
                "reason": _printable(self.reason),
                "pause_ms": self.pause_ms,
                "served_unix_s": self.served_unix_s,
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> Ack:
        value = _load(raw, source, MAX_ACK_BYTES)
        state = take(value, "state", source)
        if state not in ("serving", "degraded"):
            raise FormatError(f"{source}: state must be serving or degraded, found {state!r:.80}")
        version = take(value, "version", source)
        server = take_text(value, "server", source, 128)
        if not _SERVER.fullmatch(server):
            raise FormatError(f"{source}: a server id is 1 to 128 letters, digits or ._-, found {server!r}")
        return cls(
            server=server,
            version=None
            if version is None
            else VersionId.from_json(take_object(value, "version", source), f"{source}: version"),
            digest=None if take(value, "digest", source) is None else _take_digest(value, source),
            state=state,
            reason=None
            if take(value, "reason", source) is None
            else take_text(value, "reason", source, MAX_REASON_CHARS),
            pause_ms=None if take(value, "pause_ms", source) is None else take_float(value, "pause_ms", source),
            served_unix_s=take_float(value, "served_unix_s", source),
        )


def manifest_key(seq: int) -> str:
    """Key of a version's manifest; zero-padded, so that names sort as numbers."""
    return f"versions/{seq:012d}.json"


def table_key(sha256: str) -> str:
    """Key of a tensor table."""
    return f"tables/{sha256}.json"


def _load(raw: bytes, source: str, max_bytes: int) -> dict[str, Any]:
    value = load_object(raw, source, max_bytes)
    written = take_int(value, "format", source, 1)
    if written > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{source}: written in format {written}, this release reads up to {FORMAT_VERSION}; upgrade delta-weight-sync here"
        )
    return value


def _take_digest(value: dict[str, Any], source: str) -> Digest:
    try:
        return Digest.parse(take(value, "digest", source))
    except FormatError as error:
        raise FormatError(f"{source}: digest: {error}") from None


def _parse_parent(value: object, version: VersionId, source: str) -> Parent | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise FormatError(f"{source}: expected an object, found {value!r:.80}")
    parent = Parent(
        take_int(value, "seq", source, 0, MAX_SEQ),
        take_int(value, "epoch", source, 1, 10**15 - 1),
        _take_digest(value, source),
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


def _printable(text: str | None) -> str | None:
    """What the parser accepts: one printable line, not empty."""
    if text is None:
        return None
    line = "".join(char if char.isprintable() else " " for char in text)[:MAX_REASON_CHARS]
    return line or None
