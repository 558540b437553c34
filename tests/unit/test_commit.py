# SPDX-License-Identifier: Apache-2.0
"""The server's state machine over real ranks and a real bucket, with a failure injected at every point."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeEngine, FakeModel, FakeWorker, as_loaded, parameters_of, write_checkpoint
from training import Training, pointed_to

from delta_wire.acks import Ack
from delta_wire.anchors import stream_anchor
from delta_wire.bucket import BucketReader
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.errors import RateLimitedError, SetupError, StoreUnavailableError, UnsupportedFormatError
from delta_wire.manifest import AnchorPart, Manifest, ObjectRef, Pointer, manifest_key
from delta_wire.replay import checkout
from delta_wire.stores import open_store
from vllm_delta.commit import Coordinator
from vllm_delta.engine import EngineStopped
from vllm_delta.pace import Pace
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.subscriber import Subscriber

Reply = dict[str, Any]


class Server:
    """A coordinator over fake workers, and the run that it follows."""

    def __init__(self, folder: Path, ranks: int = 2, model: Any = FakeModel, **settings: Any):
        self.training = Training(write_checkpoint(folder / "base"), folder / "bucket", changed_frac=0.1)
        (folder / "stage").mkdir(exist_ok=True)
        self.settings = Settings(str(folder / "bucket"), stage_dir=folder / "stage", server_id="one", **settings)
        self.engine = FakeEngine([FakeWorker(self.training.base, rank, ranks, model) for rank in range(ranks)])
        self.subscriber = Subscriber(self.settings.bucket, self.settings.stage_dir)
        self.coordinator = Coordinator(
            self.engine, Ranks(self.engine), self.subscriber, self.settings, lambda: self.training.base
        )

    def step(self) -> dict[str, Any]:
        self.coordinator.step()
        status = self.coordinator.status.to_json()
        json.dumps(status)
        return status

    def weights(self) -> list[dict[str, list[int]]]:
        return [parameters_of(worker.model) for worker in self.engine.workers]

    def loaded(self) -> list[dict[str, list[int]]]:
        """The weights of servers that loaded the trainer's newest state in full."""
        ranks = len(self.engine.workers)
        return [parameters_of(as_loaded(self.training.bits, rank, ranks)) for rank in range(ranks)]

    def ack(self) -> Ack:
        path = self.training.bucket / "acks" / "one.json"
        return Ack.from_bytes(path.read_bytes(), str(path))

    def staged_files(self) -> list[Path]:
        return [path for path in self.settings.stage_dir.rglob("*") if path.is_file()]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


@pytest.fixture
def following(server: Server) -> Server:
    server.writer = server.training.start()  # type: ignore[attr-defined]
    assert server.step()["state"] == "serving"
    return server


def publish(server: Server, encoding: str = "plain") -> Manifest:
    return server.training.publish(server.writer, encoding)  # type: ignore[attr-defined]


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


def test_another_base_is_refused_with_both_digests(server: Server, tmp_path: Path):
    before = server.weights()
    other = Training(write_checkpoint(tmp_path / "other", seed=1), server.training.bucket)
    writer = other.start()
    status = server.step()
    assert status["state"] == "degraded" and "another base" in status["reason"]
    assert str(server.training.digest) in status["reason"] and str(other.digest) in status["reason"]
    other.publish(writer)
    assert server.step()["state"] == "degraded"
    assert server.weights() == before and server.engine.label == "default"
    assert server.ack().state == "degraded" and server.ack().version is None


def test_another_model_is_refused_with_names(server: Server, tmp_path: Path):
    import numpy as np

    from delta_wire.container import write_tensors

    folder = tmp_path / "other"
    folder.mkdir()
    write_tensors(folder / "model.safetensors", {"other": ("BF16", (3,), np.zeros(3, np.uint16))}, {"format": "pt"})
    Training(folder, server.training.bucket).start()
    status = server.step()
    assert status["state"] == "degraded"
    assert "not the model" in status["reason"] and "norm.weight" in status["reason"] and "other" in status["reason"]


