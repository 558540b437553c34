# SPDX-License-Identifier: Apache-2.0
"""The server's state machine over a real bucket: versions as they come, buckets that come and go, acks."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeWorker, write_checkpoint
from followed_run import Server, publish

from delta_wire.bucket import BucketReader
from delta_wire.errors import RateLimitedError
from delta_wire.replay import checkout
from delta_wire.stores import open_store
from vllm_delta.engine import EngineStopped


@pytest.mark.parametrize("encoding", ["plain", "packed", "context"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_version_equals_a_full_load(tmp_path: Path, ranks: int, encoding: str):
    server = Server(tmp_path, ranks)
    writer = server.training.start()
    status = server.step()
    assert (status["state"], status["seq"], status["commits"]) == ("serving", 0, 0)
    assert server.engine.label == status["version"]
    for seq in (1, 2, 3):
        manifest = server.training.publish(writer, encoding)
        status = server.step()
        assert (status["state"], status["seq"], status["commits"], status["lag_versions"]) == ("serving", seq, seq, 0)
        assert server.weights() == server.loaded()
        assert status["version"] == server.engine.label == str(manifest.version)
        assert status["digest"] == str(server.training.digest)
        assert server.engine.renewed[-1] == ("forget", str(manifest.version))
        assert server.ack().version == manifest.version and server.ack().digest == server.training.digest
    assert len(status["pauses_ms"]) == 3 and len(status["ranks"]) == ranks
    assert not server.staged_files()


@pytest.mark.parametrize("encodings", [("plain", "packed", "plain", "context"), ("packed", "plain") * 5])
def test_pending_versions_are_committed_once_together(following: Server, encodings: tuple[str, ...]):
    for encoding in encodings:
        manifest = publish(following, encoding)
    status = following.step()
    assert status["state"] == "serving" and status["version"] == str(manifest.version)
    assert (status["seq"], status["commits"]) == (len(encodings), 1)
    assert following.weights() == following.loaded()
    # the same message again
    assert following.step()["commits"] == 1


def test_a_version_without_a_change_moves_the_label(following: Server):
    following.writer.publish({}, digest=following.training.digest, step=None)  # type: ignore[attr-defined]
    status = following.step()
    assert (status["state"], status["seq"]) == ("serving", 1)


def test_a_server_started_late_or_on_a_checkout_knows_its_version(following: Server, tmp_path: Path):
    versions = [publish(following) for _ in range(3)]
    folder = checkout(BucketReader(open_store(following.training.bucket)), versions[1], tmp_path / "checkout")
    other = Server(tmp_path)
    other.engine.workers = [FakeWorker(folder, rank, 2) for rank in range(2)]
    other.coordinator._folder = lambda: folder
    assert not other.coordinator.status.to_json()["looked"]
    status = other.step()
    assert (status["seq"], status["commits"], status["looked"]) == (3, 1, True)
    assert other.weights() == following.loaded()


def test_the_pointer_going_backwards_is_ignored_with_one_warning(following: Server, caplog: pytest.LogCaptureFixture):
    publish(following)
    old = (following.training.bucket / "LATEST").read_bytes()
    publish(following)
    new = (following.training.bucket / "LATEST").read_bytes()
    assert following.step()["seq"] == 2
    (following.training.bucket / "LATEST").write_bytes(old)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            status = following.step()
    assert (status["state"], status["seq"], status["target_seq"], status["lag_versions"]) == ("serving", 2, 1, 0)
    assert "went back" in status["reason"]
    assert sum("went back" in record.message for record in caplog.records) == 1
    (following.training.bucket / "LATEST").write_bytes(new)
    assert following.step()["reason"] is None


def test_empty_missing_and_vanishing_buckets(server: Server, caplog: pytest.LogCaptureFixture):
    bucket = server.training.bucket
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            status = server.step()
        assert status["state"] == "degraded" and str(bucket) in status["reason"]
        open_store(bucket, create=True)
        assert server.step()["state"] == "waiting"
        writer = server.training.start()
        assert server.step()["state"] == "serving"
        bucket.rename(bucket.with_name("elsewhere"))
        for _ in range(3):
            status = server.step()
        # nobody knows what is newest while the bucket cannot be read
        assert (status["state"], status["seq"], status["target_seq"]) == ("degraded", 0, None)
        assert not bucket.exists()
        bucket.with_name("elsewhere").rename(bucket)
        assert server.step()["state"] == "serving"
        (bucket / "LATEST").rename(bucket / "kept")
        assert "LATEST is gone" in server.step()["reason"]
        (bucket / "kept").rename(bucket / "LATEST")
        server.training.publish(writer)
        assert server.step()["seq"] == 1
    # one line for each of the three, however often it was tried
    assert sum(record.message.startswith("degraded") for record in caplog.records) == 3
    assert not any(record.exc_info for record in caplog.records)


def test_retries_back_off_and_come_back(following: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("random.uniform", lambda low, high: 1.0)
    bucket = following.training.bucket
    bucket.rename(bucket.with_name("elsewhere"))
    waits_s = [following.coordinator.step() for _ in range(8)]
    assert waits_s[:4] == [1.0, 2.0, 4.0, 8.0] and max(waits_s) == 8.0
    bucket.with_name("elsewhere").rename(bucket)
    assert following.coordinator.step() == 0.5


def test_a_rate_limit_is_waited_out_between_steps(following: Server, monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise RateLimitedError("asked too often", 120.0)

    with monkeypatch.context() as patch:
        patch.setattr(following.subscriber, "target", refuse)
        began_s = time.monotonic()
        # told to the driver, which can be woken, not slept over here
        assert 110.0 < following.coordinator.step() <= 120.0
        assert time.monotonic() - began_s < 60
    assert following.coordinator.status.to_json()["state"] == "degraded"
    # woken by a hint or a request, it does not ask before its time
    assert 50.0 < following.coordinator.step() <= 120.0
    monkeypatch.setattr(following.coordinator._polling, "_clock", lambda: time.monotonic() + 121)
    assert following.coordinator.step() < 1.0
    assert following.coordinator.status.to_json()["state"] == "serving"


def test_a_bucket_that_takes_no_acks_holds_nothing_up(following: Server, caplog: pytest.LogCaptureFixture):
    shutil.rmtree(following.training.bucket / "acks")
    (following.training.bucket / "acks").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            publish(following)
            assert following.step()["state"] == "serving"
    assert sum("cannot report" in record.message for record in caplog.records) == 1


def test_no_acks_without_the_setting(tmp_path: Path):
    server = Server(tmp_path, ack=False)
    server.training.start()
    assert server.step()["state"] == "serving"
    assert not (server.training.bucket / "acks").exists()


def test_the_end_of_the_engine_ends_the_step(following: Server, monkeypatch: pytest.MonkeyPatch):
    def stopped(action: Any) -> Any:
        raise EngineStopped

    publish(following)
    monkeypatch.setattr(following.engine, "between_steps", stopped)
    with pytest.raises(EngineStopped):
        following.coordinator.step()


def test_an_unexpected_error_is_a_reason_and_not_the_end(following: Server, monkeypatch: pytest.MonkeyPatch):
    def broken() -> Any:
        raise ZeroDivisionError("in a store")

    with monkeypatch.context() as patch:
        patch.setattr(following.subscriber, "target", broken)
        assert "in a store" in following.step()["reason"]
    assert following.step()["state"] == "serving"


def test_remote_methods_never_raise(tmp_path: Path):
    worker = FakeWorker(write_checkpoint(tmp_path / "base"))
    for method, args in [("submit", (1, "digest")), ("poll", (1,)), ("commit", ()), ("undo", ()), ("release", ())]:
        assert "error" in getattr(worker, f"delta_{method}")(*args)
    assert worker.delta_trace()["problems"] == {}
    for method, args in [("submit", (1, "no such job")), ("poll", (7,)), ("commit", ()), ("undo", ())]:
        assert "error" in getattr(worker, f"delta_{method}")(*args)
