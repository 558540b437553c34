# SPDX-License-Identifier: Apache-2.0
"""How long a server is waited for, and how often it is asked again."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from delta_wire.errors import RateLimitedError, SetupError, StoreUnavailableError

_Result = TypeVar("_Result")
TIMEOUT_VARIABLE = "DELTA_STORE_TIMEOUT_S"
_DEFAULT_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
_TRIES = 4


def timeout_s() -> float:
    """Seconds without a byte after which a request counts as lost (`DELTA_STORE_TIMEOUT_S`)."""
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    try:
        value = float(text) if text else _DEFAULT_TIMEOUT_S
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 3600:
        raise SetupError(f"{TIMEOUT_VARIABLE}={text!r} is no number of seconds between 0.1 and 3600")
    return value


class Patience:
    """Repeats calls that failed for a reason that may pass, a few times and for a few seconds.

    `close` cuts every pause short, so that no shutdown waits for one.

    Args:
        first_pause_s (`float`, *optional*, defaults to 0.2): before the second try; each later one is twice as long.
        give_up_s (`float`, *optional*, defaults to 10): no pause goes beyond this many seconds after the first try.
            What takes longer is left to the callers, who wait without holding anything up and say why.
    """

    def __init__(self, first_pause_s: float = 0.2, give_up_s: float = 10.0) -> None:
        self.first_pause_s = first_pause_s
        self.give_up_s = give_up_s
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def __call__(self, call: Callable[[], _Result]) -> _Result:
        """The result of `call`; its last [`~delta_wire.errors.StoreUnavailableError`] once patience is at an end."""
        began_s = time.monotonic()
        pause_s = self.first_pause_s
        for tries_left in reversed(range(_TRIES)):
            try:
                return call()
            except StoreUnavailableError as error:
                # jitter, so that a fleet does not come back all at once
                wait_s = pause_s * random.uniform(0.5, 1.5)
                if isinstance(error, RateLimitedError):
                    wait_s = max(wait_s, error.retry_after_s)
                if not tries_left or time.monotonic() - began_s + wait_s > self.give_up_s or self._closed.wait(wait_s):
                    raise
            pause_s *= 2
        raise AssertionError("the last try returns or raises")
