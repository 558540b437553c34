# SPDX-License-Identifier: Apache-2.0
"""Publishing a run into a bucket: objects, then the manifest, then the pointer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from delta_wire import encodings
from delta_wire.acks import Ack, read_acks
from delta_wire.adapter import Adapter
from delta_wire.anchors import anchor_prefix, stream_anchor
from delta_wire.begin import (
    finish_predecessor,
    first_version,
    listed_seqs,
    pointer_bytes,
    require_same_adapter,
    sealed,
    unfinished_start,
    write_pointer,
)
from delta_wire.chain import BucketReader
from delta_wire.checkpoint import ADAPTER_FILE
from delta_wire.digest import Digest
from delta_wire.errors import (
    BaseMismatchError,
    DigestMismatchError,
    FormatError,
    MismatchError,
    ObjectExistsError,
    ObjectNotFoundError,
    SetupError,
    WriterConflictError,
)
from delta_wire.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_POINTER_BYTES,
    POINTER_KEY,
    AnchorPart,
    DeltaPart,
    Manifest,
    Parent,
    Pointer,
    VersionId,
    manifest_key,
)
from delta_wire.parts import Part, check_delta, put_delta
from delta_wire.rejoin import delta_from
from delta_wire.signing import Signer
from delta_wire.state import (
    Delta,
    OldBits,
    TensorTable,
    after,
    change_of_digest,
    compose,
    inverse,
    num_changed,
)
from delta_wire.stores.base import Store

__all__ = ["BucketReader", "BucketWriter", "Published"]
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

    def __init__(
        self,
        store: Store,
        table: TensorTable,
        head: Manifest,
        epoch: int,
        next_seq: int,
        signer: Signer | None = None,
    ):
        self.store = store
        self._signer = signer
        self.table = table
        self._head = head
        self._epoch = epoch
        self._next_seq = next_seq
        # a publication that may or may not have reached the bucket
        self._pending: tuple[Manifest, Delta] | None = None

    @property
    def next_seq(self) -> int:
        """Number of the next version."""
        return self._next_seq

    @property
    def head(self) -> Manifest:
        """Manifest of the newest version that readers can see."""
        return self._head

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
        bits: OldBits | None = None,
        files: Path | None = None,
        signer: Signer | None = None,
        adapter: Adapter | None = None,
    ) -> BucketWriter:
        """Begin a run in an empty bucket, or take over the run that is there.

        Args:
            store ([`~delta_wire.stores.Store`]): the bucket; it must exist.
            table ([`~delta_wire.state.TensorTable`]): tensors of the model.
            digest ([`~delta_wire.digest.Digest`]): of the trainer's weights as they are now.
            reference (`str`, *optional*): where servers find exactly these weights: a folder, or `repo@revision`.
            anchor_dir (`Path`, *optional*): a checkpoint with exactly these weights, uploaded in place of a reference.
            step (`int`, *optional*): optimizer step.
            bits (`Callable`, *optional*): the trainer's whole tensors, uint16, if it may go on from other weights than
                those of the newest version, as after a resume: the difference becomes the next version, or an anchor
                where what the difference would be told from is lost.
            files (`Path`, *optional*): folder with configuration, tokenizer and templates for such an anchor.
            signer ([`~delta_wire.signing.Signer`], *optional*): signs every manifest; a run is signed from its first
                version on, by one key.
            adapter ([`~delta_wire.adapter.Adapter`], *optional*): the states are adapters, and this is what for.

        A bucket with a run is continued under the next epoch if its newest version has this table and digest, or
        `bits` are given. [`ModelMismatchError`] or [`BaseMismatchError`] otherwise; nothing is written then.
        """
        encodings.get("plain").check_table(table)
        reader = BucketReader(store, None if signer is None else signer.verifier())
        head = reader.latest()
        if head is None:
            head = unfinished_start(reader, table, digest) or first_version(
                store, table, digest, reference, anchor_dir, step, signer, adapter
            )
            write_pointer(store, head)
            return cls(store, table, head, head.version.epoch, head.version.seq + 1, signer)
        if signer is None and head.signature is not None:
            raise SetupError(
                f"{store.url}: the run is signed, and this trainer has no key, so servers would refuse what it "
                "publishes; set delta_sync_signing_key, or use an empty bucket"
            )
        reader.table(head).require_same(table, f"the run in {store.url}", "the trainer's model")
        require_same_adapter(store, head, adapter)
        unseen = [seq for seq in listed_seqs(store) if seq > head.version.seq]
        # manifests of trainers that died before they moved the pointer; their numbers are not used again
        next_seq = max(unseen, default=head.version.seq) + 1
        if head.digest != digest:
            head = finish_predecessor(reader, head, unseen, digest)
        writer = cls(store, table, head, head.version.epoch + 1, next_seq, signer)
        if head.digest == digest:
            return writer
        if bits is None:
            raise BaseMismatchError(
                f"{store.url}: the newest version {head.version} has digest {head.digest}, the trainer's weights have "
                f"{digest}; resume from the weights of that version (delta-wire checkout) or use an empty bucket"
            )
        logger.warning(
            "%s: the trainer's weights are not those of the newest version %s; the next version leads from there to "
            "them",
            store.url,
            head.version,
        )
        try:
            delta = delta_from(reader, head, table, digest, bits)
        except (FormatError, MismatchError, ObjectNotFoundError, SetupError) as error:
            logger.warning("%s: uploading a checkpoint instead: %s", store.url, error)
            single_file = None if adapter is None else ADAPTER_FILE
            anchor = stream_anchor(
                store, table, bits, seq=next_seq, digest=digest, files=files, single_file=single_file
            )
            writer._begin(writer._manifest(None, digest, step, anchor, table.num_params), {})
        else:
            writer.publish(delta, digest=digest, step=step)
        return writer

    def publish(
        self,
        delta: Delta,
        *,
        digest: Digest,
        step: int | None,
        encoding: str = "packed",
        old_bits: OldBits | None = None,
        anchor: AnchorPart | None = None,
    ) -> Published:
        """Publish the next version.

        Args:
            delta (`Delta`): from the newest version's state to the new one.
            digest ([`~delta_wire.digest.Digest`]): of the new state.
            step (`int`, *optional*): optimizer step.
            encoding (`str`, *optional*, defaults to `"packed"`): how the delta is written.
            old_bits (`Callable`, *optional*): whole tensors of the newest version's state, for encoding `context`,
                and for tensors that are smaller sent whole.
            anchor ([`~delta_wire.manifest.AnchorPart`], *optional*): a checkpoint of the new state, uploaded for
                [`BucketWriter.next_seq`] and this digest.

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
                rest = _without(settled, delta, digest)
                if rest is not delta and old_bits is not None:
                    # the caller's idea of the newest version is one behind
                    old_bits = partial(_moved, old_bits, settled[1])
                delta = rest
            self._require_own_pointer()
            self._check(delta, digest)
            ref = put_delta(self.store, self.table, delta, seq=self._next_seq, encoding=encoding, old_bits=old_bits)
            if anchor is not None and not anchor.objects[0].key.startswith(anchor_prefix(self._next_seq, digest)):
                # uploaded for a number that another try has taken
                anchor = None
            manifest = self._manifest(DeltaPart(encoding, (ref,)), digest, step, anchor, num_changed(delta))
            self._begin(manifest, delta)
        return Published(manifest, manifest.delta.size_bytes if manifest.delta else 0, time.monotonic() - began_s)

    def commit(
        self,
        parts: Sequence[Part],
        *,
        step: int | None,
        make_anchor: Callable[[Manifest], AnchorPart | None] | None = None,
    ) -> Published:
        """Publish the next version out of parts that other processes have uploaded.

        Args:
            parts (list of [`~delta_wire.parts.Part`]): all of the version, at least one, made for
                [`BucketWriter.next_seq`].
            step (`int`, *optional*): optimizer step.
            make_anchor (`Callable`, *optional*): may upload a checkpoint of the new state, given its manifest.

        The digest is that of the newest version plus the parts' changes. After a
        [`~delta_wire.errors.StoreError`] call again with the same parts until it succeeds: the version may be
        durable already.
        """
        began_s = time.monotonic()
        # parts without a change say nothing, and may be the same bytes
        parts = [part for part in parts if part.changed_params] or parts[:1]
        refs = tuple(part.ref for part in parts)
        pending = None if self._pending is None else self._pending[0]
        if pending is not None and (pending.delta is None or pending.delta.objects != refs):
            raise ValueError(f"BucketWriter.commit: version {pending.version} must be settled first")
        if pending is None:
            self._require_own_pointer()
            (encoding,) = {part.encoding for part in parts}
            digest = sum((part.change for part in parts), self.digest)
            changed_params = sum(part.changed_params for part in parts)
            pending = self._manifest(DeltaPart(encoding, refs), digest, step, None, changed_params)
            anchor = None if make_anchor is None else make_anchor(pending)
            if anchor is not None:
                pending = self._manifest(DeltaPart(encoding, refs), digest, step, anchor, changed_params)
            self._pending = (pending, {})
        # the same bytes in every try: whichever of them arrives is this version
        self._commit(pending)
        return Published(pending, sum(ref.size_bytes for ref in refs), time.monotonic() - began_s)

    def acks(self) -> list[Ack]:
        """What the servers say that they serve. Files that cannot be read are skipped with a warning."""
        return read_acks(self.store)

    def _check(self, delta: Delta, digest: Digest) -> None:
        source = f"{self.store.url}: version {self._next_seq}"
        check_delta(delta, self.table, source)
        if any(part.old is None for part in delta.values()):
            return
        found = self.digest + change_of_digest(delta)
        if found != digest:
            raise DigestMismatchError(
                f"{source}: the newest version {self.version} with this delta has digest {found}, expected {digest}; "
                "the delta does not begin at that version. Build it against the snapshot of what was published last."
            )

    def _begin(self, manifest: Manifest, delta: Delta) -> None:
        self._pending = (manifest, delta)
        self._commit(manifest)

    def _manifest(
        self,
        delta: DeltaPart | None,
        digest: Digest,
        step: int | None,
        anchor: AnchorPart | None,
        changed_params: int,
    ) -> Manifest:
        seq, head = self._next_seq, self._head
        manifest = Manifest(
            version=VersionId(head.version.run, self._epoch, seq),
            digest=digest,
            table=head.table,
            num_params=self.table.num_params,
            changed_params=changed_params,
            step=step,
            created_unix_s=round(time.time(), 3),
            parent=Parent(head.version.seq, head.version.epoch, head.digest, head.sha256),
            delta=delta,
            anchor=anchor,
            adapter=head.adapter,
        )
        return sealed(self.store, manifest, self._signer)

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
        write_pointer(self.store, manifest)
        self._head = manifest
        self._next_seq = manifest.version.seq + 1
        self._pending = None

    def _require_own_pointer(self, manifest: Manifest | None = None) -> None:
        allowed = (
            [pointer_bytes(self._head)] if manifest is None else [pointer_bytes(self._head), pointer_bytes(manifest)]
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
        if not self.store.create_only:
            self._require_own_manifest(manifest or self._head)

    def _require_own_manifest(self, manifest: Manifest) -> None:
        """Where the store cannot keep a second writer from replacing a manifest, notice it before going on from it."""
        key = manifest_key(manifest.version.seq)
        try:
            found = self.store.get(key, MAX_MANIFEST_BYTES)
        except ObjectNotFoundError as error:
            raise self._conflict(f"{key} was removed") from error
        if found != manifest.to_bytes():
            raise self._conflict(f"{key} was replaced by another trainer")

    def _conflict(self, what: str) -> WriterConflictError:
        return WriterConflictError(
            f"{self.store.url}: expected {POINTER_KEY} to name version {self.version}, which this trainer published "
            f"last, but {what}. Publishing has ended for this run: stop the other trainer if there is one, repair the "
            "bucket and resume from a checkout of its newest version, or start again with an empty bucket"
        )


def _moved(old_bits: OldBits, delta: Delta, name: str) -> np.ndarray:
    return after(old_bits(name), delta.get(name))


def _without(settled: tuple[Manifest, Delta], delta: Delta, digest: Digest) -> Delta:
    """The rest of a delta that was composed with one which turns out to be published already."""
    manifest, done = settled
    if manifest.parent is None or any(part.old is None for part in (*delta.values(), *done.values())):
        return delta
    if digest - change_of_digest(delta) != manifest.parent.digest:
        return delta
    return compose(inverse(done), delta)
