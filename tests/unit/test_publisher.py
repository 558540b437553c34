# SPDX-License-Identifier: Apache-2.0
"""Publishing in the background: nothing waits, nothing is lost, every outage is told once."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from faulty_store import FaultyStore, Gate

from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.digest import digest_tensor
from delta_wire.errors import RateLimitedError, StoreUnavailableError, WriterConflictError
from delta_wire.state import Delta, TensorDelta, TensorSpec, TensorTable, change_of_digest, resolve
from trl_delta.publisher import Publisher

SIZE = 64


class Trainer:
    """Bits of one tensor, a bucket and a publisher."""

    def __init__(self) -> None:
        self.store = FaultyStore()
        self.bits = np.zeros(SIZE, dtype=np.uint16)
        self.digest = digest_tensor("w", self.bits)
        self.writer = BucketWriter.start(
            self.store, table=TensorTable([TensorSpec("w", (SIZE,))]), digest=self.digest, reference="nowhere"
        )
        self.publisher = Publisher(self.writer, step=0, retry_min_s=0.01, retry_max_s=0.02)

    def change(self, step: int, *indices: int, value: int | None = None) -> Delta:
        """Set elements to a value of their own and hand the change over."""
        at = np.array(sorted(indices), dtype=np.int32)
        old = self.bits[at].copy()
        self.bits[at] = step if value is None else value
        delta = {"w": TensorDelta("w", at, self.bits[at].copy(), old)} if indices else {}
        self.digest = self.digest + change_of_digest(delta)
        self.publisher.submit(delta, digest=self.digest, step=step)
        return delta

    def await_tries(self, count: int) -> None:
        """Wait until the publisher has tried to write so many times more."""
        reached = self.store.num_tries + count
        deadline_s = time.monotonic() + 60
        while self.store.num_tries < reached:
            assert time.monotonic() < deadline_s, "the publisher has given up"
            time.sleep(0.001)

    def replayed(self, tmp_path) -> np.ndarray:
        """The newest version of the bucket, from the deltas alone."""
        reader = BucketReader(self.store)
        latest = reader.latest()
        assert latest is not None
        bits = np.zeros(SIZE, dtype=np.uint16)
        for manifest in reader.chain(digest_tensor("w", bits), latest) or []:
            for part in reader.fetch_delta(manifest, tmp_path).values():
                bits[part.indices] = resolve(part, bits[part.indices]).new
        assert digest_tensor("w", bits) == latest.digest
        return bits


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.publisher.close(0)


def refuse(error: Exception, times: int | None = None) -> Callable[[str], None]:
    count = itertools.count()

    def fault(key: str) -> None:
        if times is None or next(count) < times:
            raise error

    return fault


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_each_delta_becomes_a_version_with_its_step(trainer, tmp_path):
    for step in (1, 2, 3):
        trainer.change(step, step, step + 10)
        assert trainer.publisher.wait(10)
    records = trainer.publisher.records
    assert [(record.seq, record.step, record.num_changed) for record in records] == [(1, 1, 2), (2, 2, 2), (3, 3, 2)]
    assert all(record.delta_bytes > 0 and record.publish_s > 0 for record in records)
    assert BucketReader(trainer.store).latest().step == 3
    assert np.array_equal(trainer.replayed(tmp_path), trainer.bits)


def test_submit_does_not_wait_for_the_bucket_and_later_deltas_coalesce(trainer, tmp_path):
    gate = trainer.store.fault = Gate()
    trainer.change(1, 0, 1)
    assert gate.reached.wait(10)
    began_s = time.monotonic()
    for step in range(2, 30):
        trainer.change(step, step % 7, 20 + step % 5)
    assert time.monotonic() - began_s < 5
    assert trainer.publisher.records == []
    gate.open()
    assert trainer.publisher.wait(10)
    assert [(record.seq, record.step) for record in trainer.publisher.records] == [(1, 1), (2, 29)]
    assert trainer.publisher.step_of(2) == 29
    assert np.array_equal(trainer.replayed(tmp_path), trainer.bits)


def test_an_outage_is_told_once_loses_nothing_and_its_end_is_told_once(trainer, tmp_path, caplog):
    trainer.store.fault = refuse(StoreUnavailableError("disk full"))
    trainer.change(1, 3)
    for step in range(2, 6):
        trainer.change(step, step)
        trainer.await_tries(2)
    assert not trainer.publisher.wait(0)
    said = warnings_of(caplog)
    assert len(said) == 1
    assert trainer.store.url in said[0]
    assert "disk full" in said[0]
    assert "Make the bucket reachable again" in said[0]
    trainer.store.fault = None
    assert trainer.publisher.wait(10)
    assert len(warnings_of(caplog)) == 2
    assert "can be written again" in warnings_of(caplog)[1]
    assert np.array_equal(trainer.replayed(tmp_path), trainer.bits)
    # a second outage is news again
    trainer.store.fault = refuse(StoreUnavailableError("gone"), times=2)
    trainer.change(9, 9)
    assert trainer.publisher.wait(10)
    assert len(warnings_of(caplog)) == 4


def test_a_rate_limit_is_waited_out_and_does_not_hold_up_the_end(trainer):
    tries = []

    def fault(key: str) -> None:
        tries.append(time.monotonic())
        raise RateLimitedError("asked too often", 0.5 if len(tries) == 1 else 3600.0)

    trainer.store.fault = fault
    trainer.change(1, 3)
    deadline_s = time.monotonic() + 60
    while len(tries) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert tries[1] - tries[0] >= 0.5
    began_s = time.monotonic()
    assert not trainer.publisher.close(0)
    assert time.monotonic() - began_s < 60 and len(tries) == 2


@pytest.mark.parametrize("fails_at", ["deltas/", "versions/", "LATEST"])
def test_a_publication_that_stops_at_any_object_is_finished_later(trainer, tmp_path, fails_at):
    failures = []

    def fault(key: str) -> None:
        if key.startswith(fails_at) and len(failures) < 3:
            failures.append(key)
            raise StoreUnavailableError(f"{key} refused")

    trainer.store.fault = fault
    trainer.change(1, 1)
    trainer.change(2, 2)
    trainer.change(3, 1, value=7)
    assert trainer.publisher.wait(10)
    assert len(failures) == 3
    assert np.array_equal(trainer.replayed(tmp_path), trainer.bits)


def test_no_room_for_temporary_files_is_an_outage_too(trainer, tmp_path, caplog):
    trainer.store.fault = refuse(OSError(28, "No space left on device"), times=3)
    trainer.change(1, 1)
    assert trainer.publisher.wait(10)
    assert "No space left on device" in warnings_of(caplog)[0] and "room on this machine" in warnings_of(caplog)[0]
    assert np.array_equal(trainer.replayed(tmp_path), trainer.bits)


def test_a_removed_bucket_is_an_outage_and_not_the_end(trainer, caplog):
    trainer.store.drop()
    trainer.change(1, 1)
    assert not trainer.publisher.wait(0.1)
    assert trainer.publisher.failure is None
    assert len(warnings_of(caplog)) == 1


def test_an_error_that_cannot_mend_stops_publishing_and_is_kept(trainer, caplog):
    trainer.store.put("versions/000000000001.json", b"of another trainer")
    trainer.change(1, 1)
    assert not trainer.publisher.wait(10)
    assert isinstance(trainer.publisher.failure, WriterConflictError)
    puts = list(trainer.store.puts)
    trainer.change(2, 2)
    time.sleep(0.05)
    assert trainer.store.puts == puts
    assert not trainer.publisher.close(1)
    assert warnings_of(caplog) == []


def test_an_unexpected_error_does_not_die_with_the_thread(trainer):
    trainer.store.fault = refuse(ZeroDivisionError("a bug"))
    trainer.change(1, 1)
    assert not trainer.publisher.wait(10)
    assert isinstance(trainer.publisher.failure, ZeroDivisionError)


def test_an_error_after_a_version_is_kept_too(trainer):
    def fail(published, **_):
        raise ZeroDivisionError("a bug")

    trainer.publisher._enter = fail
    trainer.change(1, 1)
    assert not trainer.publisher.wait(10)
    assert isinstance(trainer.publisher.failure, ZeroDivisionError)


def test_an_empty_delta_needs_no_version_but_its_step_counts(trainer):
    trainer.change(1)
    assert trainer.publisher.step_of(0) == 1
    trainer.change(2, 5)
    assert trainer.publisher.wait(10)
    trainer.change(3)
    assert trainer.publisher.wait(10)
    assert [record.seq for record in trainer.publisher.records] == [1]
    assert trainer.publisher.step_of(1) == 3


def test_changes_that_undo_each_other_while_waiting_need_no_version(trainer):
    gate = trainer.store.fault = Gate()
    trainer.change(1, 0)
    assert gate.reached.wait(10)
    trainer.change(2, 5, value=9)
    trainer.change(3, 5, value=0)
    gate.open()
    assert trainer.publisher.wait(10)
    assert [record.seq for record in trainer.publisher.records] == [1]
    assert trainer.publisher.step_of(1) == 3


def test_close_waits_for_what_is_on_its_way(trainer, tmp_path):
    trainer.store.fault = refuse(StoreUnavailableError("slow start"), times=3)
    trainer.change(1, 1)
    trainer.change(2, 2)
    assert trainer.publisher.close(10)
    assert np.array_equal(trainer.replayed(tmp_path), trainer.bits)


def test_close_of_an_unreachable_bucket_is_bounded_and_submit_is_refused_after(trainer):
    trainer.store.fault = refuse(StoreUnavailableError("gone"))
    trainer.change(1, 1)
    began_s = time.monotonic()
    assert not trainer.publisher.close(0.2)
    assert time.monotonic() - began_s < 3
    with pytest.raises(RuntimeError, match="closed"):
        trainer.publisher.submit({}, digest=trainer.digest, step=2)
