# SPDX-License-Identifier: Apache-2.0
"""Publishing a run into a bucket: objects, then the manifest, then the pointer."""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from delta_wire import encodings
from delta_wire.chain import BucketReader, anchor_prefix
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.errors import (
    BaseMismatchError,
    DigestMismatchError,
    FormatError,
    ModelMismatchError,
    ObjectExistsError,
    ObjectNotFoundError,
    SetupError,
    WriterConflictError,
)
from delta_wire.files import sha256_file
from delta_wire.manifest import (
    MAX_ACK_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_POINTER_BYTES,
    POINTER_KEY,
    Ack,
    AnchorPart,
    DeltaPart,
    Manifest,
    ObjectRef,
    Parent,
    Pointer,
    VersionId,
    manifest_key,
    table_key,
)
from delta_wire.state import Delta, TensorDelta, TensorTable, change_of_digest, check_part, compose, num_changed
from delta_wire.stores.base import Store, is_key

__all__ = ["BucketReader", "BucketWriter", "Published"]

_MAX_ACKS = 4096
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """A version that readers can see.

    Args:
        manifest ([`~delta_wire.manifest.Manifest`]): of the version.
        delta_bytes (`int`): size of the delta's objects.
        publish_s (`float`): how long the last call took.
    """

    manifest: Manifest
    delta_bytes: int
    publish_s: float


