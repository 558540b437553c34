# SPDX-License-Identifier: Apache-2.0
"""TRL's real trainers on two processes, with a stub for the server: weights travel through the bucket only."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rank_programs import run_ranks
from rank_trainers import STEPS, async_grpo, grpo
from stub_server import Acker, StubServer
from training import pointed_to

from delta_wire.bucket import BucketReader
from delta_wire.replay import verify
from delta_wire.stores import open_store


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubServer]:
    server = StubServer(tmp_path / "bucket")
    yield server
    server.close()


@pytest.fixture
def acker(tmp_path: Path) -> Iterator[Acker]:
    thread = Acker(tmp_path / "bucket", delay_s=0.1)
    thread.start()
    yield thread
    thread.stop.set()
    thread.join()


def assert_published(bucket: Path, results: list[dict], count: int) -> None:
    """The newest version is what every process holds, the last step's weights, made of a part of each."""
    latest = pointed_to(bucket)
    assert latest.step == STEPS and latest.delta is not None and len(latest.delta.objects) == count
    assert {(result["step"], result["digest"]) for result in results} == {(STEPS, str(latest.digest))}
    assert {result["durable"] for result in results} == {latest.version.seq}
    assert all(check.ok for check in verify(BucketReader(open_store(bucket))))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ddp", {}),
        # a generation between two cadences
        pytest.param("ddp", {"delta_sync_steps": 10}, marks=pytest.mark.matrix),
        ("fsdp2", {}),
    ],
)
def test_every_generation_has_the_weights_of_its_step(
    tiny_model: Callable[[str], Path], tmp_path: Path, stub: StubServer, kind: str, settings: dict
):
    results = run_ranks(2, grpo, str(tiny_model("qwen3")), str(tmp_path), stub.url, kind, settings)
    # one process asks for all, and only when the server serves the weights of the step
    assert stub.answered_with == list(range(STEPS))
    assert_published(tmp_path / "bucket", results, 2)
    assert [result["lines"] for result in results] == [STEPS, STEPS]


@pytest.mark.matrix
def test_no_server_that_follows_the_bucket_ends_all_processes(
    tiny_model: Callable[[str], Path], tmp_path: Path, stub: StubServer
):
    stub.stop_following()
    with pytest.raises(AssertionError, match=r"found none.*vllm_delta\.DeltaWorkerExtension"):
        run_ranks(
            2,
            grpo,
            str(tiny_model("qwen3")),
            str(tmp_path),
            stub.url,
            "ddp",
            {"delta_sync_start_timeout_s": 0.3},
        )


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("ddp", "merged"),
        pytest.param("ddp", "separate", marks=pytest.mark.matrix),
        pytest.param("fsdp2", "", marks=pytest.mark.matrix),
        pytest.param("fsdp2", "merged", marks=pytest.mark.matrix),
        pytest.param("fsdp2", "separate", marks=pytest.mark.matrix),
    ],
)
def test_async_grpo_labels_what_is_served(
    tiny_model: Callable[[str], Path], tmp_path: Path, acker: Acker, kind: str, adapter: str
):
    results = run_ranks(2, async_grpo, str(tiny_model("qwen3")), str(tmp_path), kind, adapter)
    assert_published(tmp_path / "bucket", results, 2)
    first, other = results
    # the rollouts begin after the server has acknowledged the base, and belong to the first process as in TRL
    assert first["began"] == 1 and first["told"][0] == 1 and first["model_version"] == STEPS + 1
    assert other["told"] is None
    # TRL's merging at every sync is left out on every process
    assert first["moved"] == other["moved"] == []
