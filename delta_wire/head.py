# SPDX-License-Identifier: Apache-2.0
"""The newest version of a run and the one way to move it: the manifest, then the pointer, and nobody else's."""

from __future__ import annotations

import time

from delta_wire.begin import pointer_bytes, sealed, write_pointer
from delta_wire.digest import Digest
from delta_wire.errors import FormatError, ObjectExistsError, ObjectNotFoundError, WriterConflictError
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
from delta_wire.signing import Signer
from delta_wire.state import Delta
from delta_wire.stores.base import Store


class Head:
    """Moves a run from version to version and notices another writer before it goes on.

    Args:
        store ([`~delta_wire.stores.Store`]): the bucket.
        manifest ([`~delta_wire.manifest.Manifest`]): newest version that readers can see.
        epoch (`int`): of the versions to come.
        next_seq (`int`): number of the next version.
        signer ([`~delta_wire.signing.Signer`], *optional*): signs every manifest.

    Attributes:
        pending ([`~delta_wire.manifest.Manifest`], *optional*): a publication that may or may not have reached the
            bucket.
        pending_delta (`Delta`): its change, empty where only its parts' owners know it.
    """

    def __init__(self, store: Store, manifest: Manifest, epoch: int, next_seq: int, signer: Signer | None = None):
        self.store = store
        self.manifest = manifest
        self.epoch = epoch
        self.next_seq = next_seq
        self.pending: Manifest | None = None
        self.pending_delta: Delta = {}
        self._signer = signer

    def describe(
        self,
        delta: DeltaPart | None,
        digest: Digest,
        step: int | None,
        anchor: AnchorPart | None,
        changed_params: int,
    ) -> Manifest:
        """Manifest of the next version, signed; nothing is written."""
        newest = self.manifest
        manifest = Manifest(
            version=VersionId(newest.version.run, self.epoch, self.next_seq),
            digest=digest,
            table=newest.table,
            num_params=newest.num_params,
            changed_params=changed_params,
            step=step,
            created_unix_s=round(time.time(), 3),
            parent=Parent(newest.version.seq, newest.version.epoch, newest.digest, newest.sha256),
            delta=delta,
            anchor=anchor,
            adapter=newest.adapter,
        )
        return sealed(self.store, manifest, self._signer)

    def commit(self, manifest: Manifest, delta: Delta) -> None:
        """Let readers see the next version. After a [`~delta_wire.errors.StoreError`] call [`Head.settle`], or this
        again with the same manifest."""
        self.pending, self.pending_delta = manifest, delta
        key = manifest_key(manifest.version.seq)
        try:
            self.store.put(key, manifest.to_bytes(), create_only=True)
        except ObjectExistsError as error:
            if self.store.get(key, MAX_MANIFEST_BYTES) != manifest.to_bytes():
                self.pending = None
                raise self._conflict(f"{key} was written by another trainer") from error
        self._advance(manifest)

    def settle(self) -> tuple[Manifest, Delta] | None:
        """Find out what became of a publication that failed; returns it if its manifest is durable."""
        manifest, delta = self.pending, self.pending_delta
        if manifest is None:
            return None
        key = manifest_key(manifest.version.seq)
        try:
            found = self.store.get(key, MAX_MANIFEST_BYTES)
        except ObjectNotFoundError:
            self.pending = None
            return None
        if found != manifest.to_bytes():
            raise self._conflict(f"{key} was written by another trainer")
        self._advance(manifest)
        return manifest, delta

    def require_own(self, manifest: Manifest | None = None) -> None:
        """[`~delta_wire.errors.WriterConflictError`] unless the pointer names the newest version, or `manifest`."""
        allowed = [pointer_bytes(version) for version in (self.manifest, manifest) if version is not None]
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
            self._require_own_manifest(manifest or self.manifest)

    def _advance(self, manifest: Manifest) -> None:
        # a pointer write whose answer was lost has moved it already
        self.require_own(manifest)
        write_pointer(self.store, manifest)
        self.manifest = manifest
        self.next_seq = manifest.version.seq + 1
        self.pending = None

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
            f"{self.store.url}: expected {POINTER_KEY} to name version {self.manifest.version}, which this trainer "
            f"published last, but {what}. Publishing has ended for this run: stop the other trainer if there is one, "
            "repair the bucket and resume from a checkout of its newest version, or start again with an empty bucket"
        )