class BucketWriter:
    """The one writer of a run. Made by [`BucketWriter.start`]; not safe for use by several threads at once.

    Attributes:
        store ([`~delta_wire.stores.Store`]): the bucket.
        table ([`~delta_wire.state.TensorTable`]): the model.
        version ([`~delta_wire.manifest.VersionId`]): newest version that readers can see.
        digest ([`~delta_wire.digest.Digest`]): of that version.
    """

    def __init__(self, store: Store, table: TensorTable, head: Manifest, epoch: int, next_seq: int):
        self.store = store
        self.table = table
        self._head = head
        self._epoch = epoch
        self._next_seq = next_seq
        # a publication that may or may not have reached the bucket
        self._pending: tuple[Manifest, Delta] | None = None

    @property
    def version(self) -> VersionId:
        return self._head.version

    @property
    def digest(self) -> Digest:
        return self._head.digest

    @classmethod
    def start(
        cls,
        store: Store,
        *,
        table: TensorTable,
        digest: Digest,
        reference: str | None,
        anchor_dir: Path | None = None,
        step: int | None = None,
    ) -> BucketWriter:
        """Begin a run in an empty bucket, or take over the run that is there.

        Args:
            store ([`~delta_wire.stores.Store`]): the bucket; it must exist.
            table ([`~delta_wire.state.TensorTable`]): tensors of the model.
            digest ([`~delta_wire.digest.Digest`]): of the trainer's weights as they are now.
            reference (`str`, *optional*): where servers find exactly these weights: a folder, or `repo@revision`.
            anchor_dir (`Path`, *optional*): a checkpoint with exactly these weights, uploaded in place of a reference.
            step (`int`, *optional*): optimizer step.

        A bucket with a run is continued under the next epoch if its newest version has this table and digest.
        [`ModelMismatchError`] or [`BaseMismatchError`] otherwise; nothing is written then.
        """
        encodings.get("plain").check_table(table)
        reader = BucketReader(store)
        head = reader.latest()
        if head is None:
            head = _unfinished_start(reader, digest) or cls._first(store, table, digest, reference, anchor_dir, step)
            _write_pointer(store, head)
            return cls(store, table, head, head.version.epoch, head.version.seq + 1)
        reader.table(head).require_same(table, f"the run in {store.url}", "the trainer's model")
        unseen = [seq for seq in _listed_seqs(store) if seq > head.version.seq]
        # manifests of trainers that died before they moved the pointer; their numbers are not used again
        next_seq = max(unseen, default=head.version.seq) + 1
        if head.digest != digest:
            head = _finish_predecessor(reader, head, unseen, digest)
        if head.digest != digest:
            raise BaseMismatchError(
                f"{store.url}: the newest version {head.version} has digest {head.digest}, the trainer's weights have "
                f"{digest}; resume from the weights of that version (delta-wire checkout) or use an empty bucket"
            )
        return cls(store, table, head, head.version.epoch + 1, next_seq)

    @classmethod
    def _first(
        cls,
        store: Store,
        table: TensorTable,
        digest: Digest,
        reference: str | None,
        anchor_dir: Path | None,
        step: int | None,
    ) -> Manifest:
        version = VersionId(secrets.token_hex(4), 1, 0)
        if (reference is None) == (anchor_dir is None):
            raise SetupError(
                f"{store.url}: version 0 needs either a reference to a checkpoint (a folder, or repo@revision) that "
                "servers can read, or a folder to upload"
            )
        if reference is not None and Path(reference).is_dir():
            reference = str(Path(reference).resolve())
        ref = ObjectRef(table_key(table.sha256), len(table.to_bytes()), table.sha256)
        store.put(ref.key, table.to_bytes())
        anchor = AnchorPart(reference)
        head = Manifest(version, digest, ref, table.num_params, 0, step, round(time.time(), 3), None, None, anchor)
        if anchor_dir is not None:
            anchor = AnchorPart(None, _upload_anchor(store, anchor_dir, table, digest, anchor_prefix(head)))
            head = Manifest(version, digest, ref, table.num_params, 0, step, head.created_unix_s, None, None, anchor)
        # what the parser would refuse is refused before it is written
        Manifest.from_bytes(head.to_bytes(), f"{store.url}/{manifest_key(0)}")
        try:
            store.put(manifest_key(0), head.to_bytes(), create_only=True)
        except ObjectExistsError as error:
            raise WriterConflictError(
                f"{store.url}/{manifest_key(0)}: another trainer began a run here at the same time; give each run a "
                "bucket of its own"
            ) from error
        return head

    def publish(self, delta: Delta, *, digest: Digest, step: int | None, encoding: str = "plain") -> Published:
        """Publish the next version.

        Args:
            delta (`Delta`): from the newest version's state to the new one.
            digest ([`~delta_wire.digest.Digest`]): of the new state.
            step (`int`, *optional*): optimizer step.
            encoding (`str`, *optional*, defaults to `"plain"`): how the delta is written.

        After a [`~delta_wire.errors.StoreError`] call again with the same delta: whatever had reached the bucket is
        found there, so that no version is lost or published twice.
        """
        began_s = time.monotonic()
        settled = self._settle()
        if settled is not None and settled[0].digest == digest:
            # the call before this one got further than it could tell
            manifest = settled[0]
        else:
            if settled is not None:
                delta = _without(settled, delta, digest)
            self._check(delta, digest)
            self._require_own_pointer()
            manifest = self._upload(delta, digest, step, encoding)
            self._pending = (manifest, delta)
            self._commit(manifest)
        return Published(manifest, manifest.delta.size_bytes if manifest.delta else 0, time.monotonic() - began_s)

    def acks(self) -> list[Ack]:
        """What the servers say that they serve. Files that cannot be read are skipped with a warning."""
        found = []
        for info in self.store.list("acks/")[:_MAX_ACKS]:
            source = f"{self.store.url}/{info.key}"
            try:
                ack = Ack.from_bytes(self.store.get(info.key, MAX_ACK_BYTES), source)
            except ObjectNotFoundError:
                continue
            except FormatError as error:
                logger.warning("ignoring an ack: %s", error)
                continue
            if ack.key != info.key:
                logger.warning("ignoring an ack: %s is of server %s", source, ack.server)
                continue
            found.append(ack)
        return found

    def _check(self, delta: Delta, digest: Digest) -> None:
        source = f"{self.store.url}: version {self._next_seq}"
        for name, part in delta.items():
            if name not in self.table or part.name != name:
                raise ModelMismatchError(
                    f"{source}: tensor {name!r} (named {part.name!r}) is not in the model's table of {len(self.table)} "
                    "tensors; the delta is of another model"
                )
            check_part(part, self.table[name], source)
        if any(part.old is None for part in delta.values()):
            return
        found = self.digest + change_of_digest(delta)
        if found != digest:
            raise DigestMismatchError(
                f"{source}: the newest version {self.version} with this delta has digest {found}, expected {digest}; the "
                "delta does not begin at that version. Build it against the snapshot of what was published last."
            )

    def _upload(self, delta: Delta, digest: Digest, step: int | None, encoding: str) -> Manifest:
        seq, head = self._next_seq, self._head
        with tempfile.TemporaryDirectory(prefix="delta-wire-") as folder:
            path = Path(folder) / "delta.safetensors"
            encodings.get(encoding).encode(delta, self.table, path, seq)
            sha256 = sha256_file(path)
            ref = ObjectRef(f"deltas/{seq:012d}-{sha256[:16]}.safetensors", path.stat().st_size, sha256)
            self.store.put(ref.key, path)
        return Manifest(
            version=VersionId(head.version.run, self._epoch, seq),
            digest=digest,
            table=head.table,
            num_params=self.table.num_params,
            changed_params=num_changed(delta),
            step=step,
            created_unix_s=round(time.time(), 3),
            parent=Parent(head.version.seq, head.version.epoch, head.digest, head.sha256),
            delta=DeltaPart(encoding, (ref,)),
            anchor=None,
        )

    def _commit(self, manifest: Manifest) -> None:
        key = manifest_key(manifest.version.seq)
        try:
            self.store.put(key, manifest.to_bytes(), create_only=True)
        except ObjectExistsError as error:
            if self.store.get(key, MAX_MANIFEST_BYTES) != manifest.to_bytes():
                self._pending = None
                raise self._conflict(f"{key} was written by another trainer") from error
        self._advance(manifest)

    def _settle(self) -> tuple[Manifest, Delta] | None:
        """Find out what became of a publication that failed; returns it if its manifest is durable."""
        if self._pending is None:
            return None
        manifest, delta = self._pending
        key = manifest_key(manifest.version.seq)
        try:
            found = self.store.get(key, MAX_MANIFEST_BYTES)
        except ObjectNotFoundError:
            self._pending = None
            return None
        if found != manifest.to_bytes():
            raise self._conflict(f"{key} was written by another trainer")
        self._advance(manifest)
        return manifest, delta

    def _advance(self, manifest: Manifest) -> None:
        # a pointer write whose answer was lost has moved it already
        self._require_own_pointer(manifest)
        _write_pointer(self.store, manifest)
        self._head = manifest
        self._next_seq = manifest.version.seq + 1
        self._pending = None

    def _require_own_pointer(self, manifest: Manifest | None = None) -> None:
        allowed = (
            [_pointer_bytes(self._head)]
            if manifest is None
            else [_pointer_bytes(self._head), _pointer_bytes(manifest)]
        )
        try:
            found = self.store.get(POINTER_KEY, MAX_POINTER_BYTES)
        except ObjectNotFoundError as error:
            raise self._conflict(f"{POINTER_KEY} was removed") from error
        if found not in allowed:
            try:
                other = str(Pointer.from_bytes(found, self.store.url).version)
            except FormatError:
                other = f"something else, {found[:40]!r}"
            raise self._conflict(f"{POINTER_KEY} names {other}")

    def _conflict(self, what: str) -> WriterConflictError:
        return WriterConflictError(
            f"{self.store.url}: expected {POINTER_KEY} to name version {self.version}, which this trainer published last, "
            f"but {what}; stop the other trainer, or start this one with a bucket of its own"
        )


