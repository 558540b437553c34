# SPDX-License-Identifier: Apache-2.0
"""Going through a run without a server: rebuild the state of a version, prove every version, write a checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from delta_wire.chain import BucketReader
from delta_wire.checkpoint import Checkpoint
from delta_wire.container import write_tensors
from delta_wire.digest import Digest
from delta_wire.errors import (
    BaseMismatchError,
    DeltaError,
    DigestMismatchError,
    ObjectNotFoundError,
    SetupError,
    StoreError,
)
from delta_wire.files import temporary_beside
from delta_wire.manifest import Manifest
from delta_wire.state import DTYPE, Delta, change_of_digest, resolve


class State:
    """All bits of a version; only what has changed since its anchor takes room in memory.

    Args:
        reader ([`~delta_wire.bucket.BucketReader`]): where deltas come from.
        anchor ([`~delta_wire.manifest.Manifest`]): a version with an anchor.
        folder (`Path`): for downloads; must stay until the state is not used any more.
        base_folder (`Path`, *optional*): a copy of the anchor's checkpoint, used in place of it.
        in_place (`bool`, *optional*, defaults to `False`): the state is kept in files of `folder`, a checkpoint that
            changes as versions are applied, and nothing of it in memory.

    Raises [`BaseMismatchError`] unless the checkpoint has exactly the digest of the anchor's version.
    """

    def __init__(
        self,
        reader: BucketReader,
        anchor: Manifest,
        folder: Path,
        base_folder: Path | None = None,
        *,
        in_place: bool = False,
    ):
        self.reader = reader
        self._folder = folder
        self.version = anchor
        self.table = reader.table(anchor)
        own = folder / _anchor_folder(anchor)
        base_folder = base_folder or reader.fetch_anchor(anchor, own)
        if in_place and base_folder != own:
            # a checkpoint of somebody else's stays as it is
            own.mkdir()
            Checkpoint(base_folder).copy_to(own)
            base_folder = own
        self.checkpoint = Checkpoint(base_folder, private=not in_place, in_place=in_place)
        self.table.require_same(self.checkpoint.table(), f"version {anchor.version}", str(base_folder))
        found = self.recompute()
        if found != anchor.digest:
            raise BaseMismatchError(
                f"{base_folder}: expected the checkpoint of version {anchor.version} with digest {anchor.digest}, "
                f"found {found}; its weights are others. Get the checkpoint that the run was started from."
            )

    @property
    def digest(self) -> Digest:
        """Announced digest of the version; proven by every step that led here."""
        return self.version.digest

    def bits(self, name: str) -> np.ndarray:
        """uint16 patterns of a tensor in its own shape."""
        return self.checkpoint.bits(name)

    def recompute(self) -> Digest:
        """Digest of what is in memory, in full."""
        return self.checkpoint.digest()

    def apply(self, manifest: Manifest) -> Delta:
        """Go on to a child of the version; nothing has changed if this raises.

        Returns:
            `Delta`: what changed, with old and new bits.
        """
        parent = manifest.parent
        if parent is None or parent.digest != self.digest:
            raise BaseMismatchError(
                f"version {manifest.version}: expected a delta for digest {self.digest} (version "
                f"{self.version.version}), found one for {parent and parent.digest}"
            )
        fetched = self.reader.fetch_delta(manifest, self._folder, self.bits)
        delta = {name: resolve(part, self.bits(name).reshape(-1)[part.indices]) for name, part in fetched.items()}
        digest = self.digest + change_of_digest(delta)
        if digest != manifest.digest:
            keys = ", ".join(ref.key for ref in manifest.delta.objects) if manifest.delta else "none"
            raise DigestMismatchError(
                f"version {manifest.version} ({keys}): expected digest {manifest.digest} after its delta, found "
                f"{digest}; the delta is not the one that was published, or its manifest is wrong"
            )
        for name, part in delta.items():
            self.bits(name).reshape(-1)[part.indices] = part.new
        self.version = manifest
        return delta


@contextmanager
def materialise(
    reader: BucketReader,
    manifest: Manifest,
    base_folder: Path | None = None,
    each: Callable[[int], None] = lambda total: None,
) -> Iterator[State]:
    """Rebuild a version from the newest restart point before it.

    Args:
        reader ([`~delta_wire.bucket.BucketReader`]): the run.
        manifest ([`~delta_wire.manifest.Manifest`]): the version wanted.
        base_folder (`Path`, *optional*): a copy of the restart point's checkpoint.
        each (`Callable`, *optional*): called after each version on the way with the number of them.
    """
    with tempfile.TemporaryDirectory(prefix="delta-wire-") as folder:
        yield rebuild(reader, manifest, Path(folder), base_folder, each)


def rebuild(
    reader: BucketReader,
    manifest: Manifest,
    folder: Path,
    base_folder: Path | None = None,
    each: Callable[[int], None] = lambda total: None,
) -> State:
    """As [`materialise`], with the downloads in a folder that must stay until the state is not used any more."""
    anchor = reader.restart_point(manifest)
    steps = []
    for step in reader.walk(manifest):
        if step == anchor:
            break
        steps.append(step)
    state = State(reader, anchor, folder, base_folder)
    for step in reversed(steps):
        state.apply(step)
        each(len(steps))
    return state


def checkout(
    reader: BucketReader,
    manifest: Manifest,
    destination: str | Path,
    base_folder: Path | None = None,
    each: Callable[[int], None] = lambda total: None,
) -> Path:
    """Write a version as a checkpoint that `from_pretrained` and `vllm serve` open.

    Args:
        reader ([`~delta_wire.bucket.BucketReader`]): the run.
        manifest ([`~delta_wire.manifest.Manifest`]): the version.
        destination (`str` or `Path`): must not exist, or be an empty folder; appears complete or not at all.
        base_folder (`Path`, *optional*): a copy of the restart point's checkpoint.
        each (`Callable`, *optional*): as in [`materialise`].

    Files are split as in the restart point's checkpoint; its configuration, tokenizer and templates come along.
    """
    destination = Path(os.path.realpath(destination))
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise SetupError(f"{destination}: exists and is not an empty folder; choose another destination")
    with materialise(reader, manifest, base_folder, each) as state:
        temporary = temporary_beside(destination)
        try:
            temporary.mkdir(parents=True)
            write_checkpoint(state, temporary)
            written = Checkpoint(temporary)
            state.table.require_same(written.table(), f"version {manifest.version}", str(temporary))
            found = written.digest()
            if found != manifest.digest:
                raise DigestMismatchError(
                    f"{temporary}: expected version {manifest.version} with digest {manifest.digest}, found {found} "
                    "after writing; the disk or the memory of this machine is at fault"
                )
            os.rename(temporary, destination)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise SetupError(
                f"{destination}: cannot write the checkpoint: {error.strerror or error}; free space or choose another "
                "destination"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return destination


def write_checkpoint(state: State, folder: Path) -> None:
    """Write a state into a folder, split as in its restart point's checkpoint, whose other files come along."""
    base = state.checkpoint
    for name in base.other_files():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(base.folder / name, path)
    by_file: dict[str, list[str]] = {}
    for name, file in base.layout.items():
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        tensors = {name: (DTYPE, state.table[name].shape, state.bits(name)) for name in names}
        # transformers refuses a file that does not say so
        write_tensors(folder / file, tensors, {"format": "pt"})
    for name in base.weight_files():
        if name not in by_file:
            shutil.copyfile(base.folder / name, folder / name)


