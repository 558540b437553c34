# SPDX-License-Identifier: Apache-2.0
"""A trainer without a model: changes random bits of every tensor of a checkpoint and publishes them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.checkpoint import Checkpoint
from delta_wire.manifest import Manifest
from delta_wire.state import Delta, TensorDelta, change_of_digest
from delta_wire.stores import open_store


def pointed_to(bucket: Path) -> Manifest:
    """Manifest of a bucket's newest version."""
    manifest = BucketReader(open_store(bucket)).latest()
    assert manifest is not None
    return manifest


def move_pointer(bucket: Path, raw: bytes) -> None:
    """Let a bucket name another version, as a trainer does: the pointer is replaced whole."""
    unfinished = bucket / ".LATEST"
    unfinished.write_bytes(raw)
    unfinished.replace(bucket / "LATEST")


class Training:
    """A run in a local bucket.

    Args:
        base (`Path`): checkpoint it starts from.
        bucket (`Path`): made if it does not exist.
        changed_frac (`float`): of every tensor, per version.
    """

    def __init__(self, base: Path, bucket: Path, changed_frac: float = 0.02, seed: int = 0):
        checkpoint = Checkpoint(base)
        self.base = base
        self.bucket = bucket
        self.table = checkpoint.table()
        self.bits = {name: checkpoint.bits(name).reshape(-1).copy() for name in self.table}
        self.digest = checkpoint.digest()
        self.changed_frac = changed_frac
        self._random = np.random.default_rng(seed)

    def start(self, bucket: Path | None = None) -> BucketWriter:
        """Begin or take over the run in the bucket, or in a copy of it."""
        return BucketWriter.start(
            open_store(bucket or self.bucket, create=True),
            table=self.table,
            digest=self.digest,
            reference=str(self.base),
        )

    def change(self) -> Delta:
        """Change a share of every tensor by a few units in the last place."""
        delta: Delta = {}
        for name, bits in self.bits.items():
            count = max(1, int(bits.size * self.changed_frac))
            indices = np.sort(self._random.choice(bits.size, count, replace=False)).astype(np.int32)
            old = bits[indices]
            new = old ^ self._random.integers(1, 1 << 7, count).astype(np.uint16)
            bits[indices] = new
            delta[name] = TensorDelta(name, indices, new, old)
        self.digest = self.digest + change_of_digest(delta)
        return delta

    def publish(self, writer: BucketWriter, encoding: str = "plain") -> Manifest:
        """Change and publish the next version."""
        old = {name: bits.copy() for name, bits in self.bits.items()}
        delta = self.change()
        return writer.publish(
            delta, digest=self.digest, step=None, encoding=encoding, old_bits=old.__getitem__
        ).manifest

    def take_back(self, writer: BucketWriter, delta: Delta) -> Manifest:
        """Publish the inverse of a change."""
        inverse: Delta = {}
        for name, part in delta.items():
            assert part.old is not None
            inverse[name] = TensorDelta(name, part.indices, part.old, part.new)
            self.bits[name][part.indices] = part.old
        self.digest = self.digest + change_of_digest(inverse)
        return writer.publish(inverse, digest=self.digest, step=None).manifest


class Forgery:
    """The next version of a run, broken on purpose, and the same version intact.

    Args:
        training (`Training`): the run; its state moves to the next version.
        folder (`Path`): scratch space.
    """

    def __init__(self, training: Training, folder: Path):
        self._bucket = training.bucket
        self._good = folder / "good"
        self._bad = folder / "bad"
        shutil.copytree(self._bucket, self._good)
        self.manifest = training.publish(training.start(self._good))
        shutil.copytree(self._good, self._bad)

    @property
    def delta_key(self) -> str:
        assert self.manifest.delta is not None
        return self.manifest.delta.objects[0].key

    @property
    def delta_file(self) -> Path:
        return self._bad / self.delta_key

    @property
    def pointer_file(self) -> Path:
        return self._bad / "LATEST"

    def rewrite_delta(self, edit: Callable[[Path], None]) -> None:
        """Edit the delta's file and let manifest and pointer describe what came out: a hostile or broken trainer."""
        edit(self.delta_file)
        raw = self.delta_file.read_bytes()
        key = self.pointer()["manifest"]["key"]
        manifest = json.loads((self._bad / key).read_bytes())
        manifest["delta"]["objects"][0] |= {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        manifest["changed_params"] = 1
        written = json.dumps(manifest).encode()
        (self._bad / key).write_bytes(written)
        pointer = self.pointer()
        pointer["manifest"] |= {"size_bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
        self.pointer_file.write_text(json.dumps(pointer))

    def pointer(self) -> dict[str, Any]:
        return json.loads(self.pointer_file.read_bytes())

    def release(self) -> None:
        """Put the broken version into the bucket."""
        self._copy(self._bad)

    def repair(self) -> None:
        """Put the intact version in its place."""
        self._copy(self._good)

    def _copy(self, source: Path) -> None:
        paths = [path for path in sorted(source.rglob("*")) if path.is_file() and "acks" not in path.parts]
        # the pointer last, as a trainer does; every file appears whole
        for path in sorted(paths, key=lambda path: path.name == "LATEST"):
            target = self._bucket / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_file() and target.read_bytes() == path.read_bytes():
                continue
            temporary = target.with_name(f".{target.name}.new")
            shutil.copyfile(path, temporary)
            os.replace(temporary, target)
