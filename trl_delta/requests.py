# SPDX-License-Identifier: Apache-2.0
"""Anchors that servers ask for in their acknowledgements, because nothing else leads past what they have lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from delta_wire.acks import Ack

LEAST_PAUSE_S = 600.0
# an anchor that is asked for is followed by a pause of so many times what it took
_REST_FACTOR = 9.0


class AnchorRequests:
    """Which request is open, and when it may be answered.

    Whoever can write acks can ask, and an anchor is as large as the model. So requests are answered by one anchor
    every ten minutes at the most, in no more than a tenth of the time; one answers all that were made before it.

    Args:
        least_pause_s (`float`, *optional*, defaults to `600.0`): between two anchors that were asked for.
        clock (callable, *optional*): seconds that never go back.
    """

    def __init__(self, least_pause_s: float = LEAST_PAUSE_S, clock: Callable[[], float] = time.monotonic):
        self._least_pause_s = least_pause_s
        self._clock = clock
        self._not_before_s = clock()
        self._failures = 0
        # the newest version that somebody cannot reach, and who
        self._open: tuple[int, Ack] | None = None

    def heed(self, acks: list[Ack], run: str, newest_seq: int) -> None:
        """Take note of all current acknowledgements. From any thread.

        Args:
            run (`str`), newest_seq (`int`): what is published; requests for anything else make no sense.
        """
        requests = [(ack.needs_anchor.seq, ack) for ack in acks if ack.needs_anchor and ack.needs_anchor.run == run]
        sensible = [request for request in requests if request[0] <= newest_seq]
        self._open = max(sensible, key=lambda request: request[0], default=None)

    def open_after(self, anchor_seq: int) -> Ack | None:
        """A request that no anchor up to this version answers."""
        request = self._open
        return request[1] if request is not None and request[0] >= anchor_seq else None

    def due_after(self, anchor_seq: int) -> bool:
        """Whether there is one and it is time to answer it."""
        return self.open_after(anchor_seq) is not None and self._clock() >= self._not_before_s

    def answered(self, took_s: float) -> None:
        """An anchor that was asked for is there, and how long its upload took."""
        self._failures = 0
        self._not_before_s = self._clock() + max(self._least_pause_s, _REST_FACTOR * took_s)

    def failed(self) -> None:
        """It could not be made; tried again after a minute, and after ever longer up to ten."""
        pause_s = self._least_pause_s / 10 * 2**self._failures
        self._not_before_s = self._clock() + min(pause_s, self._least_pause_s)
        # a number of any size would be no float any more
        self._failures = min(self._failures + 1, 10)