@dataclass(frozen=True, slots=True)
class Check:
    """What the replay says about a version.

    Args:
        seq (`int`): sequence number.
        version (`str`, *optional*): `run-epoch-seq`; `None` if the manifest cannot be read.
        ok (`bool`): everything that was checked is as announced.
        checks: what was checked: `"anchor"` (full digest of the checkpoint), `"delta"` (digest update from the old
            bits), `"state"` (full digest of the state replayed so far).
        reason (`str`, *optional*): the first thing that is wrong.
    """

    seq: int
    version: str | None
    ok: bool
    checks: tuple[str, ...]
    reason: str | None


def verify(reader: BucketReader, base_folder: Path | None = None) -> Iterator[Check]:
    """Replay a run from its oldest restart point to its newest version and prove each on the way.

    Args:
        reader ([`~delta_wire.bucket.BucketReader`]): the run.
        base_folder (`Path`, *optional*): a copy of the oldest restart point's checkpoint.

    Yields one [`Check`] per version, oldest first. A version after one that failed cannot be proven and fails as well,
    until an anchor restarts the chain. [`~delta_wire.errors.StoreError`] is raised if the bucket cannot be read.
    """
    latest = reader.latest()
    if latest is None:
        raise SetupError(f"{reader.store.url}: nothing has been published yet; there is nothing to verify")
    versions, broken = _collect(reader, latest)
    oldest = next((at for at in reversed(range(len(versions))) if versions[at].anchor is not None), None)
    if broken is not None:
        yield broken
    if oldest is None:
        reason = f"{reader.store.url}: no version has an anchor, so the chain cannot be replayed"
        yield from (_failed(manifest, (), reason) for manifest in reversed(versions))
        return
    replayed = versions[oldest::-1]
    if broken is not None:
        yield from (_failed(manifest, (), broken.reason or "") for manifest in reversed(versions[oldest + 1 :]))
    state: State | None = None
    with tempfile.TemporaryDirectory(prefix="delta-wire-") as folder:
        for number, manifest in enumerate(replayed):
            checks: list[str] = []
            reasons: list[str] = []
            before, state = state, None
            if before is not None and manifest.delta is not None:
                with _noting(reasons):
                    before.apply(manifest)
                    state = before
                    checks.append("delta")
            if manifest.anchor is not None:
                with _noting(reasons):
                    state = State(reader, manifest, Path(folder), base_folder if number == 0 else None)
                    # mapped by now; a run may hold more anchors than the disk has room for
                    shutil.rmtree(Path(folder) / _anchor_folder(manifest), ignore_errors=True)
                    checks.append("anchor")
            if state is None and not reasons:
                reasons.append(f"version {manifest.version} follows a version that failed, so it cannot be proven")
            if state is not None and manifest is latest:
                with _noting(reasons):
                    _prove(state)
                    checks.append("state")
            reason = reasons[0] if reasons else None
            yield Check(manifest.version.seq, str(manifest.version), reason is None, tuple(checks), reason)


