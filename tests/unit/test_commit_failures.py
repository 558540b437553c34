# SPDX-License-Identifier: Apache-2.0
"""A failure at every point of a commit: undone on all ranks, or held until the weights are proven."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from followed_run import (
    Reply,
    Server,
    checked_out,
    forgets,
    miscounts,
    on_rank,
    publish,
    publish_after_rewrite,
    raises,
    refuses,
    rewrite_latest,
    writes_then_fails,
)

from delta_wire.manifest import AnchorPart


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
    # a failing executor has no rank
    assert told == (None if fault is raises else rank)
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
    ended.clear()
    status = following.step()
    assert not engine.paused and (status["state"], status["seq"]) == ("serving", 2)
    assert following.weights() == following.loaded()
    assert ("reset", f"{status['version'][:-2]}-0") in engine.renewed
    # nobody gets a token of the base that the way back went over
    assert [paused for state, paused in ended if state == "done"] == [True, True]


def test_what_is_written_back_counts_when_it_is_proven(following: Server):
    publish(following)
    following.step()
    engine = following.engine
    engine.workers[0].model.flip("norm")
    answer = following.coordinator.verify()
    following.step()
    assert not answer.result(0)["equal"] and engine.paused

    def spoiled(rank: int, call: Callable[[], Any]) -> Any:
        reply = call()
        engine.workers[rank].model.flip("o")
        return reply

    engine.hooks["delta_commit"] = spoiled
    status = following.step()
    assert engine.paused and "back the live weights have digest" in status["reason"]
    engine.hooks.clear()
    status = following.step()
    assert not engine.paused and (status["state"], status["seq"]) == ("serving", 1)
    assert following.weights() == following.loaded()


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