def test_a_layout_that_cannot_be_patched_is_refused_for_good(tmp_path: Path):
    class Repacked(FakeModel):
        def load_weights(self, weights: Any) -> None:
            super().load_weights(weights)
            # what a kernel that wants another order does after loading
            self.down.data.copy_(self.down.data.flip(0))

    server = Server(tmp_path, 1, Repacked)
    server.training.start()
    before = server.weights()
    status = server.step()
    assert status["state"] == "degraded" and "(into down)" in status["reason"]
    assert server.step()["commits"] == 0 and server.weights() == before
    answer = server.coordinator.verify()
    server.step()
    assert "(into down)" in answer.result(0)["error"]


def test_samples_refuse_what_the_trace_cannot_see(tmp_path: Path):
    server = Server(tmp_path, 2)
    server.training.start()
    for worker in server.engine.workers:
        worker.model.down.data.copy_(worker.model.down.data.flip(0))
    status = server.step()
    assert status["state"] == "degraded"
    assert "down.weight" in status["reason"] and "samples" in status["reason"]


# -- failures of a commit ---------------------------------------------------------------------------------------


def on_rank(rank: int, change: Callable[[Callable[[], Reply]], Reply]) -> Callable[..., Reply]:
    return lambda at, call: change(call) if at == rank else call()


def refuses(call: Callable[[], Reply]) -> Reply:
    return {"error": "out of memory", "kind": "OutOfMemoryError"}


def writes_then_fails(call: Callable[[], Reply]) -> Reply:
    call()
    return {"error": "the device fell off the bus", "kind": "RuntimeError"}


def miscounts(call: Callable[[], Reply]) -> Reply:
    reply = call()
    at = next(iter(reply["lanes"]))
    return reply | {"lanes": reply["lanes"] | {at: (1, 2)}}


def forgets(call: Callable[[], Reply]) -> Reply:
    return call() | {"lanes": {}}


def raises(call: Callable[[], Reply]) -> Reply:
    raise RuntimeError("executor failed")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", [refuses, writes_then_fails, miscounts, forgets, raises])
def test_a_failing_commit_is_undone_on_all_ranks(
    following: Server, rank: int, fault: Callable[[Callable[[], Reply]], Reply]
):
    publish(following)
    following.step()
    label, before = following.engine.label, following.weights()
    manifest = publish(following)
    following.engine.hooks["delta_commit"] = on_rank(rank, fault)
    status = following.step()
    assert (status["state"], status["seq"], status["commits"]) == ("degraded", 1, 1)
    assert str(manifest.version) in status["reason"]
    assert status["refused"][-1]["object"] == str(manifest.version)
    told = status["refused"][-1]["rank"]
    # a sum that is wrong has no rank, nor has a failing executor
    assert told == (rank if fault in (refuses, writes_then_fails) else None)
    assert [entry["refused"] for entry in status["ranks"]] == [
        [status["refused"][-1]] if at == told else [] for at in range(2)
    ]
    assert following.weights() == before
    assert following.engine.label == label and not following.engine.paused
    assert following.ack().state == "degraded" and following.ack().reason == status["reason"]
    del following.engine.hooks["delta_commit"]
    status = following.step()
    assert (status["state"], status["seq"]) == ("serving", 2)
    assert following.weights() == following.loaded()


def test_a_failing_cache_policy_undoes_the_commit(following: Server):
    before, label = following.weights(), following.engine.label
    publish(following)
    following.engine.cache_error = RuntimeError("blocks are still in use")
    status = following.step()
    assert status["state"] == "degraded" and "blocks are still in use" in status["reason"]
    assert following.weights() == before and following.engine.label == label
    following.engine.cache_error = None
    assert following.step()["seq"] == 1


@pytest.mark.parametrize("method", ["delta_submit", "delta_poll", "delta_release"])
def test_failures_beside_the_commit_change_nothing_or_all(following: Server, method: str):
    before = following.weights()
    publish(following)
    following.engine.hooks[method] = on_rank(1, refuses)
    status = following.step()
    assert status["state"] == "degraded"
    done = method == "delta_release"
    assert following.weights() == (following.loaded() if done else before)
    assert status["seq"] == (1 if done else 0)
    del following.engine.hooks[method]
    assert following.step()["state"] == "serving"
    assert following.weights() == following.loaded()


