# SPDX-License-Identifier: Apache-2.0
"""Uploading a complete checkpoint of a state, one tensor in memory and one shard on disk at a time."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from delta_wire.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, other_files
from delta_wire.container import write_tensors
from delta_wire.digest import Digest, digest_tensor
from delta_wire.errors import DigestMismatchError, SetupError
from delta_wire.files import sha256_file
from delta_wire.manifest import AnchorPart, ObjectRef
from delta_wire.state import DTYPE, OldBits, TensorTable
from delta_wire.stores.base import Store, is_key

# what save_pretrained cuts at
MAX_SHARD_BYTES = 5_000_000_000


def anchor_prefix(seq: int, digest: Digest) -> str:
    """Folder of a version's uploaded anchor."""
    return f"anchors/{seq:012d}-{str(digest)[:16]}/"


def stream_anchor(
    store: Store,
    table: TensorTable,
    bits: OldBits,
    *,
    seq: int,
    digest: Digest,
    files: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    single_file: str | None = None,
) -> AnchorPart:
    """Upload a state as an ordinary checkpoint in shards.

    Args:
        store ([`~delta_wire.stores.Store`]): the bucket.
        table ([`~delta_wire.state.TensorTable`]): the model.
        bits (`Callable`): whole tensors of the state, uint16; each is asked for once and may be made on the spot.
        seq (`int`): number of the version to come.
        digest ([`~delta_wire.digest.Digest`]): of the state; [`DigestMismatchError`] if the tensors are others.
        files (`Path`, *optional*): folder with configuration, tokenizer and templates, which go along.
        max_shard_bytes (`int`, *optional*): a tensor that is larger has a shard of its own.
        single_file (`str`, *optional*): name of one file for all, in place of shards.
    """
    prefix = anchor_prefix(seq, digest)
    refs = [] if files is None else [_put(store, prefix, name, files / name) for name in other_files(files)]
    shards = _split(table, max_shard_bytes) if single_file is None else [list(table)]
    layout: dict[str, str] = {}
    total = Digest()

    def read(name: str) -> np.ndarray:
        nonlocal total
        tensor = bits(name)
        total = total + digest_tensor(name, tensor)
        return tensor

    with tempfile.TemporaryDirectory(prefix="delta-anchor-") as folder:
        for number, names in enumerate(shards):
            file = single_file or (
                SINGLE_FILE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            )
            path = Path(folder) / file
            tensors = {name: (DTYPE, table[name].shape, partial(read, name)) for name in names}
            # transformers refuses a file that does not say so
            write_tensors(path, tensors, {"format": "pt"})
            refs.append(_put(store, prefix, file, path))
            path.unlink()
            layout |= dict.fromkeys(names, file)
        if len(shards) > 1:
            path = Path(folder) / INDEX_FILE
            path.write_text(json.dumps({"metadata": {"total_size": table.full_bytes}, "weight_map": layout}))
            refs.append(_put(store, prefix, INDEX_FILE, path))
    if total != digest:
        raise DigestMismatchError(
            f"{store.url}/{prefix}: the tensors to upload have digest {total}, expected {digest}; the weights changed "
            "while they were read"
        )
    return AnchorPart(None, tuple(refs))


def upload_anchor(store: Store, folder: Path, table: TensorTable, digest: Digest, seq: int) -> AnchorPart:
    """Upload a checkpoint as it lies in a folder; [`DigestMismatchError`] if it is not the state."""
    checkpoint = Checkpoint(folder)
    table.require_same(checkpoint.table(), "the trainer's model", str(folder))
    found = checkpoint.digest()
    if found != digest:
        raise DigestMismatchError(
            f"{folder}: the checkpoint to upload has digest {found}, the trainer's weights have {digest}; save it "
            "again"
        )
    prefix = anchor_prefix(seq, digest)
    names = [*checkpoint.other_files(), *checkpoint.weight_files()]
    return AnchorPart(None, tuple(_put(store, prefix, name, folder / name) for name in names))


def _split(table: TensorTable, max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size_bytes = 0
    for name, spec in table.items():
        tensor_bytes = 2 * spec.num_elements
        if shards[-1] and size_bytes + tensor_bytes > max_shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(name)
        size_bytes += tensor_bytes
    return shards


def _put(store: Store, prefix: str, name: str, path: Path) -> ObjectRef:
    if not is_key(prefix + name):
        raise SetupError(f"{path}: this file name cannot be the key of an object; rename the file")
    ref = ObjectRef(prefix + name, path.stat().st_size, sha256_file(path))
    store.put(ref.key, path)
    return ref
