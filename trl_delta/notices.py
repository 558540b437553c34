# SPDX-License-Identifier: Apache-2.0
"""What the user is told while publishing goes on: once when something begins to go wrong, once when it is over."""

from __future__ import annotations

import logging

from delta_wire.acks import Ack
from delta_wire.manifest import VersionId

logger = logging.getLogger(__name__)


class Notices:
    """Remembers what has been said.

    Args:
        url (`str`): the bucket.
    """

    def __init__(self, url: str):
        self._url = url
        self.is_outage = self._said_no_anchor = False
        # newest step that could not be looked at, until a later one is published
        self._skipped_step: int | None = None

    def outage(self, seq: int, error: OSError) -> None:
        """Version `seq` could not be written this time."""
        if self.is_outage:
            logger.debug("delta sync: still no version %d: %s", seq, error)
            return
        self.is_outage = True
        logger.warning(
            "delta sync: cannot publish version %d to %s: %s. Training goes on and no change is lost: later changes "
            "are gathered and publishing is tried again. Make the bucket reachable again, or room on this machine if "
            "that is what is missing; if the bucket is gone for good, start a new run with an empty one.",
            seq,
            self._url,
            error,
        )

    def skipped(self, step: int, reason: object) -> None:
        """The weights of a step could not be looked at, here or on another process."""
        is_news, self._skipped_step = self._skipped_step is None, step
        if not is_news:
            logger.debug("delta sync: step %d is not published either: %s", step, reason)
            return
        logger.warning(
            "delta sync: the weights of step %d could not be looked at and are not published: %s. Training goes on, "
            "and the next version contains what has changed. Set delta_sync_on_failure=stop to end training in place "
            "of that.",
            step,
            reason,
        )

    def published(self, version: VersionId, step: int) -> None:
        """A version with the weights of a step is durable."""
        if self.is_outage:
            self.is_outage = False
            logger.warning("delta sync: %s can be written again; version %s is published", self._url, version)
        if self._skipped_step is not None and step > self._skipped_step:
            self._skipped_step = None
            logger.warning("delta sync: version %s is published, with what had been left out before", version)

    def no_anchor(self, ack: Ack) -> None:
        """A server asks for what the settings forbid."""
        if self._said_no_anchor:
            return
        self._said_no_anchor = True
        logger.warning(
            "delta sync: server %s cannot get past version %s and needs an anchor, which "
            "delta_sync_anchor_factor=0 forbids; restore what it misses, or resume training with another one: %s",
            ack.server,
            ack.needs_anchor,
            ack.reason,
        )