@contextmanager
def _noting(reasons: list[str]) -> Iterator[None]:
    """Note what is wrong with the bucket and go on; a bucket that cannot be read at all is no finding."""
    try:
        yield
    except StoreError as error:
        if not isinstance(error, ObjectNotFoundError):
            raise
        reasons.append(str(error))
    except DeltaError as error:
        reasons.append(str(error))


def _anchor_folder(manifest: Manifest) -> str:
    return f"anchor-{manifest.version.seq}"


def _prove(state: State) -> None:
    found = state.recompute()
    if found != state.digest:
        raise DigestMismatchError(
            f"version {state.version.version}: expected digest {state.digest} for the replayed state, found {found} "
            "when recomputed in full"
        )


def _collect(reader: BucketReader, latest: Manifest) -> tuple[list[Manifest], Check | None]:
    """Versions from the newest to the oldest that can be reached, and what stopped the walk, if that is a fault."""
    versions: list[Manifest] = []
    try:
        for manifest in reader.walk(latest):
            versions.append(manifest)
    except ObjectNotFoundError as error:
        # retention removes old manifests, never one that a chain from an anchor needs
        if any(manifest.anchor is not None for manifest in versions):
            return versions, None
        return versions, _missing(versions[-1], str(error))
    except StoreError:
        raise
    except DeltaError as error:
        return versions, _missing(versions[-1], str(error))
    return versions, None


def _missing(child: Manifest, reason: str) -> Check:
    return Check(child.parent.seq if child.parent else 0, None, False, (), reason)


def _failed(manifest: Manifest, checks: tuple[str, ...], reason: str) -> Check:
    return Check(manifest.version.seq, str(manifest.version), False, checks, reason)
