# SPDX-License-Identifier: Apache-2.0
"""One of several processes fails at any place where others may wait for it: training goes on, or all end together."""

from pathlib import Path

import pytest
from rank_failures import LOOKS, STARTS, answer_a_request, fail_and_stop, fail_at_steps, fail_at_the_start
from rank_programs import make_model, run_ranks
from same_run import assert_same_run, reader_of

from delta_wire.checkpoint import Checkpoint
from delta_wire.replay import verify


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        (2, "fsdp2"),
        pytest.param(2, "ddp", marks=pytest.mark.matrix),
        pytest.param(3, "fsdp2", marks=pytest.mark.matrix),
    ],
)
def test_a_look_at_the_weights_that_fails_costs_a_version_and_the_next_contains_it(
    base: Path, tmp_path: Path, count: int, kind: str
):
    results = run_ranks(count, fail_at_steps, str(base), str(tmp_path), kind)
    plan = results[0]["plan"]
    assert len({failure for failure in plan if failure}) == (len(LOOKS) if kind == "fsdp2" else 3) * count
    # a version of every other step
    for result in results:
        assert result["seqs"] == [sum(failure is None for failure in plan[: step + 1]) for step in range(len(plan))]
        assert result["finished"] is False
    sharded = reader_of(tmp_path / "sharded")
    assert_same_run(sharded, reader_of(tmp_path / "single"), tmp_path)
    assert all(check.ok for check in verify(sharded))
    # on the first process, once for each time that it begins, with the process and the reason
    told = [line for line in results[0]["told"] if "could not be looked at and are not published" in line]
    begun = [step for step, failure in enumerate(plan) if failure and not plan[step - 1]]
    assert len(told) == len(begun) + 1
    for line, failing in zip(told, [*(plan[step][1] for step in begun), 1], strict=True):
        assert f"rank {failing}: no memory left" in line
    assert not any("could not be looked at and are not" in line for result in results[1:] for line in result["told"])
    assert all("its last weights could not be looked at" in result["told"][-1] for result in results)


def test_the_policy_to_stop_ends_all_processes_after_the_same_step(base: Path, tmp_path: Path):
    first, second = run_ranks(2, fail_and_stop, str(base), str(tmp_path / "bucket"), "fsdp2")
    step, _, reason = second.partition(": ")
    assert reason == "Broken: no memory left"
    assert first == f"{step}: RankError: rank 1: no memory left"


def test_a_process_that_cannot_start_ends_all_with_its_reason(base: Path, tmp_path: Path):
    results = run_ranks(2, fail_at_the_start, str(base), str(tmp_path), "fsdp2")
    assert {place for place, _, _ in results[0]} == set(STARTS)
    for ours, theirs in zip(*results, strict=True):
        assert ours[:2] == theirs[:2]
        reasons = (ours[2], theirs[2])
        assert reasons[ours[1]] == "Broken: no memory left", ours
        assert reasons[1 - ours[1]].startswith("RankError: "), ours


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("fsdp2", ""),
        pytest.param("ddp", "", marks=pytest.mark.matrix),
        pytest.param("fsdp2", "merged", marks=pytest.mark.matrix),
        pytest.param("fsdp2", "separate", marks=pytest.mark.matrix),
    ],
)
def test_a_server_that_is_cut_off_gets_an_anchor_of_what_the_processes_remember(
    base: Path, tmp_path: Path, kind: str, how: str
):
    bucket = tmp_path / "bucket"
    results = run_ranks(2, answer_a_request, str(base), str(bucket), kind, how)
    assert [result["finished"] for result in results] == [True, True]
    assert results[0]["anchored"] == results[1]["anchored"] > 4
    first, second = results
    assert any("gets an anchor, because server server cannot get past version" in line for line in first["told"])
    assert len([line for line in second["told"] if "no room left" in line]) == 1
    # nothing is left of what was put together, and nothing was waited for that the bucket has lost
    assert not list((bucket / "anchors").glob("*-rows/*"))
    reader = reader_of(bucket)
    latest = reader.latest()
    assert latest is not None and latest.version.seq > first["anchored"]
    anchored = reader.manifest(first["anchored"])
    folder = reader.fetch_anchor(anchored, tmp_path / "anchor")
    assert Checkpoint(folder).digest() == anchored.digest
    assert (folder / ("adapter_config.json" if how == "separate" else "config.json")).is_file()
    checks = {check.seq: check for check in verify(reader)}
    assert not checks[2].ok and not checks[first["anchored"] - 1].ok
    assert checks[first["anchored"]].ok and checks[latest.version.seq].ok