def test_a_staging_folder_that_cannot_be_cleared_does_not_hide_the_commit(
    following: Server, monkeypatch: pytest.MonkeyPatch
):
    def broken() -> None:
        raise OSError("read-only file system")

    publish(following)
    with monkeypatch.context() as patch:
        patch.setattr(following.subscriber, "clear", broken)
        status = following.step()
    assert (status["state"], status["seq"]) == ("degraded", 1) and "read-only" in status["reason"]
    assert following.weights() == following.loaded()
    publish(following)
    assert following.step()["seq"] == 2


def breaks_a_weight(server: Server) -> Callable[[int, Callable[[], Reply]], Reply]:
    def undo(rank: int, call: Callable[[], Reply]) -> Reply:
        reply = call()
        server.engine.workers[rank].model.flip("norm")
        return reply

    return undo


@pytest.mark.parametrize("how", ["says so", "is found out"])
def test_without_a_proven_undo_generation_is_held_until_resync(following: Server, how: str):
    publish(following)
    following.step()
    publish(following)
    engine = following.engine
    between_steps, ended = engine.between_steps, []

    def watched(action: Callable[[], Any]) -> Any:
        result = between_steps(action)
        ended.append((getattr(result, "state", None), engine.paused))
        return result

    engine.between_steps = watched
    engine.hooks["delta_commit"] = on_rank(1, writes_then_fails)
    if how == "says so":
        engine.hooks["delta_undo"] = on_rank(0, lambda call: {"restored": False})
    else:
        engine.hooks["delta_undo"] = breaks_a_weight(following)
    assert following.coordinator.step() == 0.0, "recovery has to begin at once"
    # not one step runs between the failure and what follows from it
    assert how == "is found out" or ("unproven", True) in ended
    status = following.coordinator.status.to_json()
    assert engine.paused and status["state"] == "degraded"

    # the way back fails as well: nothing is generated
    status = following.step()
    assert engine.paused and "generation is paused" in status["reason"]

    engine.hooks.clear()
    status = following.step()
    assert not engine.paused and (status["state"], status["seq"]) == ("serving", 2)
    assert following.weights() == following.loaded()
    assert ("reset", f"{status['version'][:-2]}-0") in engine.renewed


def test_resync_from_the_anchor_when_the_served_folder_is_gone(following: Server, tmp_path: Path):
    publish(following)
    following.step()
    shutil.move(following.training.base, tmp_path / "moved")
    rewrite_latest(
        following, lambda manifest: replace(manifest, anchor=AnchorPart(str(checked_out(following, tmp_path))))
    )
    publish_after_rewrite(following)
    following.engine.workers[0].model.flip("norm")
    answer = following.coordinator.verify()
    following.step()
    assert answer.result(0)["equal"] is False and following.engine.paused
    status = following.step()
    assert not following.engine.paused and status["state"] == "serving"
    assert following.weights() == following.loaded()


def checked_out(server: Server, tmp_path: Path) -> Path:
    return checkout(
        BucketReader(open_store(server.training.bucket)),
        pointed_to(server.training.bucket),
        tmp_path / "anchor",
        base_folder=tmp_path / "moved" if (tmp_path / "moved").exists() else None,
    )


