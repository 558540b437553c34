# SPDX-License-Identifier: Apache-2.0
"""Anchors of a training whose weights no process has whole: made from what is in the bucket, beside the training."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from delta_wire.anchors import upload_anchor
from delta_wire.chain import BucketReader
from delta_wire.errors import DeltaError, SetupError
from delta_wire.manifest import AnchorPart, Manifest
from delta_wire.replay import State
from delta_wire.state import OldBits, TensorTable
from delta_wire.stores import Store
from trl_delta.anchors import AnchorMaker
from trl_delta.requests import AnchorRequests
from trl_delta.rows import Rows, WholeState

logger = logging.getLogger(__name__)
_JOIN_S = 5.0


class ReplayedAnchors(AnchorMaker):
    """As [`AnchorMaker`] for the first of several processes, without their weights.

    Once an anchor is due a thread fetches the last one and replays the deltas since then into its files: a checkpoint
    on disk, mapped and not held in memory. The version that is to have the anchor is applied last, when all its parts
    are in the bucket, and the files are uploaded as they are. Nothing is gathered and no process waits for it.

    A server that asks for an anchor has lost what the bucket would be replayed from. It gets one out of what the
    processes themselves remember, see [`~trl_delta.rows.WholeState`].

    Args:
        store ([`~delta_wire.stores.Store`]): the bucket, for uploads.
        table ([`~delta_wire.state.TensorTable`]): the model.
        newest ([`~delta_wire.manifest.Manifest`]): version that publishing goes on from.
        factor (`float`): price of an anchor in sizes of the model.
        make_reader (callable): a reader of the bucket over a connection of its own.
        files, single_file, requests (*optional*): see [`AnchorMaker`].
        kept (`Callable`, *optional*): tensors of the checkpoint that no process trains, uint16.
    """

    def __init__(
        self,
        store: Store,
        table: TensorTable,
        newest: Manifest,
        *,
        factor: float,
        make_reader: Callable[[], BucketReader],
        files: Path | None = None,
        single_file: str | None = None,
        requests: AnchorRequests | None = None,
        kept: OldBits | None = None,
    ):
        super().__init__(store, table, newest, factor=factor, files=files, single_file=single_file, requests=requests)
        self._newest = newest
        self._kept = kept
        self._make_reader = make_reader
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._state: State | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._begin_if_due()

    @property
    def ready(self) -> bool:
        """Whether [`ReplayedAnchors.make_for`] can make one now."""
        return self.is_costly and self._state is not None

    def make_for(self, manifest: Manifest) -> AnchorPart | None:
        """Upload the anchor of a version whose objects are in the bucket; `None` if that cannot be done now.

        Args:
            manifest ([`~delta_wire.manifest.Manifest`]): of the version to come, without an anchor.
        """
        state = self._state
        assert state is not None, "only what is ready can be made"
        self._begin(manifest.version.seq)
        try:
            # those that have been published since the thread began
            for step in state.reader.chain(state.digest, self._newest) or ():
                state.apply(step)
            state.apply(manifest)
            return upload_anchor(
                self._store, state.checkpoint.folder, self._table, manifest.digest, manifest.version.seq
            )
        except (DeltaError, OSError) as error:
            self._postpone(f"version {manifest.version.seq}", error)
            return None

    def make_of(self, rows: Sequence[Rows], count: int, manifest: Manifest) -> AnchorPart | None:
        """Upload the anchor of a version whose objects are in the bucket; `None` if that cannot be done now.

        Args:
            rows (list of [`~trl_delta.rows.Rows`]): what the processes own of the version.
            count (`int`): of how many processes there should be rows.
            manifest ([`~delta_wire.manifest.Manifest`]): of the version to come, without an anchor.
        """
        if len(rows) < count:
            # each that could not has said why
            self._wait_longer()
            return None
        try:
            with tempfile.TemporaryDirectory(prefix="delta-rows-") as folder:
                state = WholeState(self._store, self._table, rows, Path(folder), self._kept or _no_other)
                return self.make(state.bits, manifest.version.seq, manifest.digest)
        except (DeltaError, OSError) as error:
            logger.warning("delta sync: no anchor for version %d this time: %s", manifest.version.seq, error)
            self._wait_longer()
            return None

    def published(self, manifest: Manifest) -> None:
        super().published(manifest)
        self._newest = manifest
        if manifest.anchor is not None:
            self._drop()
        self._begin_if_due()

    def close(self) -> None:
        """End the thread and remove the files. Safe to call again."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        self._drop()

    def _begin_if_due(self) -> None:
        if self.is_costly and self._folder is None and not self._closing.is_set():
            self._folder = tempfile.TemporaryDirectory(prefix="delta-anchor-", ignore_cleanup_errors=True)
            self._thread = threading.Thread(
                target=self._replay, args=(Path(self._folder.name), self._newest), name="delta-anchor", daemon=True
            )
            self._thread.start()

    def _replay(self, folder: Path, to: Manifest) -> None:
        try:
            reader = self._make_reader()
            state = State(reader, reader.restart_point(to), folder, in_place=True)
            for step in reader.chain(state.digest, to) or ():
                if self._closing.is_set():
                    return
                state.apply(step)
        except Exception as error:
            # whatever it is: the next one is tried, and no thread dies in silence
            if not self._closing.is_set():
                self._postpone(f"a version after {to.version.seq}", error)
        else:
            self._state = state

    def _postpone(self, what: str, error: Exception) -> None:
        logger.warning("delta sync: no anchor for %s this time: %s", what, error)
        self._cost_more()
        self._drop()

    def _drop(self) -> None:
        self._state = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _no_other(name: str) -> np.ndarray:
    raise SetupError(f"no process of the training owns the tensor {name}")