def _without(settled: tuple[Manifest, Delta], delta: Delta, digest: Digest) -> Delta:
    """The rest of a delta that was composed with one which turns out to be published already."""
    manifest, done = settled
    if manifest.parent is None or any(part.old is None for part in (*delta.values(), *done.values())):
        return delta
    if digest - change_of_digest(delta) != manifest.parent.digest:
        return delta
    undo = {
        name: TensorDelta(name, part.indices, part.old, part.new)
        for name, part in done.items()
        if part.old is not None
    }
    return compose(undo, delta)


def _pointer_bytes(manifest: Manifest) -> bytes:
    raw = manifest.to_bytes()
    ref = ObjectRef(manifest_key(manifest.version.seq), len(raw), manifest.sha256)
    return Pointer(manifest.version, ref).to_bytes()


def _write_pointer(store: Store, manifest: Manifest) -> None:
    store.put(POINTER_KEY, _pointer_bytes(manifest))


def _listed_seqs(store: Store) -> list[int]:
    keys = [info.key.removeprefix("versions/").removesuffix(".json") for info in store.list("versions/")]
    return sorted(int(key) for key in keys if key.isdecimal())


def _unfinished_start(reader: BucketReader, digest: Digest) -> Manifest | None:
    """Version 0 of a trainer that died before it wrote the pointer; no reader has seen it."""
    seqs = _listed_seqs(reader.store)
    if not seqs:
        return None
    if seqs != [0]:
        raise WriterConflictError(
            f"{reader.store.url}: there are {len(seqs)} versions but no {POINTER_KEY}; somebody removed it. Use an empty "
            "bucket."
        )
    found = reader.manifest(0)
    reader.table(found)
    if found.digest != digest:
        raise BaseMismatchError(
            f"{reader.store.url}: the unfinished start of run {found.version.run} has digest {found.digest}, the trainer's "
            f"weights have {digest}; use an empty bucket"
        )
    return found


def _finish_predecessor(reader: BucketReader, head: Manifest, unseen: list[int], digest: Digest) -> Manifest:
    """Move the pointer to a version whose trainer died between manifest and pointer, if it is the state at hand."""
    for seq in reversed(unseen):
        found = reader.manifest(seq)
        if found.digest == digest and found.parent is not None and found.parent.manifest_sha256 == head.sha256:
            logger.warning("%s: finishing the publication of version %s", reader.store.url, found.version)
            _write_pointer(reader.store, found)
            return found
    return head


def _upload_anchor(
    store: Store, folder: Path, table: TensorTable, digest: Digest, prefix: str
) -> tuple[ObjectRef, ...]:
    checkpoint = Checkpoint(folder)
    table.require_same(checkpoint.table(), "the trainer's model", str(folder))
    found = checkpoint.digest()
    if found != digest:
        raise DigestMismatchError(
            f"{folder}: the checkpoint to upload has digest {found}, the trainer's weights have {digest}; save it again"
        )
    refs = []
    for name in [*checkpoint.other_files(), *checkpoint.weight_files()]:
        path = folder / name
        if not is_key(prefix + name):
            raise SetupError(f"{path}: this file name cannot be the key of an object; rename the file")
        refs.append(ObjectRef(prefix + name, path.stat().st_size, sha256_file(path)))
        store.put(refs[-1].key, path)
    return tuple(refs)
