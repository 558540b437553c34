# SPDX-License-Identifier: Apache-2.0
"""When a server looks at its bucket: jitter, back-off, quotas, hints."""

from __future__ import annotations

import pytest

from delta_wire.errors import RateLimitedError, StoreUnavailableError
from vllm_delta.polling import Polling, budget


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pauses(polling: Polling, count: int = 200) -> tuple[float, float]:
    found = [polling.pause_s() for _ in range(count)]
    return min(found), max(found)


def test_pauses_vary_so_that_a_fleet_spreads():
    low, high = pauses(Polling(1.0))
    assert 0.8 <= low < 0.9 and 1.1 < high <= 1.2


def test_failures_double_the_pause_up_to_a_bound():
    polling = Polling(1.0)
    for most in (2.0, 4.0, 8.0, 8.0, 8.0):
        polling.failed(StoreUnavailableError("x"))
        low, high = pauses(polling)
        assert 0.8 * most <= low and high <= 1.2 * most
    polling.succeeded()
    assert pauses(polling)[1] <= 1.2
    # whoever wants to look less often than the bound is not made to look more often
    slow = Polling(60.0)
    slow.failed(StoreUnavailableError("x"))
    assert pauses(slow)[0] >= 48


def test_a_quota_is_waited_for(clock: Clock):
    polling = Polling(0.5, clock)
    polling.failed(RateLimitedError("x", 42.0))
    assert polling.forbidden_s == 42 and pauses(polling)[0] == 42
    clock.now_s += 40
    assert polling.forbidden_s == 2
    clock.now_s += 3
    polling.succeeded()
    assert polling.forbidden_s == 0 and pauses(polling)[1] <= 0.6


def test_a_feed_makes_looks_rare_for_as_long_as_it_is_ahead_of_them():
    polling = Polling(0.5)
    polling.found(news=True)
    assert pauses(polling)[1] <= 0.6
    polling.hint()
    polling.found(news=True)
    assert pauses(polling)[0] >= 4.0
    polling.found(news=False)
    assert pauses(polling)[0] >= 4.0
    # a version that nobody announced
    polling.found(news=True)
    assert pauses(polling)[1] <= 0.6


def test_the_budget_of_a_fleet():
    one = budget(1.0, publish_s=5.0)
    assert (one.reads, one.writes) == (3600 + 2 * 720, 720)
    fleet = budget(1.0, publish_s=5.0, servers=10, acks=False)
    assert (fleet.reads, fleet.writes) == (10 * one.reads, 0)
    assert budget(1.0, publish_s=60.0, feed=True).reads == 720 + 60 + 120
    assert str(one) == "5,040 reads and 720 writes an hour"
