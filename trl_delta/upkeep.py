# SPDX-License-Identifier: Apache-2.0
"""What keeps a run readable, small and its own beside publishing: anchors, retention, the signing key."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.checkpoint import file_for_all
from delta_wire.retention import Policy, Sweeper
from delta_wire.signing import Signer
from delta_wire.state import OldBits
from delta_wire.stores import open_store
from trl_delta.anchors import AnchorMaker
from trl_delta.config import DeltaSyncConfig
from trl_delta.replica import ReplayedAnchors
from trl_delta.retention import Keeper


class Upkeep:
    """Made once per session; [`Upkeep.close`] ends it.

    Args:
        bucket (`str`): address of the bucket.
        config ([`DeltaSyncConfig`]): settings.
        signs (`bool`, *optional*, defaults to `True`): whether this process writes manifests; no other needs the key.
    """

    def __init__(self, bucket: str, config: DeltaSyncConfig, *, signs: bool = True):
        self._bucket = bucket
        self._config = config
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._keeper: Keeper | None = None
        self._replayed: ReplayedAnchors | None = None
        key = config.delta_sync_signing_key
        self.signer = Signer(key) if signs and key is not None else None

    def save_files(self, write: Callable[[Path], None]) -> Path:
        """Configuration and tokenizer as they are at the first call, for the checkpoints that are uploaded.

        Args:
            write (callable): writes them into a folder.
        """
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="delta-files-")
            write(Path(self._folder.name))
        return Path(self._folder.name)

    def anchors(self, writer: BucketWriter, files: Callable[[], Path]) -> AnchorMaker | None:
        """Decides when a version gets an anchor; `None` if none ever does, and then `files` is not called."""
        factor = self._config.delta_sync_anchor_factor
        if not factor:
            return None
        single_file = file_for_all(writer.head.adapter)
        return AnchorMaker(
            writer.store, writer.table, writer.head, factor=factor, files=files(), single_file=single_file
        )

    def replayed_anchors(
        self, writer: BucketWriter, files: Callable[[], Path], kept: OldBits
    ) -> ReplayedAnchors | None:
        """The same where no process has the whole weights; `kept` gives those that no process trains."""
        factor = self._config.delta_sync_anchor_factor
        if not factor:
            return None
        self._replayed = ReplayedAnchors(
            writer.store,
            writer.table,
            writer.head,
            factor=factor,
            make_reader=self._make_reader,
            files=files(),
            single_file=file_for_all(writer.head.adapter),
            kept=kept,
        )
        return self._replayed

    def keep(self, writer: BucketWriter) -> None:
        """Begin to remove what nobody needs any more, unless the settings say otherwise."""
        if not self._config.delta_sync_retention:
            return
        grace_s = self._config.delta_sync_retention_grace_s
        sweeper = Sweeper(self._make_reader(), Policy(grace_s=grace_s, lease_s=grace_s))
        self._keeper = Keeper(sweeper, lambda: writer.version, grace_s)

    def _make_reader(self) -> BucketReader:
        # connections are not shared between threads
        return BucketReader(open_store(self._bucket))

    def close(self) -> None:
        """End the threads and remove the files. Safe to call again."""
        if self._replayed is not None:
            self._replayed.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
