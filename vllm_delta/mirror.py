# SPDX-License-Identifier: Apache-2.0
"""All weights of one version in host memory, for encodings that are read with the old weights at hand.

One per host, whatever the number of ranks. It is a copy-on-write map of the loaded checkpoint, so only pages with a
change take memory, and it is made when the first such delta arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from delta_wire.bucket import BucketReader
from delta_wire.errors import SetupError
from delta_wire.manifest import Manifest
from delta_wire.replay import State
from delta_wire.state import Delta, compose


@dataclass(frozen=True, slots=True)
class Base:
    """A version whose whole weights are on this machine's disk."""

    manifest: Manifest
    folder: Path


class Mirror:
    """Follows a run one delta at a time.

    Args:
        base (`Base`): where to begin.
    """

    def __init__(self, base: Base):
        self._base = base
        self._state: State | None = None

    def delta(self, reader: BucketReader, chain: list[Manifest], folder: Path) -> Delta:
        """What a chain of versions changes, composed, as bits.

        Args:
            reader (`BucketReader`): the run.
            chain (list of `Manifest`): versions in order.
            folder (`Path`): for downloads.
        """
        steps = None if self._state is None else reader.chain(self._state.digest, chain[-1])
        if steps is None or len(steps) < len(chain):
            # not made yet, or ahead: a version that was read was not committed
            self._state = State(reader, self._base.manifest, folder, self._base.folder)
            steps = reader.chain(self._state.digest, chain[-1])
        if steps is None and chain[0].parent is not None:
            # the run was changed for another one, which has an anchor of its own
            parent = reader.manifest(chain[0].parent.seq, chain[0].parent.manifest_sha256)
            self._state = State(reader, reader.restart_point(parent), folder)
            steps = reader.chain(self._state.digest, chain[-1])
        if steps is None or self._state is None:
            raise SetupError(
                f"{reader.store.url}: version {chain[-1].version} is coded against the weights before it, and no "
                f"chain leads there from {self._base.manifest.version}, which this server was started on; restart it "
                "on a checkout of a newer version"
            )
        self._state.reader = reader
        composed: Delta = {}
        for at, manifest in enumerate(steps):
            delta = self._state.apply(manifest)
            if at >= len(steps) - len(chain):
                composed = compose(composed, delta)
        return composed
