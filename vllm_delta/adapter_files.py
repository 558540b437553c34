# SPDX-License-Identifier: Apache-2.0
"""From the bucket to a folder with one version of the run's adapter, as PEFT saves it, proven by its digest."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from delta_wire.checkpoint import Checkpoint
from delta_wire.errors import DeltaError, ObjectNotFoundError, SetupError, StoreError
from delta_wire.manifest import Manifest
from delta_wire.replay import State, rebuild, write_checkpoint
from vllm_delta.subscriber import Subscriber

logger = logging.getLogger("vllm.vllm_delta.adapter_files")


class AdapterFiles:
    """Keeps the newest state in memory, a few MB, and writes versions of it. For use by one thread.

    Args:
        subscriber (`Subscriber`): the bucket; its folder holds what is written.
    """

    def __init__(self, subscriber: Subscriber):
        self._subscriber = subscriber
        self._state: State | None = None

    def stage(self, target: Manifest) -> Path:
        """Fetch what is missing and write the version into a folder of its own."""
        folder = self._subscriber.folder / f"adapter-{target.version.seq:012d}-{target.sha256[:16]}"
        try:
            state = self._advance(target)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            write_checkpoint(state, folder)
            found = Checkpoint(folder).digest()
        except BaseException:
            # what it needs may be gone; the next try begins at an anchor
            self._state = None
            raise
        if found != target.digest:
            self._state = None
            raise SetupError(
                f"{folder}: expected version {target.version} with digest {target.digest}, found {found} after "
                "writing; the disk or the memory of this machine is at fault"
            )
        return folder

    def keep_only(self, folder: Path) -> None:
        """Remove the versions before one that is served."""
        for other in self._subscriber.folder.glob("adapter-0*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def _advance(self, target: Manifest) -> State:
        reader = self._subscriber.reader
        if self._state is not None:
            self._state.reader = reader
            try:
                steps = reader.chain(self._state.digest, target)
                for manifest in steps or ():
                    self._state.apply(manifest)
            except DeltaError as error:
                outage = isinstance(error, StoreError) and not isinstance(error, ObjectNotFoundError)
                if outage or not self._subscriber.has_anchor_after(self._state.version.version, target):
                    raise
                # only a later anchor leads past a delta that cannot be used
                logger.warning("going on from an anchor: %s", error)
                steps = None
            if steps is not None:
                return self._state
        downloads = Path(tempfile.mkdtemp(prefix="adapter-state-", dir=self._subscriber.folder))
        self._state = rebuild(reader, target, downloads)
        for other in self._subscriber.folder.glob("adapter-state-*"):
            if other != downloads:
                shutil.rmtree(other, ignore_errors=True)
        return self._state
