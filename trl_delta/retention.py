# SPDX-License-Identifier: Apache-2.0
"""Removing what no server needs any more, in a thread of its own beside publishing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from delta_wire.errors import DeltaError
from delta_wire.manifest import VersionId
from delta_wire.retention import Sweeper

logger = logging.getLogger(__name__)
_JOIN_S = 5.0
# as seldom as this at least; a bucket's listings have quotas
_LONGEST_S = 300.0


class Keeper:
    """Sweeps from time to time. An error is logged once and tried again the next time.

    Args:
        sweeper ([`~delta_wire.retention.Sweeper`]): over a connection of its own.
        owner (callable): version that this trainer published last; nothing is removed from a run that another one has
            taken over.
        grace_s (`float`): of the policy; sweeps come twice in it.
    """

    def __init__(self, sweeper: Sweeper, owner: Callable[[], VersionId], grace_s: float):
        self._sweeper = sweeper
        self._owner = owner
        self._pause_s = min(max(grace_s / 2, 0.05), _LONGEST_S)
        self._failing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="delta-retention", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Safe to call again."""
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s):
            try:
                self._sweeper.sweep(self._owner())
                self._failing = False
            except DeltaError as error:
                if not self._failing:
                    logger.warning("delta sync: old versions could not be removed, which is tried again: %s", error)
                self._failing = True
            except Exception:
                # a thread that dies in silence would fill the bucket
                logger.exception("delta sync: old versions are not removed any more")
                return
