# SPDX-License-Identifier: Apache-2.0
"""Live weights that something else may have written: found, held back, healed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_server import as_loaded
from followed_run import Reply, Server, publish

from delta_wire.checkpoint import Checkpoint
from vllm_delta.pace import Pace


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
