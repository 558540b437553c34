# SPDX-License-Identifier: Apache-2.0
"""Training on several processes: the union of what they publish is what one process would, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
from rank_programs import (
    begin_without_a_checkpoint,
    carry_on,
    load,
    lose_a_rank,
    make_model,
    run_ranks,
    train,
    train_with_trainer,
)
from same_run import assert_same_run, reader_of

from delta_wire.checkpoint import Checkpoint
from delta_wire.replay import checkout, materialise, verify

STEPS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("count", "kind", "encoding"),
    [
        (2, "fsdp2", "context"),
        (4, "fsdp2", "packed"),
        (4, "hsdp", "plain"),
        (2, "ddp", "packed"),
        (4, "ddp", "context"),
    ],
)
def test_the_union_of_all_parts_is_the_delta_of_one_process(
    base: Path, tmp_path: Path, count: int, kind: str, encoding: str
):
    results = run_ranks(count, train, str(base), str(tmp_path), kind, encoding, STEPS)
    assert [result["versions"] for result in results] == [[1, 2, 3]] * count
    assert all(result["finished"] for result in results)
    sharded = reader_of(tmp_path / "sharded")
    assert assert_same_run(sharded, reader_of(tmp_path / "single"), tmp_path) == [count] * STEPS
    latest = sharded.latest()
    assert latest is not None and all(check.ok for check in verify(sharded))
    checkout(sharded, latest, tmp_path / "out")
    # two bytes a parameter over all processes, nothing twice
    assert sum(result["held_bytes"] for result in results) == sharded.table(latest).full_bytes


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.matrix), 4])
def test_a_real_trainer_publishes_the_same_run_on_one_process_and_under_fsdp2(base: Path, tmp_path: Path, count: int):
    """transformers, accelerate and FSDP2 on gloo, configured as users do, against the same training on one process."""
    (alone,) = run_ranks(1, train_with_trainer, str(base), str(tmp_path), STEPS)
    results = run_ranks(count, train_with_trainer, str(base), str(tmp_path), STEPS)
    assert [result["versions"] for result in (alone, *results)] == [[1, 2, 3]] * (count + 1)
    assert alone["sharded_params"] == 0 and all(result["sharded_params"] == 20 for result in results)
    assert (
        assert_same_run(reader_of(tmp_path / "sharded"), reader_of(tmp_path / "single"), tmp_path) == [count] * STEPS
    )
    assert results[0]["logged"] == [1, 2, 3]


def test_anchors_are_made_without_the_weights(base: Path, tmp_path: Path):
    """Out of the bucket: the first from the checkpoint that training began with, the second from the first."""
    before = Checkpoint(base).digest()
    results = run_ranks(2, train, str(base), str(tmp_path), "fsdp2", "context", 4, 0.01)
    assert all(result["finished"] and result["left_no_files"] for result in results)
    sharded, single = reader_of(tmp_path / "sharded"), reader_of(tmp_path / "single")
    assert assert_same_run(sharded, single, tmp_path) == [2] * 4
    anchored = [manifest for seq in (2, 4) if (manifest := sharded.manifest(seq)).anchor is not None]
    assert len(anchored) == 2
    for manifest in anchored:
        folder = sharded.fetch_anchor(manifest, tmp_path / f"anchor-{manifest.version.seq}")
        found = Checkpoint(folder)
        assert found.digest() == manifest.digest
        with materialise(single, single.manifest(manifest.version.seq)) as state:
            for name in state.table:
                assert np.array_equal(found.bits(name), state.bits(name)), name
        assert load(folder).config.hidden_size == 36
    assert all(check.ok for check in verify(sharded))
    assert Checkpoint(base).digest() == before


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_dies_costs_a_version_and_hangs_nobody(base: Path, tmp_path: Path, lost: int):
    bucket = tmp_path / "bucket"
    results = run_ranks(3, lose_a_rank, str(base), str(bucket), lost, died=(lost,))
    survivors = [result for rank, result in enumerate(results) if rank != lost]
    assert results[lost] is None and len(survivors) == 2
    for result in survivors:
        # two seconds are the bound for the bucket, five for the others to take their leave
        assert not result["finished"] and result["finish_s"] < 60 and result["step_s"] < 60
    reader = reader_of(bucket)
    latest = reader.latest()
    assert latest is not None and latest.version.seq == 1
    # started again, the next version has it all
    checkpoint = checkout(reader, latest, tmp_path / "checkpoint")
    run_ranks(2, carry_on, str(checkpoint), str(bucket), str(base))
    latest = reader_of(bucket).latest()
    assert latest is not None and (latest.version.epoch, latest.version.seq) == (2, 2)
    assert all(check.ok for check in verify(reader_of(bucket)))


def test_weights_without_a_checkpoint_and_a_rank_that_cannot_start(base: Path, tmp_path: Path):
    bucket = tmp_path / "bucket"
    told = run_ranks(2, begin_without_a_checkpoint, str(base), str(bucket))
    latest = reader_of(bucket).latest()
    assert latest is not None and latest.version.seq == 0 and latest.anchor is not None and latest.anchor.objects
    model = load(checkout(reader_of(bucket), latest, tmp_path / "out"))
    assert sum(param.numel() for param in model.parameters()) == latest.num_params
    assert all("RankError" in reason or "ModelMismatchError" in reason for reason in told)
    assert not (tmp_path / "bucket-refused" / "LATEST").exists()
