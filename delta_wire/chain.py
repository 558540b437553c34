# SPDX-License-Identifier: Apache-2.0
"""Following a run: from the pointer to manifests, from a state to the deltas that lead on from it.

Nothing is taken on trust: the pointer names the hash of a manifest, a manifest those of its parent, its table and its
objects, and each is checked before what it says is used.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from delta_wire import encodings
from delta_wire.anchors import anchor_prefix
from delta_wire.checkpoint import resolve_reference
from delta_wire.digest import Digest
from delta_wire.errors import FormatError, ObjectNotFoundError, UnsupportedFormatError
from delta_wire.files import sha256_file, staging, temporary_beside
from delta_wire.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_POINTER_BYTES,
    POINTER_KEY,
    Ack,
    Manifest,
    ObjectRef,
    Pointer,
    manifest_key,
)
from delta_wire.parts import merge
from delta_wire.signing import Verifier
from delta_wire.state import MAX_TABLE_BYTES, Delta, OldBits, TensorTable, num_changed
from delta_wire.stores.base import Store

_Value = TypeVar("_Value")
_MAX_MANIFESTS = 4096
_MAX_TABLES = 4
# an uploaded anchor holds tokenizers and configurations beside the weights
_MAX_ANCHOR_EXTRA_BYTES = 4 << 30


class BucketReader:
    """Reads a run out of a bucket. Not safe for use by several threads at once.

    Args:
        store ([`~delta_wire.stores.Store`]): the bucket.
        verifier ([`~delta_wire.signing.Verifier`], *optional*): refuse manifests that it does not accept.
    """

    def __init__(self, store: Store, verifier: Verifier | None = None):
        self.store = store
        self.verifier = verifier
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._tables: OrderedDict[str, TensorTable] = OrderedDict()

    def latest(self) -> Manifest | None:
        """Manifest of the newest version; `None` if nothing has been published yet.

        A repeated call costs one small read while the pointer has not changed.
        """
        pointer = self.pointer()
        if pointer is None:
            return None
        manifest = self.manifest(pointer.version.seq, pointer.manifest.sha256)
        source = self._source(POINTER_KEY)
        if manifest.version != pointer.version:
            raise FormatError(f"{source}: names version {pointer.version}, its manifest is of {manifest.version}")
        if len(manifest.to_bytes()) != pointer.manifest.size_bytes:
            raise FormatError(f"{source}: the size of {pointer.manifest.key} is not {pointer.manifest.size_bytes}")
        return manifest

    def pointer(self) -> Pointer | None:
        """What `LATEST` says; `None` if there is none."""
        try:
            raw = self.store.get(POINTER_KEY, MAX_POINTER_BYTES)
        except ObjectNotFoundError:
            return None
        return Pointer.from_bytes(raw, self._source(POINTER_KEY))

    def manifest(self, seq: int, expect_sha256: str | None = None) -> Manifest:
        """Manifest of a version of the run.

        Args:
            seq (`int`): sequence number.
            expect_sha256 (`str`, *optional*): refuse other content than this.
        """
        key = manifest_key(seq)
        if expect_sha256 in self._manifests and self._manifests[expect_sha256].version.seq == seq:
            self._manifests.move_to_end(expect_sha256)
            return self._manifests[expect_sha256]
        raw = self.store.get(key, MAX_MANIFEST_BYTES)
        found = hashlib.sha256(raw).hexdigest()
        if expect_sha256 is not None and found != expect_sha256:
            raise FormatError(
                f"{self._source(key)}: expected SHA-256 {expect_sha256}, found {found}; the manifest was replaced or "
                "is torn"
            )
        manifest = Manifest.from_bytes(raw, self._source(key))
        if self.verifier is not None:
            self.verifier.check(raw, manifest.signature, self._source(key))
        if manifest.version.seq != seq:
            raise FormatError(f"{self._source(key)}: expected version {seq}, found {manifest.version}")
        _keep(self._manifests, found, manifest, _MAX_MANIFESTS)
        return manifest

    def table(self, manifest: Manifest) -> TensorTable:
        """Tensor table of a version."""
        ref = manifest.table
        if ref.sha256 not in self._tables:
            source = self._source(ref.key)
            raw = self.store.get(ref.key, min(ref.size_bytes, MAX_TABLE_BYTES))
            _require_same_bytes(source, ref, len(raw), hashlib.sha256(raw).hexdigest())
            table = TensorTable.from_bytes(raw, source)
            if table.to_bytes() != raw:
                raise FormatError(f"{source}: the table is not in canonical form (names in order, compact JSON)")
            _keep(self._tables, ref.sha256, table, _MAX_TABLES)
        table = self._tables[ref.sha256]
        if table.num_params != manifest.num_params:
            raise FormatError(
                f"{self._source(manifest_key(manifest.version.seq))}: num_params is {manifest.num_params}, the tensor "
                f"table has {table.num_params}"
            )
        return table

    def walk(self, start: Manifest) -> Iterator[Manifest]:
        """A version, its parent, the parent's parent and so on to the first of the run.

        Reading a parent may raise [`ObjectNotFoundError`] where old versions have been removed.
        """
        at = start
        while True:
            yield at
            if at.parent is None:
                return
            child, parent = at, at.parent
            at = self.manifest(parent.seq, parent.manifest_sha256)
            source = self._source(manifest_key(child.version.seq))
            if at.digest != parent.digest or at.version.epoch != parent.epoch or at.version.run != child.version.run:
                raise FormatError(
                    f"{source}: names the parent {child.version.run}-{parent.epoch}-{parent.seq} with digest "
                    f"{parent.digest}, found {at.version} with {at.digest}"
                )
            if at.table != child.table:
                raise FormatError(f"{source}: the tensor table differs from that of its parent {at.version}")
            if at.adapter != child.adapter:
                raise FormatError(f"{source}: what it says about an adapter differs from its parent {at.version}")

    def chain(self, digest: Digest, to: Manifest) -> list[Manifest] | None:
        """Versions whose deltas lead from a state to a version.

        Args:
            digest ([`Digest`]): of the state at hand.
            to ([`Manifest`]): the version wanted.

        Returns:
            Versions in the order to apply them, none if the state is the one wanted already; `None` if no delta chain
            leads there, so that only an anchor can.
        """
        steps: list[Manifest] = []
        try:
            for manifest in self.walk(to):
                if manifest.digest == digest:
                    return steps[::-1]
                if manifest.delta is None:
                    return None
                steps.append(manifest)
        except ObjectNotFoundError:
            # the chain has been shortened since; if the bucket itself is gone the store says so
            return None
        return None

    def restart_point(self, to: Manifest) -> Manifest:
        """Newest version not after `to` that has an anchor."""
        for manifest in self.walk(to):
            if manifest.anchor is not None:
                return manifest
            if manifest.delta is None:
                break
        raise FormatError(
            f"{self.store.url}: no version up to {to.version} has an anchor; the run cannot be restarted"
        )

    def fetch_delta(self, manifest: Manifest, folder: Path, old_bits: OldBits | None = None) -> Delta:
        """Download, check and decode the delta of a version.

        Args:
            manifest ([`Manifest`]): the version.
            folder (`Path`): for the download, which is removed before the call returns.
            old_bits (`Callable`, *optional*): whole tensors of the parent's state, for encodings that need them.

        Returns:
            `Delta`: in memory, without old bits; values are bits or steps. It applies to the parent's state only.
        """
        source = self._source(manifest_key(manifest.version.seq))
        if manifest.delta is None:
            raise FormatError(f"{source}: version {manifest.version} has no delta, only an anchor")
        encoding = self._encoding(manifest)
        table = self.table(manifest)
        num_objects = len(manifest.delta.objects)
        most = encoding.max_bytes(table, num_objects)
        if manifest.delta.size_bytes > most:
            raise FormatError(
                f"{source}: the delta has {manifest.delta.size_bytes} bytes, one of this model has at most {most}"
                + (f" in {num_objects} objects" if num_objects > 1 else "")
            )
        parts: list[Delta] = []
        for ref in manifest.delta.objects:
            temporary = temporary_beside(folder / "delta")
            try:
                self._download(manifest, ref, temporary)
                parts.append(encoding.decode(temporary, table, self._source(ref.key), old_bits))
            finally:
                temporary.unlink(missing_ok=True)
        delta = merge(parts, [self._source(ref.key) for ref in manifest.delta.objects])
        # tensors stored whole list elements that did not change
        if num_changed(delta) < manifest.changed_params:
            raise FormatError(
                f"{source}: changed_params is {manifest.changed_params}, the delta has only {num_changed(delta)}"
            )
        return delta

    def needs_old_weights(self, manifest: Manifest) -> bool:
        """Whether the delta of a version can be read only with the whole weights of its parent at hand."""
        return manifest.delta is not None and self._encoding(manifest).needs_old_weights

    def _encoding(self, manifest: Manifest) -> encodings.Encoding:
        assert manifest.delta is not None
        try:
            return encodings.get(manifest.delta.encoding)
        except UnsupportedFormatError as error:
            raise UnsupportedFormatError(f"{self._source(manifest_key(manifest.version.seq))}: {error}") from None

    def fetch_anchor(self, manifest: Manifest, folder: Path) -> Path:
        """Folder of the complete checkpoint of a version; what it holds is proven by its digest, not here.

        Args:
            manifest ([`Manifest`]): a version with an anchor.
            folder (`Path`): an uploaded anchor is downloaded into it.
        """
        if manifest.anchor is None:
            raise FormatError(f"{self.store.url}: version {manifest.version} has no anchor")
        if manifest.anchor.reference is not None:
            return resolve_reference(manifest.anchor.reference)
        size_bytes = sum(ref.size_bytes for ref in manifest.anchor.objects)
        most = self.table(manifest).full_bytes + _MAX_ANCHOR_EXTRA_BYTES
        if size_bytes > most:
            raise FormatError(
                f"{self.store.url}: the anchor of version {manifest.version} has {size_bytes} bytes, expected at most "
                f"{most}"
            )
        prefix = anchor_prefix(manifest.version.seq, manifest.digest)
        for ref in manifest.anchor.objects:
            if not ref.key.startswith(prefix):
                raise FormatError(f"{self._source(ref.key)}: not in the folder of this anchor, {prefix}")
            path = folder.joinpath(*ref.key.removeprefix(prefix).split("/"))
            with staging(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            self._download(manifest, ref, path)
        return folder

    def write_ack(self, ack: Ack) -> None:
        """Tell the bucket what a server serves."""
        self.store.put(ack.key, ack.to_bytes())

    def _download(self, manifest: Manifest, ref: ObjectRef, path: Path) -> None:
        try:
            self.store.get_file(ref.key, path, ref.size_bytes)
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(
                f"{error} (version {manifest.version} needs it; it is not there yet, lost, or removed as too old, in "
                "which case a newer anchor leads on)"
            ) from None
        _require_same_bytes(self._source(ref.key), ref, path.stat().st_size, sha256_file(path))

    def _source(self, key: str) -> str:
        return f"{self.store.url}/{key}"


def _require_same_bytes(source: str, ref: ObjectRef, size_bytes: int, sha256: str) -> None:
    if size_bytes != ref.size_bytes or sha256 != ref.sha256:
        raise FormatError(
            f"{source}: expected {ref.size_bytes} bytes with SHA-256 {ref.sha256}, found {size_bytes} with {sha256}; "
            "the object was replaced, truncated or damaged"
        )


def _keep(cache: OrderedDict[str, _Value], key: str, value: _Value, limit: int) -> None:
    cache[key] = value
    while len(cache) > limit:
        cache.popitem(last=False)
