# SPDX-License-Identifier: Apache-2.0
"""Work beside the engine's steps keeps to its share of the time."""

from types import SimpleNamespace

import pytest

from vllm_delta import pace


class Clock:
    """Time that passes by working and by resting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rests_s: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, rest_s: float) -> None:
        self.rests_s.append(rest_s)
        self.now_s += rest_s


@pytest.mark.parametrize("piece_s", [1e-5, 7e-4, 0.25])
@pytest.mark.parametrize("share_frac", [0.05, 0.5, 1.0])
def test_rests_leave_the_share_in_short_turns(monkeypatch: pytest.MonkeyPatch, share_frac: float, piece_s: float):
    clock = Clock()
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep))
    kept, worked_s, turn_s, longest_s = pace.Pace(share_frac), 0.0, 0.0, 0.0
    for _ in range(1000):
        clock.now_s += piece_s
        worked_s += piece_s
        turn_s += piece_s
        rests = len(clock.rests_s)
        kept.rest()
        if len(clock.rests_s) > rests:
            longest_s, turn_s = max(longest_s, turn_s), 0.0
    # all but what the last turn has not rested for yet
    assert (worked_s - turn_s) / (clock.now_s - turn_s) == pytest.approx(share_frac)
    assert turn_s < 0.002 and longest_s <= max(0.002 + piece_s, piece_s) * 1.001
