# SPDX-License-Identifier: Apache-2.0
"""From the bucket to files that a rank can plan from: follow the pointer, fetch, verify, decode, compose, stage.

Nothing here knows vLLM or touches a weight.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from delta_wire.bucket import BucketReader
from delta_wire.digest import Digest
from delta_wire.errors import BaseMismatchError, FormatError, ObjectNotFoundError
from delta_wire.manifest import POINTER_KEY, Ack, Manifest, VersionId
from delta_wire.signing import Verifier
from delta_wire.state import Delta, TensorTable, compose
from delta_wire.stores import open_store
from vllm_delta.mirror import Base, Mirror
from vllm_delta.staging import write_staged

logger = logging.getLogger("vllm.vllm_delta.subscriber")


@dataclass(frozen=True, slots=True)
class Staged:
    """Something to plan from, on this machine's disk.

    Args:
        kind (`str`): `plan_delta` for a composed delta, `plan_checkpoint` for a whole checkpoint.
        path (`Path`): the file or folder.
        manifest (`Manifest`): the version it leads to.
        num_versions (`int`): how many versions it takes in one step.
    """

    kind: Literal["plan_delta", "plan_checkpoint"]
    path: Path
    manifest: Manifest
    num_versions: int

    @property
    def size_bytes(self) -> int:
        """What it takes on disk."""
        files = [self.path] if self.path.is_file() else self.path.rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file())


@dataclass(frozen=True, slots=True)
class Position:
    """Where a server stands in a run."""

    version: VersionId
    digest: Digest


class Subscriber:
    """Follows a bucket. For use by one thread.

    Args:
        url (`str`): address of the bucket.
        stage_dir (`Path`): where downloads and staged files go.
        verifier ([`~delta_wire.signing.Verifier`], *optional*): refuse versions that it does not accept.
    """

    def __init__(self, url: str, stage_dir: Path, verifier: Verifier | None = None):
        self.url = url
        self._verifier = verifier
        self._stage_dir = stage_dir
        self._folder: Path | None = None
        self._reader: BucketReader | None = None
        self._mirror: Mirror | None = None
        # what was wrong with the bucket the last time
        self._trouble: str | None = None

    @property
    def reader(self) -> BucketReader:
        if self._reader is None:
            self._reader = BucketReader(open_store(self.url), self._verifier)
        return self._reader

    def target(self) -> Manifest | None:
        """Manifest of the newest version, `None` before the first."""
        return self.reader.latest()

    def table(self, manifest: Manifest) -> TensorTable:
        """Tensor table of a version."""
        return self.reader.table(manifest)

    def locate(self, digest: Digest, target: Manifest, folder: Path) -> Position | None:
        """Which version of the run the loaded checkpoint is; `None` if it is none that is known.

        The first version of a run is always known, also when retention has removed what came after it.

        Args:
            digest (`Digest`): of the loaded checkpoint.
            target (`Manifest`): newest version.
            folder (`Path`): of the loaded checkpoint.
        """
        found = self._find(digest, target)
        if found is None:
            return None
        self._mirror = Mirror(Base(found, folder))
        return Position(found.version, digest)

    def _find(self, digest: Digest, target: Manifest) -> Manifest | None:
        try:
            for manifest in self.reader.walk(target):
                if manifest.digest == digest:
                    return manifest
        except ObjectNotFoundError:
            # old versions have been removed, all but the manifest of the first
            pass
        except FormatError as error:
            if not self._seen_before(error):
                raise
        try:
            first = self.reader.manifest(0)
        except ObjectNotFoundError:
            return None
        return first if first.version.run == target.version.run and first.digest == digest else None

    def stage(self, position: Position, target: Manifest, *, past: bool = False) -> Staged:
        """Stage what leads from a position to a version: one composed delta, or else a whole checkpoint.

        Args:
            position (`Position`): where the server stands.
            target (`Manifest`): where it should go.
            past (`bool`, *optional*, defaults to `False`): go past a delta that cannot be used by way of a later
                anchor.

        Returns:
            `Staged`: with a checkpoint its version may lie before the target; stage again from there.
        """
        if not past:
            try:
                chain = self.reader.chain(position.digest, target)
                if chain is not None:
                    return self._stage_delta(chain, target)
            except (FormatError, ObjectNotFoundError) as error:
                # once may be a bad moment; for good, only a later anchor leads on
                if not self._seen_before(error) or not self.has_anchor_after(position.version, target):
                    raise
                logger.warning("going on from an anchor: %s", error)
                return self.stage_checkpoint(target)
        self.refuse_fork(position, target)
        return self.stage_checkpoint(target)

    def _seen_before(self, error: Exception) -> bool:
        before, self._trouble = self._trouble, str(error)
        return before == self._trouble

    def _stage_delta(self, chain: list[Manifest], target: Manifest) -> Staged:
        composed: Delta = {}
        if self._mirror is not None and any(self.reader.needs_old_weights(manifest) for manifest in chain):
            composed = self._mirror.delta(self.reader, chain, self.folder)
        else:
            for manifest in chain:
                composed = compose(composed, self.reader.fetch_delta(manifest, self.folder))
        path = self.folder / f"{target.version.seq:012d}-{target.sha256[:16]}.safetensors"
        write_staged(path, composed, self.table(target))
        return Staged("plan_delta", path, target, len(chain))

    def stage_checkpoint(self, target: Manifest) -> Staged:
        """Stage the whole checkpoint of the newest anchor up to a version."""
        manifest = self.reader.restart_point(target)
        folder = self.folder / f"anchor-{manifest.version.seq:012d}-{manifest.sha256[:16]}"
        folder.mkdir(exist_ok=True)
        return Staged("plan_checkpoint", self.reader.fetch_anchor(manifest, folder), manifest, 1)

    def refuse_fork(self, position: Position, target: Manifest) -> None:
        """Raise [`BaseMismatchError`] if a version does not descend from where the server stands."""
        here = position.version
        if target.version.run != here.run:
            return
        try:
            ancestors = (manifest for manifest in self.reader.walk(target) if manifest.version.seq <= here.seq)
            ours = next(ancestors, None)
        except ObjectNotFoundError:
            # the versions in between have been removed: nothing left to compare with
            return
        if ours is None or ours.version.seq != here.seq or ours.digest == position.digest:
            return
        raise BaseMismatchError(
            f"{self.url}: version {target.version} descends from {ours.version} with digest {ours.digest}, this "
            f"server serves {here} with {position.digest}; two trainers wrote to one bucket. Give each run a "
            "bucket of its own and restart the server on the one to follow."
        )

    def has_anchor_after(self, version: VersionId, target: Manifest) -> bool:
        """Whether the newest version can be reached by way of an anchor that is later than a version, as far as can be
        seen; the deltas before that anchor need not be used then."""
        try:
            restart = self.reader.restart_point(target).version
        except (FormatError, ObjectNotFoundError):
            return False
        return restart.run != version.run or restart.seq > version.seq

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None] | None:
        """Call `on_change`, from another thread, when there may be a new version; returns what ends it.

        A hint that may never come; `None` where the bucket gives none.
        """
        return self.reader.store.watch(POINTER_KEY, on_change)

    def write_ack(self, ack: Ack) -> None:
        """Tell the bucket what is served."""
        self.reader.write_ack(ack)

    @property
    def folder(self) -> Path:
        """This process' own staging folder."""
        if self._folder is None or not self._folder.is_dir():
            self._folder = Path(tempfile.mkdtemp(prefix="delta-stage-", dir=self._stage_dir))
        return self._folder

    def clear(self) -> None:
        """Remove what was staged."""
        if self._folder is not None:
            for entry in self._folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()

    def reset(self) -> None:
        """Open the bucket anew at the next use: it may have been replaced."""
        if self._reader is not None:
            self._reader.store.close()
            self._reader = None

    def close(self) -> None:
        """Remove the staging folder and close the bucket."""
        self.reset()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
