# SPDX-License-Identifier: Apache-2.0
"""Reports to the bucket what this server serves, whenever that has changed."""

from __future__ import annotations

import logging
from typing import Any

from delta_wire.errors import DeltaError
from delta_wire.manifest import Ack
from vllm_delta.settings import Settings
from vllm_delta.status import Status
from vllm_delta.subscriber import Subscriber

logger = logging.getLogger("vllm.vllm_delta.acks")


class Reporter:
    """Writes the ack of one server. A bucket that takes no acks is told once in the log and holds nothing up.

    Args:
        subscriber (`Subscriber`): the bucket.
        settings (`Settings`): of the server.
        status (`Status`): what to report.
    """

    def __init__(self, subscriber: Subscriber, settings: Settings, status: Status):
        self._subscriber = subscriber
        self._settings = settings
        self._status = status
        self._reported: tuple[Any, ...] | None = None
        self._failing = False

    def report(self) -> None:
        """Write the ack if there is news."""
        status = self._status
        news = (status.version, status.digest, status.state, status.reason, status.needs_anchor)
        if not self._settings.ack or status.state == "waiting" or news == self._reported:
            return
        ack = Ack(
            server=self._settings.server_id,
            version=status.version,
            digest=status.digest,
            state=status.state,
            reason=status.reason,
            pause_ms=status.pause_ms,
            served_unix_s=status.served_unix_s,
            needs_anchor=status.needs_anchor,
        )
        try:
            self._subscriber.write_ack(ack)
        except DeltaError as error:
            if not self._failing:
                logger.warning("cannot report to the bucket what is served: %s", error)
            self._failing = True
            return
        self._failing = False
        self._reported = news
