# SPDX-License-Identifier: Apache-2.0
"""Servers that ask for an anchor get one, and nobody who can write acks gets more than is bounded."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from faulty_store import FaultyStore

from delta_wire.acks import Ack
from delta_wire.digest import Digest
from delta_wire.errors import StoreUnavailableError
from delta_wire.manifest import Manifest, VersionId
from delta_wire.replay import verify
from trl_delta.anchors import AnchorMaker
from trl_delta.publisher import Publisher
from trl_delta.requests import AnchorRequests


def asking(seq: int, server: str = "a", run: str = "run") -> Ack:
    version = VersionId(run, 1, seq)
    return Ack(server, VersionId(run, 1, 0), Digest(), "degraded", "lost", None, 1.0, needs_anchor=version)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_one_anchor_answers_all_requests_before_it():
    requests = AnchorRequests()
    assert not requests.due_after(-1)
    requests.heed([asking(3), asking(5, "b")], "run", 7)
    ask = requests.open_after(0)
    assert ask is not None and ask.server == "b"
    assert requests.due_after(0) and requests.due_after(5)
    # the anchor is of a later version than anything that is missed
    assert not requests.due_after(6)
    # healed, or gone
    requests.heed([], "run", 7)
    assert not requests.due_after(0)


def test_requests_that_make_no_sense_are_ignored():
    requests = AnchorRequests()
    requests.heed([asking(8), asking(10**9, "b"), asking(3, "c", run="other")], "run", 7)
    assert requests.open_after(-1) is None
    # and hide no other
    requests.heed([asking(10**9, "b"), asking(3, "c")], "run", 7)
    assert requests.due_after(0)


def test_whoever_asks_without_end_gets_an_anchor_in_ten_minutes_and_a_tenth_of_the_time():
    clock = Clock()
    requests = AnchorRequests(clock=clock)
    answers = []
    for seq in range(24 * 360):
        # a new one every ten seconds, each for the version that is newest
        requests.heed([asking(seq)], "run", seq)
        if requests.due_after(seq):
            answers.append(clock.now_s)
            requests.answered(took_s=10.0 if len(answers) < 100 else 400.0)
        clock.now_s += 10.0
    pauses = np.diff(answers)
    assert len(answers) > 100 and pauses.min() == 600.0
    # as many as take a tenth of the time
    assert pauses[100:].min() == 3600.0


def test_a_failed_answer_is_tried_again_after_a_minute_and_then_ever_more_slowly():
    clock = Clock()
    requests = AnchorRequests(clock=clock)
    requests.heed([asking(1)], "run", 1)
    pauses = []
    for _ in range(2000):
        began_s = clock.now_s
        requests.failed()
        while not requests.due_after(0):
            clock.now_s += 10.0
        pauses.append(clock.now_s - began_s)
    assert pauses[:6] == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0] and pauses[-1] == 600.0
    # the next one to be asked for begins anew
    requests.answered(took_s=1.0)
    clock.now_s += 600.0
    requests.failed()
    clock.now_s += 60.0
    assert requests.due_after(0)


class Trainer:
    """A training, and a publisher that makes no anchor for its price."""

    def __init__(self, run: Any, *, anchors: bool = True):
        self.run = run
        self.clock = Clock()
        maker = AnchorMaker(
            run.store,
            run.table,
            run.writer.head,
            factor=1e6,
            files=run.base,
            requests=AnchorRequests(clock=self.clock),
        )
        self.publisher = Publisher(
            run.writer,
            step=0,
            anchors=maker if anchors else None,
            snapshot=lambda name: run.bits[name].copy(),
            retry_min_s=0.01,
            retry_max_s=0.02,
        )

    def train(self, step: int) -> None:
        with self.publisher.extracting:
            delta, digest = self.run.next_delta()
            self.publisher.submit(delta, digest=digest, step=step)

    def ask(self, seq: int) -> None:
        self.publisher.heed([asking(seq, run=self.run.writer.version.run)])

    def await_log(self, caplog: pytest.LogCaptureFixture, said: str) -> None:
        until_s = time.monotonic() + 60
        while said not in caplog.text:
            assert time.monotonic() < until_s
            time.sleep(0.005)

    def await_version(self, seq: int) -> Manifest:
        with self.publisher._changed:
            assert self.publisher._changed.wait_for(lambda: self.publisher.durable_seq >= seq, 60)
        latest = self.run.reader().latest()
        assert latest is not None and latest.version.seq == seq
        return latest


@pytest.fixture
def make_trainer(tools, make_run) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(**options: Any) -> Trainer:
        made.append(Trainer(tools.Run(FaultyStore(), make_run().base), **options))
        return made[-1]

    yield make
    for trainer in made:
        trainer.publisher.close(0)


def test_a_request_is_answered_though_nothing_is_trained(make_trainer, caplog: pytest.LogCaptureFixture):
    trainer = make_trainer()
    for step in (1, 2):
        trainer.train(step)
        assert trainer.publisher.wait(60)
    trainer.ask(2)
    made = trainer.await_version(3)
    assert made.anchor is not None and made.anchor.objects and made.changed_params == 0
    assert made.digest == trainer.run.writer.digest
    # the same weights as those of the step before
    assert trainer.publisher.step_of(3) == 2
    assert "version 3 gets an anchor, because server a cannot get past version" in caplog.text
    # once: neither the same nor, for some time, a new request has another one made
    trainer.ask(2)
    trainer.ask(3)
    trainer.train(3)
    assert trainer.publisher.wait(60)
    assert trainer.await_version(4).anchor is None
    trainer.clock.now_s += 600.0
    trainer.ask(3)
    assert trainer.await_version(5).anchor is not None
    assert all(check.ok for check in verify(trainer.run.reader()))


def test_an_anchor_that_cannot_be_uploaded_is_no_failure_and_no_version(
    make_trainer, caplog: pytest.LogCaptureFixture
):
    trainer = make_trainer()
    trainer.train(1)
    assert trainer.publisher.wait(60)

    def fault(key: str) -> None:
        if key.startswith("anchors/"):
            raise StoreUnavailableError("the bucket is full")

    trainer.run.store.fault = fault
    trainer.ask(1)
    trainer.await_log(caplog, "no anchor for version 2 this time: the bucket is full")
    assert trainer.publisher.wait(60) and trainer.await_version(1).anchor is None
    trainer.run.store.fault = None
    trainer.ask(1)
    trainer.train(2)
    assert trainer.await_version(2).anchor is None
    trainer.clock.now_s += 60.0
    trainer.ask(1)
    assert trainer.await_version(3).anchor is not None


def test_an_anchor_is_uploaded_once_however_often_its_version_is_tried(make_trainer):
    trainer = make_trainer()
    trainer.train(1)
    assert trainer.publisher.wait(60)
    puts: list[str] = []
    failures = iter(range(3))

    def fault(key: str) -> None:
        puts.append(key)
        if key.startswith(("versions/", "deltas/")) and next(failures, None) is not None:
            raise StoreUnavailableError("the bucket is full")

    trainer.run.store.fault = fault
    trainer.ask(1)
    assert trainer.await_version(2).anchor is not None
    uploaded = [key for key in puts if key.startswith("anchors/")]
    assert len(uploaded) == len(set(uploaded)) and any(key.endswith("model.safetensors") for key in uploaded)
    assert next(failures, None) is None
    assert all(check.ok for check in verify(trainer.run.reader()))


def test_without_anchors_it_is_said_that_nobody_gets_one(make_trainer, caplog: pytest.LogCaptureFixture):
    trainer = make_trainer(anchors=False)
    for _ in range(3):
        trainer.ask(0)
    trainer.publisher.close(0)
    said = [record.getMessage() for record in caplog.records if "delta_sync_anchor_factor=0" in record.getMessage()]
    assert len(said) == 1 and "server a cannot get past version" in said[0]
