# SPDX-License-Identifier: Apache-2.0
"""An anchor out of what the processes of a training remember, for a server that nothing in the bucket leads on.

No process has the weights whole, and nothing is gathered among them: each uploads the rows it owns, as it does with
its part of a delta, and the first one puts them together in files.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from delta_wire.container import TensorFile, write_tensors
from delta_wire.errors import DigestMismatchError, StoreError
from delta_wire.files import sha256_file
from delta_wire.refs import ObjectRef
from delta_wire.state import DTYPE, OldBits, TensorTable
from delta_wire.stores import Store

logger = logging.getLogger(__name__)
_PREFIX = "anchors/"


@dataclass(frozen=True, slots=True)
class Rows:
    """What one process owns of a state, as an object of the bucket that no manifest names.

    Args:
        ref ([`~delta_wire.refs.ObjectRef`]): the object, a safetensors file of flat tensors.
        starts (`dict`): flat checkpoint index of the first element of each.
    """

    ref: ObjectRef
    starts: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return {"ref": self.ref.to_json(), "starts": dict(self.starts)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Rows:
        return cls(ObjectRef.from_json(value["ref"], "rows of a process", _PREFIX), value["starts"])


def upload_rows(store: Store, sizes: Mapping[str, int], starts: Mapping[str, int], bits: OldBits, *, seq: int) -> Rows:
    """Upload what this process owns of a version to come, a tensor in memory at a time.

    Args:
        store ([`~delta_wire.stores.Store`]): the bucket.
        sizes, starts (`dict`): elements of each tensor that are here, and where they begin.
        bits (`Callable`): those elements, uint16, flat.
        seq (`int`): number of the version.
    """
    with tempfile.TemporaryDirectory(prefix="delta-rows-") as folder:
        path = Path(folder) / "rows.safetensors"
        write_tensors(path, {name: (DTYPE, (size,), lambda name=name: bits(name)) for name, size in sizes.items()})
        sha256 = sha256_file(path)
        ref = ObjectRef(f"{_PREFIX}{seq:012d}-rows/{sha256[:16]}.safetensors", path.stat().st_size, sha256)
        store.put(ref.key, path)
    return Rows(ref, starts)


def remove_rows(store: Store, rows: Sequence[Rows]) -> None:
    """They have served or are of no use. What cannot be removed now goes with the other objects that nobody needs."""
    if not rows:
        return
    try:
        store.delete([entry.ref.key for entry in rows])
    except StoreError as error:
        logger.debug("delta sync: rows of an anchor stay in the bucket: %s", error)


class WholeState:
    """The rows of all processes side by side, one tensor in memory at a time.

    Args:
        store ([`~delta_wire.stores.Store`]): the bucket.
        table ([`~delta_wire.state.TensorTable`]): the model.
        rows (list of [`Rows`]): of all processes.
        folder (`Path`): for downloads; must stay while this is used.
        kept (`Callable`): tensors that no process trains, uint16.

    Raises [`~delta_wire.errors.DigestMismatchError`] for an object that is not what its process uploaded. Whether rows
    are missing shows in the digest of the whole.
    """

    def __init__(self, store: Store, table: TensorTable, rows: Iterable[Rows], folder: Path, kept: OldBits):
        self._table = table
        self._kept = kept
        self._files: list[tuple[TensorFile, Mapping[str, int]]] = []
        for number, entry in enumerate(rows):
            path = folder / f"{number}.safetensors"
            store.get_file(entry.ref.key, path, entry.ref.size_bytes)
            found = sha256_file(path)
            if found != entry.ref.sha256:
                raise DigestMismatchError(
                    f"{store.url}/{entry.ref.key}: expected SHA-256 {entry.ref.sha256}, found {found}; the object is "
                    "not what its process uploaded"
                )
            self._files.append((TensorFile(path), entry.starts))

    def bits(self, name: str) -> np.ndarray:
        """A whole tensor, uint16 in its shape."""
        holders = [(file.array(name), starts[name]) for file, starts in self._files if name in file]
        if not holders:
            return self._kept(name)
        spec = self._table[name]
        whole = np.zeros(spec.num_elements, dtype=np.uint16)
        for part, start in holders:
            whole[start : start + part.size] = part
        return whole.reshape(spec.shape)
