# SPDX-License-Identifier: Apache-2.0
"""How a writer begins: a new run in an empty bucket, or where another writer has stopped."""

from __future__ import annotations

import logging
import os
import secrets
import time
from pathlib import Path

from delta_wire.adapter import Adapter
from delta_wire.anchors import upload_anchor
from delta_wire.chain import BucketReader
from delta_wire.digest import Digest
from delta_wire.errors import (
    BaseMismatchError,
    ObjectExistsError,
    SetupError,
    WriterConflictError,
)
from delta_wire.manifest import (
    POINTER_KEY,
    AnchorPart,
    Manifest,
    ObjectRef,
    Pointer,
    VersionId,
    manifest_key,
    table_key,
)
from delta_wire.signing import Signer
from delta_wire.state import TensorTable
from delta_wire.stores.base import Store

logger = logging.getLogger(__name__)


def sealed(store: Store, manifest: Manifest, signer: Signer | None) -> Manifest:
    """A new manifest as its readers will find it, signed if the run is."""
    # what no reader would accept is refused before it is written
    raw = manifest.to_bytes() if signer is None else signer.sign(manifest.to_bytes())
    return Manifest.from_bytes(raw, f"{store.url}/{manifest_key(manifest.version.seq)}")


def first_version(
    store: Store,
    table: TensorTable,
    digest: Digest,
    reference: str | None,
    anchor_dir: Path | None,
    step: int | None,
    signer: Signer | None,
    adapter: Adapter | None = None,
) -> Manifest:
    """Write table, anchor and manifest of version 0."""
    version = VersionId(secrets.token_hex(4), 1, 0)
    if (reference is None) == (anchor_dir is None):
        raise SetupError(
            f"{store.url}: version 0 needs either a reference to a checkpoint (a folder, or repo@revision) that "
            "servers can read, or a folder to upload"
        )
    if reference is not None and os.path.isdir(reference):
        reference = str(Path(reference).resolve())
    ref = ObjectRef(table_key(table.sha256), len(table.to_bytes()), table.sha256)
    store.put(ref.key, table.to_bytes())
    anchor = AnchorPart(reference) if anchor_dir is None else upload_anchor(store, anchor_dir, table, digest, 0)
    now_s = round(time.time(), 3)
    head = Manifest(version, digest, ref, table.num_params, 0, step, now_s, None, None, anchor, adapter)
    head = sealed(store, head, signer)
    try:
        store.put(manifest_key(0), head.to_bytes(), create_only=True)
    except ObjectExistsError as error:
        raise WriterConflictError(
            f"{store.url}/{manifest_key(0)}: another trainer began a run here at the same time; give each run a "
            "bucket of its own"
        ) from error
    return head


def require_same_adapter(store: Store, head: Manifest, adapter: Adapter | None) -> None:
    """Raise [`BaseMismatchError`] unless a run's states are adapters for the same base, or none at all, as before."""
    found = head.adapter
    if (found is None) != (adapter is None):
        kinds = ["the weights of a whole model", "an adapter"]
        raise BaseMismatchError(
            f"{store.url}: the run's states are {kinds[found is not None]}, this trainer publishes "
            f"{kinds[adapter is not None]}; use an empty bucket, or change delta_sync_adapter"
        )
    if found is None or adapter is None:
        return
    if found.base_digest != adapter.base_digest:
        raise BaseMismatchError(
            f"{store.url}: the run's adapter belongs to a base model with digest {found.base_digest} "
            f"({found.base_reference}), this trainer's has {adapter.base_digest} ({adapter.base_reference}); train on "
            "the same base, or use an empty bucket"
        )
    if (found.name, found.rank) != (adapter.name, adapter.rank):
        raise BaseMismatchError(
            f"{store.url}: the run's adapter is called {found.name} and has rank {found.rank}, this trainer's is "
            f"{adapter.name} with rank {adapter.rank}; neither can change in a run, use an empty bucket"
        )


def pointer_bytes(manifest: Manifest) -> bytes:
    """The pointer that names a version."""
    raw = manifest.to_bytes()
    ref = ObjectRef(manifest_key(manifest.version.seq), len(raw), manifest.sha256)
    return Pointer(manifest.version, ref).to_bytes()


def write_pointer(store: Store, manifest: Manifest) -> None:
    """Make a version the newest; its objects and manifest are durable."""
    store.put(POINTER_KEY, pointer_bytes(manifest))


def listed_seqs(store: Store) -> list[int]:
    """Numbers of all versions that have a manifest, also of those no pointer has named."""
    keys = [info.key.removeprefix("versions/").removesuffix(".json") for info in store.list("versions/")]
    return sorted(int(key) for key in keys if key.isdecimal())


def unfinished_start(reader: BucketReader, table: TensorTable, digest: Digest) -> Manifest | None:
    """Version 0 of a trainer that died before it wrote the pointer; no reader has seen it."""
    seqs = listed_seqs(reader.store)
    if not seqs:
        return None
    if seqs != [0]:
        raise WriterConflictError(
            f"{reader.store.url}: there are {len(seqs)} versions but no {POINTER_KEY}; somebody removed it. Use an "
            "empty bucket."
        )
    found = reader.manifest(0)
    reader.table(found).require_same(table, f"the unfinished start in {reader.store.url}", "the trainer's model")
    if found.digest != digest:
        raise BaseMismatchError(
            f"{reader.store.url}: the unfinished start of run {found.version.run} has digest {found.digest}, the "
            f"trainer's weights have {digest}; use an empty bucket"
        )
    return found


def finish_predecessor(reader: BucketReader, head: Manifest, unseen: list[int], digest: Digest) -> Manifest:
    """Move the pointer to a version whose trainer died between manifest and pointer, if it is the state at hand."""
    for seq in reversed(unseen):
        found = reader.manifest(seq)
        if found.digest == digest and found.parent is not None and found.parent.manifest_sha256 == head.sha256:
            logger.warning("%s: finishing the publication of version %s", reader.store.url, found.version)
            write_pointer(reader.store, found)
            return found
    return head
