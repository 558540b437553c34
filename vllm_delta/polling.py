# SPDX-License-Identifier: Apache-2.0
"""When a server looks at its bucket next, and what that costs a fleet."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from delta_wire.errors import RateLimitedError

_MAX_BACKOFF_S = 8.0
# a feed of changes is a hint: without one the bucket is still looked at this often
_WITH_FEED_S = 5.0
_MAX_DOUBLINGS = 16
_HOUR_S = 3600.0


class Polling:
    """The pauses between two looks.

    Every pause varies by a fifth, so that a fleet that was started at once does not ask at once. Failures double it.
    While a feed of changes has announced every version before a look found it, looks are rare.

    Args:
        poll_s (`float`): between two looks when all is well and there is no feed.
        clock (callable, *optional*): seconds that never go back.
    """

    def __init__(self, poll_s: float, clock: Callable[[], float] = time.monotonic):
        self._poll_s = poll_s
        self._clock = clock
        self._failures = 0
        self._hinted = False
        self._trusted = False
        self._not_before_s = 0.0

    @property
    def failures(self) -> int:
        """Looks in a row that failed."""
        return self._failures

    def hint(self) -> None:
        """The feed says that something has changed. From any thread."""
        self._hinted = True

    def found(self, news: bool) -> None:
        """A look has succeeded; whether there was a version that had not been there."""
        if news:
            # a version that no hint came before: the feed is gone
            self._trusted = self._hinted
            self._hinted = False

    def succeeded(self) -> None:
        """All is well, or is to be tried afresh."""
        self._failures = 0

    def failed(self, error: BaseException) -> None:
        """A look, or what followed, has failed."""
        self._failures = min(self._failures + 1, _MAX_DOUBLINGS)
        if isinstance(error, RateLimitedError):
            self._not_before_s = self._clock() + error.retry_after_s

    @property
    def forbidden_s(self) -> float:
        """Seconds for which the bucket must not be asked, since it was asked too often."""
        return max(0.0, self._not_before_s - self._clock())

    def pause_s(self) -> float:
        """Seconds until the next look."""
        longest_s = max(self._poll_s, _MAX_BACKOFF_S)
        calm_s = max(self._poll_s, _WITH_FEED_S) if self._trusted else self._poll_s
        pause_s = min(longest_s, self._poll_s * 2**self._failures) if self._failures else calm_s
        return max(pause_s * random.uniform(0.8, 1.2), self.forbidden_s)


@dataclass(frozen=True, slots=True)
class Budget:
    """Requests to a bucket in an hour.

    Args:
        reads (`int`): of single objects.
        writes (`int`): of single objects.
    """

    reads: int
    writes: int

    def __str__(self) -> str:
        return f"{self.reads:,} reads and {self.writes:,} writes an hour"


def budget(poll_s: float, *, publish_s: float, servers: int = 1, acks: bool = True, feed: bool = False) -> Budget:
    """What a fleet asks of a bucket.

    Args:
        poll_s (`float`): between two looks of a server.
        publish_s (`float`): between two versions.
        servers (`int`, *optional*, defaults to `1`): that follow; each is one reader, however many ranks it has.
        acks (`bool`, *optional*, defaults to `True`): whether they report what they serve.
        feed (`bool`, *optional*, defaults to `False`): whether the bucket announces changes.
    """
    versions = _HOUR_S / publish_s
    looks = _HOUR_S / (max(poll_s, _WITH_FEED_S) if feed else poll_s) + (versions if feed else 0.0)
    # of each version the manifest and the delta
    return Budget(round(servers * (looks + 2 * versions)), round(servers * versions) if acks else 0)
