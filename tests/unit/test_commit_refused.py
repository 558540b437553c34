# SPDX-License-Identifier: Apache-2.0
"""What a server does not follow: other weights, other models, layouts that it cannot patch, rewritten runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_server import FakeModel, write_checkpoint
from followed_run import Server, publish, raises, rewrite_latest
from training import Training

from delta_wire.digest import Digest


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


def test_a_delta_that_is_not_the_announced_one_is_refused_before_anything_is_written(following: Server):
    before = following.weights()
    publish(following)
    wrong = rewrite_latest(following, lambda m: replace(m, digest=m.digest + Digest(1, 1)))
    following.engine.hooks["delta_commit"] = raises
    for _ in range(2):
        status = following.step()
        assert status["state"] == "degraded" and str(wrong.digest) in status["reason"]
    assert following.weights() == before


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
