# SPDX-License-Identifier: Apache-2.0
"""Adapters trained on several processes, merged and by themselves: what they publish together is what one process
would, bit for bit, and the base stays where it is."""

from pathlib import Path

import pytest
from rank_adapters import adapt, train_adapter
from rank_programs import make_model, run_ranks, train_with_trainer
from same_run import assert_same_run, reader_of

from delta_wire.checkpoint import Checkpoint
from delta_wire.replay import verify
from trl_delta import DeltaSyncConfig

STEPS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.mark.parametrize(
    ("count", "kind", "dora"),
    [
        (2, "ddp", False),
        (2, "fsdp2", False),
        pytest.param(2, "ddp", True, marks=pytest.mark.matrix),
        pytest.param(2, "fsdp2", True, marks=pytest.mark.matrix),
        pytest.param(4, "fsdp2", False, marks=pytest.mark.matrix),
    ],
)
def test_what_all_publish_is_what_one_process_would(base: Path, tmp_path: Path, count: int, kind: str, dora: bool):
    results = run_ranks(count, train_adapter, str(base), str(tmp_path), kind, STEPS, dora)
    for result in results:
        assert all(result["finished"]) and not result["moved"]
        assert (result["sharded"] > 0) == (kind == "fsdp2")
    for how in ("merged", "separate"):
        sharded, single = reader_of(tmp_path / how / "sharded"), reader_of(tmp_path / how / "single")
        last = single.latest()
        assert last is not None and last.step == STEPS
        # some rows of some tensors have not changed, but every process has published
        assert assert_same_run(sharded, single, tmp_path, until=last.version.seq) == [count] * STEPS
        assert all(check.ok for check in verify(sharded))
    described = {name: reader_of(tmp_path / "separate" / name).manifest(1).adapter for name in ("sharded", "single")}
    assert described["sharded"] == described["single"]
    assert described["sharded"] is not None and described["sharded"].base_digest == Checkpoint(base).digest()
    # an anchor was made out of the bucket, and a resume from an older checkpoint goes on with the run
    latest = reader_of(tmp_path / "separate" / "sharded").latest()
    assert latest is not None and (latest.version.epoch, latest.version.seq) == (2, STEPS + 1)
    assert latest.digest == reader_of(tmp_path / "separate" / "single").manifest(STEPS - 1).digest
    walked = reader_of(tmp_path / "separate" / "sharded").walk(latest)
    assert any(manifest.anchor is not None and manifest.version.seq for manifest in walked)


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["merged", "separate"])
def test_a_real_trainer_publishes_the_same_run_on_one_process_and_under_fsdp2(base: Path, tmp_path: Path, how: str):
    """transformers, accelerate and PEFT, configured as users do."""
    arguments = (train_with_trainer, str(base), str(tmp_path), STEPS, adapt, DeltaSyncConfig(delta_sync_adapter=how))
    (alone,) = run_ranks(1, *arguments)
    results = run_ranks(2, *arguments)
    assert [result["versions"] for result in (alone, *results)] == [[1, 2, 3]] * 3
    assert alone["sharded_params"] == 0 and all(result["sharded_params"] > 20 for result in results)
    assert assert_same_run(reader_of(tmp_path / "sharded"), reader_of(tmp_path / "single"), tmp_path) == [2] * STEPS