def rewrite_latest(server: Server, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Replace the newest manifest, as no honest trainer does."""
    import hashlib

    manifest = change(pointed_to(server.training.bucket))
    raw, key = manifest.to_bytes(), manifest_key(manifest.version.seq)
    target = server.training.bucket / key
    target.unlink(missing_ok=True)
    target.write_bytes(raw)
    pointer = Pointer(manifest.version, ObjectRef(key, len(raw), hashlib.sha256(raw).hexdigest()))
    (server.training.bucket / "LATEST").write_bytes(pointer.to_bytes())
    return manifest


def publish_after_rewrite(server: Server) -> Manifest:
    server.writer = server.training.start()  # type: ignore[attr-defined]
    return publish(server)


# -- chains, anchors, forks -------------------------------------------------------------------------------------


def test_a_delta_that_is_not_the_announced_one_is_refused_before_anything_is_written(following: Server):
    before = following.weights()
    publish(following)
    wrong = rewrite_latest(following, lambda m: replace(m, digest=m.digest + Digest(1, 1)))
    following.engine.hooks["delta_commit"] = raises
    for _ in range(2):
        status = following.step()
        assert status["state"] == "degraded" and str(wrong.digest) in status["reason"]
    assert following.weights() == before


def test_a_later_anchor_leads_past_a_delta_that_cannot_be_used(following: Server, tmp_path: Path):
    bad = publish(following)
    rewrite_latest(
        following, lambda manifest: replace(manifest, anchor=AnchorPart(str(checked_out(following, tmp_path))))
    )
    assert bad.delta is not None
    (following.training.bucket / bad.delta.objects[0].key).write_bytes(b"torn")
    status = following.step()
    assert status["state"] == "degraded" and bad.delta.objects[0].key in status["reason"]
    status = following.step()
    assert (status["state"], status["seq"]) == ("serving", 1)
    assert following.weights() == following.loaded()


def lose_a_manifest(server: Server, manifest: Manifest) -> None:
    (server.training.bucket / manifest_key(manifest.version.seq)).unlink()


def tear_a_manifest(server: Server, manifest: Manifest) -> None:
    (server.training.bucket / manifest_key(manifest.version.seq)).write_bytes(b"torn")


def lose_a_delta(server: Server, manifest: Manifest) -> None:
    assert manifest.delta is not None
    (server.training.bucket / manifest.delta.objects[0].key).unlink()


def tear_a_delta(server: Server, manifest: Manifest) -> None:
    assert manifest.delta is not None
    (server.training.bucket / manifest.delta.objects[0].key).write_bytes(b"torn")


def steps_until(server: Server, key: str, most: int = 12) -> dict[str, Any]:
    status = {}
    for _ in range(most):
        status = server.step()
        if status[key]:
            break
    return status


def publish_anchor(server: Server) -> Manifest:
    """A version with an anchor of its own."""
    delta = server.training.change()
    writer = server.writer  # type: ignore[attr-defined]
    table = server.training.table
    anchor = stream_anchor(
        writer.store,
        table,
        lambda name: server.training.bits[name].reshape(table[name].shape),
        seq=writer.next_seq,
        digest=server.training.digest,
        files=server.training.base,
    )
    return writer.publish(delta, digest=server.training.digest, step=None, anchor=anchor).manifest


@pytest.mark.parametrize(
    ("lose", "at_once"), [(lose_a_manifest, True), (tear_a_manifest, False)], ids=["shortened", "torn"]
)
def test_a_later_anchor_leads_past_a_manifest_that_cannot_be_read(
    following: Server, lose: Callable[[Server, Manifest], None], at_once: bool
):
    first = publish(following)
    publish_anchor(following)
    publish(following)
    lose(following, first)
    status = following.step()
    if not at_once:
        # what is torn may be whole at the next look
        assert status["state"] == "degraded" and manifest_key(1) in status["reason"]
        status = following.step()
    assert (status["state"], status["seq"], status["commits"]) == ("serving", 3, 2)
    assert following.weights() == following.loaded()


@pytest.mark.parametrize("lose", [lose_a_manifest, tear_a_manifest, lose_a_delta, tear_a_delta])
def test_what_is_lost_for_good_makes_the_server_ask_for_an_anchor(
    following: Server, lose: Callable[[Server, Manifest], None]
):
    lost = publish(following)
    publish(following)
    lose(following, lost)
    # a bad moment is not for good
    for _ in range(3):
        status = following.step()
        assert status["state"] == "degraded" and status["needs_anchor"] is None
    newest = publish(following)
    status = following.step()
    assert status["needs_anchor"] == str(newest.version)
    assert "the trainer is asked for one in acks/one.json" in status["reason"]
    assert following.ack().needs_anchor == newest.version
    # the request stays what it is while versions go on
    publish(following)
    assert following.step()["needs_anchor"] == str(newest.version)
    before = following.weights()

    # an anchor that is lost as well is not what was asked for: another one is
    useless = publish_anchor(following)
    assert useless.anchor is not None
    (following.training.bucket / useless.anchor.objects[0].key).unlink()
    following.step()
    status = steps_until(following, "needs_anchor")
    assert status["needs_anchor"] == str(useless.version) and status["seq"] == 0
    assert following.weights() == before

    publish_anchor(following)
    publish(following)
    for _ in range(2):
        status = following.step()
    assert (status["state"], status["needs_anchor"], status["lag_versions"]) == ("serving", None, 0)
    assert following.weights() == following.loaded()
    assert following.ack().needs_anchor is None


def test_only_what_an_anchor_would_mend_asks_for_one(following: Server, monkeypatch: pytest.MonkeyPatch):
    def refuse(error: Exception) -> Callable[..., None]:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise error

        return fail

    publish(following)
    for error in (StoreUnavailableError("away"), UnsupportedFormatError("newer"), SetupError("no room")):
        with monkeypatch.context() as patch:
            patch.setattr(following.subscriber, "stage", refuse(error))
            for _ in range(8):
                status = following.step()
        assert status["state"] == "degraded" and status["needs_anchor"] is None
    # a rank that cannot read its file, and a commit that fails
    for hook, fault in (("delta_poll", refuses), ("delta_commit", refuses)):
        following.engine.hooks[hook] = on_rank(1, lambda call, fault=fault: fault(call) | {"kind": "FormatError"})
        for _ in range(8):
            assert following.step()["needs_anchor"] is None
        following.engine.hooks.clear()
    assert following.step()["state"] == "serving"


def test_a_version_that_is_not_the_announced_one_needs_an_anchor(following: Server):
    publish(following)
    wrong = rewrite_latest(following, lambda m: replace(m, digest=m.digest + Digest(1, 1)))
    assert steps_until(following, "needs_anchor")["needs_anchor"] == str(wrong.version)


def test_without_acks_nobody_is_asked(tmp_path: Path):
    server = Server(tmp_path, ack=False)
    server.writer = server.training.start()  # type: ignore[attr-defined]
    server.step()
    lose_a_delta(server, publish(server))
    status = steps_until(server, "needs_anchor")
    assert status["needs_anchor"] and "DELTA_SYNC_ACK is 0" in status["reason"]


def test_a_new_run_from_the_loaded_checkpoint_is_followed_in_the_place_of_the_old_one(following: Server):
    publish(following)
    following.step()
    shutil.rmtree(following.training.bucket)
    assert following.step()["state"] == "degraded"
    other = Training(following.training.base, following.training.bucket, seed=5)
    writer = other.start()
    for encoding in ("context", "packed"):
        other.publish(writer, encoding)
        following.training = other
        status = following.step()
        assert (status["state"], status["version"]) == ("serving", str(writer.version))
        assert following.weights() == following.loaded()


def test_a_new_run_from_another_base_is_refused_as_it_is_at_the_start(following: Server, tmp_path: Path):
    publish(following)
    served = following.step()
    before = following.weights()
    shutil.rmtree(following.training.bucket)
    other = Training(write_checkpoint(tmp_path / "other", seed=5), following.training.bucket)
    other.start()
    for _ in range(3):
        status = following.step()
        assert (status["state"], status["version"]) == ("degraded", served["version"])
    assert "another base" in status["reason"] and str(other.digest) in status["reason"]
    assert following.weights() == before and not following.engine.paused


def test_a_rewritten_version_and_a_fork_are_refused(following: Server, tmp_path: Path):
    shutil.copytree(following.training.bucket, tmp_path / "fork")
    publish(following)
    following.step()
    before = following.weights()
    fork = Training(following.training.base, tmp_path / "fork", seed=9, changed_frac=0.1)
    writer = fork.start()
    fork.publish(writer)
    for name in ("rewrites", "forks"):
        shutil.rmtree(following.training.bucket)
        shutil.copytree(fork.bucket, following.training.bucket)
        status = following.step()
        assert status["state"] == "degraded", name
        assert ("versions never change" in status["reason"]) == (name == "rewrites")
        assert ("two trainers" in status["reason"]) == (name == "forks")
        fork.publish(writer)
    assert following.weights() == before


# -- verification, acks, stopping -------------------------------------------------------------------------------


def test_verification_reads_all_live_weights(following: Server):
    publish(following)
    answers = [following.coordinator.verify() for _ in range(2)]
    assert following.coordinator.wake.is_set()
    following.step()
    for answer in answers:
        result = answer.result(0)
        assert result["equal"] and result["ranks"] == 2
        assert result["num_params"] == following.training.table.num_params
        assert result["tensors"].keys() == following.training.table.keys()
    following.engine.workers[1].model.flip("o")
    answer = following.coordinator.verify()
    following.step()
    result = answer.result(0)
    assert not result["equal"] and result["digest"] != result["expected"]
    assert following.engine.paused
    status = following.step()
    assert status["state"] == "serving" and not following.engine.paused
    assert following.weights() == following.loaded()


def test_only_a_verification_leaves_time_to_the_engine(following: Server, monkeypatch: pytest.MonkeyPatch):
    shares: list[float] = []

    class Counted(Pace):
        def __init__(self, share_frac: float = 1.0):
            shares.append(share_frac)
            super().__init__(share_frac)

    monkeypatch.setattr("vllm_delta.pace.Pace", Counted)
    answer = following.coordinator.verify()
    following.step()
    assert answer.result(0)["equal"] and shares == [following.settings.verify_frac] * 2
    # while generation is held, nobody needs the time
    following.engine.between_steps(lambda: following.coordinator.suspect("a test"))
    following.step()
    assert shares[2:] == [1.0] * 2 and not following.engine.paused


def test_what_is_written_beside_the_bits_of_a_float32_is_found_and_healed(following: Server):
    publish(following)
    following.step()
    before = following.weights()
    # the lowest bit of a float32 that holds a bf16 value, on both ranks alike
    for worker in following.engine.workers:
        worker.model.flip("router")
    answer = following.coordinator.verify()
    following.step()
    assert not answer.result(0)["equal"] and "no bf16 values" in answer.result(0)["problem"]
    assert following.engine.paused
    assert following.step()["state"] == "serving" and following.weights() == before


def foreign_reload(server: Server) -> None:
    """Something else loads the base checkpoint over what is served, as vLLM's own reload does."""
    for rank, worker in enumerate(server.engine.workers):
        base = as_loaded(
            {n: Checkpoint(server.training.base).bits(n) for n in server.training.table},
            rank,
            len(server.engine.workers),
        )
        worker.model.load_state_dict(base.state_dict())


def test_a_suspicion_holds_generation_until_the_weights_are_proven(following: Server):
    publish(following)
    served = following.step()
    weights = following.weights()
    following.engine.between_steps(lambda: following.coordinator.suspect("a test"))
    assert following.engine.paused
    assert following.step() == served and not following.engine.paused

    foreign_reload(following)
    following.engine.between_steps(lambda: following.coordinator.suspect("a reload"))
    degraded = following.step()
    assert degraded["state"] == "degraded" and "a reload" in degraded["reason"] and following.engine.paused
    healed = following.step()
    assert (healed["state"], healed["version"], healed["digest"]) == ("serving", served["version"], served["digest"])
    assert following.weights() == weights and not following.engine.paused
    assert following.engine.label == served["version"]


def test_a_suspicion_during_the_proof_is_not_overlooked(following: Server):
    publish(following)
    following.step()
    following.engine.between_steps(lambda: following.coordinator.suspect("the first"))

    def write_later(rank: int, call: Callable[[], Reply]) -> Reply:
        reply = call()
        if not reply.get("pending") and rank == 1 and following.engine.hooks.pop("delta_poll", None):
            foreign_reload(following)
            following.coordinator.suspect("the second")
        return reply

    following.engine.hooks["delta_poll"] = write_later
    following.step()
    assert following.engine.paused
    assert "the second" in following.step()["reason"] and following.engine.paused
    assert following.step()["state"] == "serving" and not following.engine.paused
    assert following.weights() == following.loaded()


@pytest.mark.parametrize("suspected", [False, True])
def test_weights_written_by_something_else_are_noticed_by_the_next_version(following: Server, suspected: bool):
    publish(following)
    following.step()
    foreign_reload(following)
    manifest = publish(following)
    if suspected:
        following.engine.between_steps(lambda: following.coordinator.suspect("a reload"))
    noticed = following.step()
    assert noticed["state"] == "degraded" and following.engine.paused
    healed = following.step()
    assert healed["state"] == "serving" and healed["version"] == str(manifest.version) == following.engine.label
    assert following.weights() == following.loaded() and not following.engine.paused


def test_ranks_that_disagree_about_a_shared_block_are_found(following: Server):
    following.engine.workers[1].model.flip("norm")
    answer = following.coordinator.verify()
    following.step()
    assert not answer.result(0)["equal"] and "norm.weight" in answer.result(0)["problem"]


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
