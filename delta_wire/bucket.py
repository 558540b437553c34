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
    require_same_adapter,
    unfinished_start,
    write_pointer,
)
from delta_wire.chain import BucketReader
from delta_wire.checkpoint import file_for_all
from delta_wire.digest import Digest
from delta_wire.errors import (
    BaseMismatchError,
    DigestMismatchError,
    FormatError,
    MismatchError,
    ObjectNotFoundError,
    SetupError,
)
from delta_wire.head import Head
from delta_wire.manifest import (
    AnchorPart,
    DeltaPart,
    Manifest,
    VersionId,
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

    def __init__(self, table: TensorTable, head: Head):
        self.table = table
        self._head = head

    @property
    def store(self) -> Store:
        return self._head.store

    @property
    def next_seq(self) -> int:
        """Number of the next version."""
        return self._head.next_seq

    @property
    def head(self) -> Manifest:
        """Manifest of the newest version that readers can see."""
        return self._head.manifest

    @property
    def version(self) -> VersionId:
        return self._head.manifest.version

    @property
    def digest(self) -> Digest:
        return self._head.manifest.digest

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
            return cls(table, Head(store, head, head.version.epoch, head.version.seq + 1, signer))
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
        writer = cls(table, Head(store, head, head.version.epoch + 1, next_seq, signer))
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
            single_file = file_for_all(adapter)
            anchor = stream_anchor(
                store, table, bits, seq=next_seq, digest=digest, files=files, single_file=single_file
            )
            writer._head.commit(writer._head.describe(None, digest, step, anchor, table.num_params), {})
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
        settled = self._head.settle()
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
            self._head.require_own()
            self._check(delta, digest)
            ref = put_delta(self.store, self.table, delta, seq=self.next_seq, encoding=encoding, old_bits=old_bits)
            if anchor is not None and not anchor.objects[0].key.startswith(anchor_prefix(self.next_seq, digest)):
                # uploaded for a number that another try has taken
                anchor = None
            manifest = self._head.describe(DeltaPart(encoding, (ref,)), digest, step, anchor, num_changed(delta))
            self._head.commit(manifest, delta)
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
        pending = self._head.pending
        if pending is not None and (pending.delta is None or pending.delta.objects != refs):
            raise ValueError(f"BucketWriter.commit: version {pending.version} must be settled first")
        if pending is None:
            self._head.require_own()
            (encoding,) = {part.encoding for part in parts}
            digest = sum((part.change for part in parts), self.digest)
            changed_params = sum(part.changed_params for part in parts)
            pending = self._head.describe(DeltaPart(encoding, refs), digest, step, None, changed_params)
            anchor = None if make_anchor is None else make_anchor(pending)
            if anchor is not None:
                pending = self._head.describe(DeltaPart(encoding, refs), digest, step, anchor, changed_params)
        # the same bytes in every try: whichever of them arrives is this version
        self._head.commit(pending, {})
        return Published(pending, sum(ref.size_bytes for ref in refs), time.monotonic() - began_s)

    def acks(self) -> list[Ack]:
        """What the servers say that they serve. Files that cannot be read are skipped with a warning."""
        return read_acks(self.store)

    def _check(self, delta: Delta, digest: Digest) -> None:
        source = f"{self.store.url}: version {self.next_seq}"
        check_delta(delta, self.table, source)
        if any(part.old is None for part in delta.values()):
            return
        found = self.digest + change_of_digest(delta)
        if found != digest:
            raise DigestMismatchError(
                f"{source}: the newest version {self.version} with this delta has digest {found}, expected {digest}; "
                "the delta does not begin at that version. Build it against the snapshot of what was published last."
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
