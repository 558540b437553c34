# SPDX-License-Identifier: Apache-2.0
"""Long work beside the engine's steps that leaves most of the time to them."""

from __future__ import annotations

import time

# what is worth a rest: shorter ones would cost more than they give
_SLICE_S = 0.002


class Pace:
    """Keeps one thread to a share of the time.

    Args:
        share_frac (`float`, *optional*, defaults to `1.0`): of the time that may be spent working; all of it means no
            rest at all.
    """

    def __init__(self, share_frac: float = 1.0):
        self._rest_per_work = 1 / share_frac - 1
        self._since_s = time.perf_counter()

    def rest(self) -> None:
        """Between two pieces of the work: sleep for what the last ones have earned."""
        worked_s = time.perf_counter() - self._since_s
        if worked_s < _SLICE_S:
            return
        # work that others have interrupted counts whole: the busier the machine, the less of it is taken
        time.sleep(worked_s * self._rest_per_work)
        self._since_s = time.perf_counter()
