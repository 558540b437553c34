# SPDX-License-Identifier: Apache-2.0
"""Which version counts as served, and what rollouts are labelled with."""

import logging
import time

import pytest

from delta_wire.acks import Ack
from delta_wire.digest import Digest
from delta_wire.errors import StoreUnavailableError
from delta_wire.manifest import VersionId
from trl_delta.acks import AckWatcher, RolloutLabels

RUN = "abc123"


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of the watcher and of what it watches, moved by hand."""
    now_s = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


class FakePublisher:
    """Versions 0 to `durable_seq`; version `n` has digest `n` and the weights of step `10 n`."""

    def __init__(self, durable_seq: int):
        self.durable_seq = durable_seq
        self.since_s = time.monotonic()
        self.heeded: list[Ack] = []
        self.writer = type("Writer", (), {"version": VersionId(RUN, 1, 0)})()

    def digest_of(self, seq: int) -> Digest | None:
        return Digest(seq, seq) if seq <= self.durable_seq else None

    def step_of(self, seq: int) -> int | None:
        return 10 * seq if seq <= self.durable_seq else None

    def heed(self, acks: list[Ack]) -> None:
        self.heeded = acks

    def durable_since_s(self, seq: int) -> float:
        return self.since_s


def ack(server: str, seq: int | None, *, run: str = RUN, digest: Digest | None = None, state="serving") -> Ack:
    version = None if seq is None else VersionId(run, 1, seq)
    digest = digest or (None if seq is None else Digest(seq, seq))
    return Ack(server, version, digest, state, None, 1.5, 1000.0)


class Servers:
    """The acknowledgements in a bucket, and a watcher that looks only when told to."""

    def __init__(self, durable_seq: int = 9, found: tuple[Ack, ...] = (), **settings):
        self.acks: list[Ack] = []
        self.publisher = FakePublisher(durable_seq)
        self.watcher = AckWatcher(self._read, self.publisher, poll_s=3600, **settings)  # pyright: ignore
        self.say(*found)

    def _read(self) -> list[Ack]:
        return self.acks

    def say(self, *acks: Ack) -> int | None:
        self.acks = list(acks)
        self.watcher.poll()
        return self.watcher.seq


@pytest.fixture
def make_servers():
    made: list[Servers] = []

    def make(**settings) -> Servers:
        made.append(Servers(**settings))
        return made[-1]

    yield make
    for servers in made:
        servers.watcher.close()


def test_without_a_server_nothing_is_acknowledged(make_servers):
    servers = make_servers()
    assert servers.say() is None
    assert servers.watcher.step is None


def test_a_hint_is_followed_by_a_look(make_servers):
    hints = []
    ended = []

    def watch(on_change):
        hints.append(on_change)
        return lambda: ended.append(True)

    servers = make_servers(watch=watch)
    servers.acks = [ack("a", 3)]
    hints[0]()
    # without the hint the next look is an hour away
    assert servers.watcher.wait_for(3, 60)
    servers.watcher.close()
    assert ended == [True]


def test_a_server_that_advances_carries_the_step(make_servers):
    servers = make_servers()
    assert servers.say(ack("a", 0)) == 0
    assert servers.watcher.step == 0
    assert servers.say(ack("a", 4)) == 4
    assert servers.watcher.step == 40
    assert servers.watcher.servers["a"].pause_ms == 1.5


def test_what_servers_ask_for_is_passed_on_whether_they_count_or_not(make_servers):
    servers = make_servers(expected_servers=3)
    asks = [ack("a", 4), ack("b", 4, run="other")]
    assert servers.say(*asks) is None
    assert servers.publisher.heeded == asks


def test_the_slowest_server_decides(make_servers):
    servers = make_servers()
    assert servers.say(ack("a", 4), ack("b", 2)) == 2
    assert servers.say(ack("a", 4), ack("b", 5)) == 4


def test_fewer_servers_than_expected_acknowledge_nothing(make_servers):
    servers = make_servers(expected_servers=2)
    assert servers.say(ack("a", 4)) is None
    assert servers.say(ack("a", 4), ack("b", 3)) == 3


def test_a_degraded_server_counts_with_what_it_serves(make_servers):
    servers = make_servers()
    assert servers.say(ack("a", 3, state="degraded")) == 3
    assert servers.say(ack("a", None, state="degraded")) == 3


def test_a_server_that_falls_back_takes_the_acknowledgement_back(make_servers):
    servers = make_servers()
    assert servers.say(ack("a", 4)) == 4
    assert servers.say(ack("a", 0)) == 0


def test_servers_of_another_run_do_not_count(make_servers):
    assert make_servers().say(ack("a", 4, run="other")) is None


def test_a_wrong_digest_does_not_count_and_is_told_once(make_servers, caplog):
    servers = make_servers()
    for _ in range(3):
        assert servers.say(ack("a", 4, digest=Digest(1, 2))) is None
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    assert "server a says that it serves version" in caplog.text
    assert servers.say(ack("a", 4)) == 4


def test_a_silent_server_is_left_out_until_it_speaks_again(make_servers, caplog, monkeypatch):
    now_s = clock(monkeypatch)
    servers = make_servers(server_timeout_s=60)
    assert servers.say(ack("a", 9), ack("b", 2)) == 2
    now_s[0] += 59
    assert servers.say(ack("a", 9), ack("b", 2)) == 2
    now_s[0] += 2
    assert servers.say(ack("a", 9), ack("b", 2)) == 9
    assert servers.say(ack("a", 9), ack("b", 2)) == 9
    assert "server b still serves version 2" in caplog.text
    assert len(caplog.records) == 1
    assert servers.say(ack("a", 9), ack("b", 3)) == 3


def test_a_server_at_the_newest_version_may_be_silent_for_ever(make_servers, monkeypatch):
    now_s = clock(monkeypatch)
    servers = make_servers(server_timeout_s=60)
    assert servers.say(ack("a", 9)) == 9
    now_s[0] += 3600
    assert servers.say(ack("a", 9)) == 9


def test_a_server_of_an_earlier_session_does_not_count_until_it_speaks(make_servers):
    servers = make_servers(durable_seq=3, found=(ack("gone", 1), ack("new", 3)))
    assert servers.watcher.seq == 3
    servers.publisher.durable_seq = 4
    assert servers.say(ack("gone", 1), ack("new", 4)) == 4
    assert servers.say(ack("gone", 2), ack("new", 4)) == 2


def test_a_server_that_comes_up_behind_during_the_session_counts(make_servers):
    servers = make_servers(durable_seq=3)
    assert servers.say(ack("a", 3)) == 3
    assert servers.say(ack("a", 3), ack("late", 1)) == 1


def test_a_bucket_out_of_reach_leaves_everything_as_it_was(make_servers):
    servers = make_servers()
    assert servers.say(ack("a", 4)) == 4

    def fail() -> list[Ack]:
        raise StoreUnavailableError("gone")

    servers.watcher._read_acks = fail
    servers.watcher.poll()
    assert servers.watcher.seq == 4


def test_the_thread_polls_by_itself_and_wait_for_returns():
    acks: list[Ack] = []
    watcher = AckWatcher(lambda: acks, FakePublisher(9), poll_s=0.01)  # pyright: ignore[reportArgumentType]
    try:
        assert not watcher.wait_for(3, 0.05)
        acks.append(ack("a", 3))
        assert watcher.wait_for(3, 10)
    finally:
        watcher.close()


def test_an_error_that_nobody_expects_is_told_once_and_the_thread_goes_on(caplog):
    acks, tries = [ack("a", 9)], []
    watcher = AckWatcher(lambda: acks, FakePublisher(9), poll_s=0.01)  # pyright: ignore[reportArgumentType]

    def fail(step: int) -> None:
        tries.append(step)
        if len(tries) < 4:
            raise ZeroDivisionError("a bug")

    try:
        watcher.add_listener(fail)
        assert watcher.wait_for(9, 60)
        until_s = time.monotonic() + 60
        while len(tries) < 5:
            assert time.monotonic() < until_s
            time.sleep(0.005)
        assert sum("a bug" in record.getMessage() for record in caplog.records) == 1
    finally:
        watcher.close()


def test_labels_follow_the_acknowledged_weights_and_not_the_sync():
    told: list[int] = []
    step = 0
    labels = RolloutLabels(told.append, lambda: step)
    labels.announce(1)
    assert told == []
    labels.acknowledged(0)
    assert told == [1]
    for step in (1, 2, 3):
        labels.announce(step + 1)
    assert told == [1]
    labels.acknowledged(0)
    assert told == [1]
    labels.acknowledged(2)
    assert told == [1, 3]
    labels.acknowledged(3)
    assert told == [1, 3, 4]


def test_a_number_whose_weights_are_served_already_is_passed_on_at_once():
    told: list[int] = []
    labels = RolloutLabels(told.append, lambda: 3)
    labels.acknowledged(3)
    labels.announce(4)
    assert told == [4]


def test_labels_with_sparse_syncs_never_claim_weights_that_are_not_served():
    told: list[int] = []
    step = 0
    labels = RolloutLabels(told.append, lambda: step)
    labels.announce(1)
    step = 4
    labels.announce(2)
    step = 8
    labels.announce(3)
    labels.acknowledged(3)
    assert told == [1]
    labels.acknowledged(7)
    assert told == [1, 2]


def test_labels_go_back_when_a_server_goes_back():
    told: list[int] = []
    step = 0
    labels = RolloutLabels(told.append, lambda: step)
    for step in (0, 1, 2):
        labels.announce(step + 1)
    labels.acknowledged(2)
    labels.acknowledged(0)
    assert told == [3, 1]


def test_the_watcher_feeds_the_labels(make_servers):
    servers = make_servers()
    told: list[int] = []
    labels = RolloutLabels(told.append, lambda: 40)
    labels.announce(5)
    servers.watcher.add_listener(labels.acknowledged)
    servers.say(ack("a", 3))
    assert told == []
    servers.say(ack("a", 4))
    assert told == [5]
