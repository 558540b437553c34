# SPDX-License-Identifier: Apache-2.0
"""When a run gets a new anchor, and how its weights are read while training goes on."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from delta_wire.anchors import anchor_prefix, stream_anchor
from delta_wire.chain import BucketReader
from delta_wire.digest import Digest
from delta_wire.errors import DeltaError
from delta_wire.manifest import AnchorPart, Manifest
from delta_wire.state import OldBits, TensorTable
from delta_wire.stores import Store
from trl_delta.requests import AnchorRequests

logger = logging.getLogger(__name__)


class AnchorMaker:
    """Uploads a checkpoint once the deltas since the last one have cost more than it does.

    So what a reader fetches at the most to get from a restart point to the newest version is bounded by the size of
    the model, whatever the number of versions. An upload that fails is no failure of the run: it is tried again when
    another tenth of the price has come together. A server that needs an anchor gets one before that, see
    [`~trl_delta.requests.AnchorRequests`].

    Args:
        store ([`~delta_wire.stores.Store`]): the bucket.
        table ([`~delta_wire.state.TensorTable`]): the model.
        newest ([`~delta_wire.manifest.Manifest`], *optional*): version that publishing goes on from.
        factor (`float`): price of an anchor in sizes of the model.
        files (`Path`, *optional*): folder with configuration, tokenizer and templates.
        single_file (`str`, *optional*): name of one file for all tensors, in place of a model's.
        requests ([`~trl_delta.requests.AnchorRequests`], *optional*): of servers.
    """

    def __init__(
        self,
        store: Store,
        table: TensorTable,
        newest: Manifest | None,
        *,
        factor: float,
        files: Path | None = None,
        single_file: str | None = None,
        requests: AnchorRequests | None = None,
    ):
        self._store = store
        self._table = table
        self._price_bytes = factor * table.full_bytes
        self._files = files
        self._single_file = single_file
        self.requests = requests or AnchorRequests()
        # size of the deltas since the newest anchor, and its number
        self._chain_bytes, self._anchor_seq = 0, -1
        if newest is not None:
            self._chain_bytes, self._anchor_seq = _chain(BucketReader(store), newest)
        self._due_bytes = self._price_bytes
        # of the anchor being made
        self._began_s = 0.0
        self._is_answer = False
        # uploaded for a version that is not published yet
        self._made: AnchorPart | None = None

    @property
    def due(self) -> bool:
        return self.is_costly or self.asked

    @property
    def is_costly(self) -> bool:
        """Whether the deltas since the last anchor have come to its price."""
        return self._chain_bytes >= self._due_bytes

    @property
    def asked(self) -> bool:
        """Whether a server needs an anchor now."""
        return self.requests.due_after(self._anchor_seq)

    def make(self, bits: OldBits, seq: int, digest: Digest) -> AnchorPart | None:
        """Upload a state as the anchor of the version to come; `None` if that cannot be done now.

        Once for each version, however often that has to be tried.
        """
        if self._made is not None and self._made.objects[0].key.startswith(anchor_prefix(seq, digest)):
            return self._made
        self._begin(seq)
        try:
            self._made = stream_anchor(
                self._store,
                self._table,
                bits,
                seq=seq,
                digest=digest,
                files=self._files,
                single_file=self._single_file,
            )
        except OSError as error:
            # of the bucket, or of the folder for temporary files
            self._wait_longer()
            logger.warning("delta sync: no anchor for version %d this time: %s", seq, error)
            return None
        return self._made

    def published(self, manifest: Manifest) -> None:
        """A version is durable."""
        self._made = None
        if manifest.anchor is not None:
            if self._is_answer:
                self.requests.answered(time.monotonic() - self._began_s)
            self._anchor_seq = manifest.version.seq
            self._chain_bytes, self._due_bytes = 0, self._price_bytes
        elif manifest.delta is not None:
            self._chain_bytes += manifest.delta.size_bytes

    def _begin(self, seq: int) -> None:
        self._began_s = time.monotonic()
        # whether or not it is still asked for when it is there
        self._is_answer = self.asked
        ack = self.requests.open_after(self._anchor_seq)
        if ack is not None:
            logger.warning(
                "delta sync: version %d gets an anchor, because server %s cannot get past version %s: %s",
                seq,
                ack.server,
                ack.needs_anchor,
                ack.reason,
            )

    def _wait_longer(self) -> None:
        if self.asked:
            self.requests.failed()
        self._cost_more()

    def _cost_more(self) -> None:
        self._due_bytes = self._chain_bytes + self._price_bytes / 10


def _chain(reader: BucketReader, newest: Manifest) -> tuple[int, int]:
    """Size of the deltas since the newest restart point, and its number, -1 if that cannot be seen."""
    total = 0
    try:
        for manifest in reader.walk(newest):
            if manifest.anchor is not None:
                return total, manifest.version.seq
            total += manifest.delta.size_bytes if manifest.delta is not None else 0
    except DeltaError as error:
        logger.warning("delta sync: cannot see how long the chain is, an anchor comes later: %s", error)
    return total, -1
