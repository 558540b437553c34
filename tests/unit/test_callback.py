# SPDX-License-Identifier: Apache-2.0
"""The callback in a real `transformers.Trainer`: what the bucket holds afterwards is the trained model."""

import logging
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from delta_wire.acks import Ack
from delta_wire.bucket import BucketReader
from delta_wire.errors import BaseMismatchError, ModelMismatchError, SetupError, WriterConflictError
from delta_wire.replay import materialise, verify
from delta_wire.stores import open_store
from trl_delta import DeltaSyncCallback, DeltaSyncConfig, DeltaSyncSession

STEPS = 5


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def make_trainer(
    model: PreTrainedModel, tmp_path: Path, *callbacks: TrainerCallback, steps: int = STEPS, **kwargs
) -> Trainer:
    torch.manual_seed(0)
    rows = [{"input_ids": (ids := torch.randint(3, 500, (24,)).tolist()), "labels": ids} for _ in range(64)]
    args = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=2e-5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **kwargs,
    )
    return Trainer(model=model, args=args, train_dataset=rows, callbacks=list(callbacks))


def weights(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """bf16 bits by parameter name, by PyTorch's own conversion; tied parameters once."""
    return {
        name: param.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16).copy()
        for name, param in model.named_parameters()
    }


def reader_of(bucket: Path) -> BucketReader:
    return BucketReader(open_store(bucket))


def assert_bucket_holds(bucket: Path, model: PreTrainedModel) -> None:
    reader = reader_of(bucket)
    latest = reader.latest()
    assert latest is not None
    expected = weights(model)
    with materialise(reader, latest) as state:
        for name in reader.table(latest):
            assert np.array_equal(state.bits(name).reshape(-1), expected[name].reshape(-1)), name
    assert set(reader.table(latest)) == set(expected)


@pytest.mark.parametrize("kind", ["qwen3", "llama-tied"])
@pytest.mark.parametrize("encoding", ["packed", "context", "plain"])
def test_the_bucket_replays_to_the_trained_weights_bit_for_bit(tiny_model, tmp_path, kind, encoding):
    bucket = tmp_path / "bucket"
    model = load(tiny_model(kind))
    before = weights(model)
    callback = DeltaSyncCallback(str(bucket), DeltaSyncConfig(delta_sync_encoding=encoding))
    make_trainer(model, tmp_path, callback).train()
    assert_bucket_holds(bucket, model)
    after = weights(model)
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    first = reader_of(bucket).manifest(0)
    assert first.anchor is not None
    assert first.anchor.reference == str(tiny_model(kind))
    assert first.anchor.objects == ()
    assert reader_of(bucket).latest().step == STEPS


@pytest.mark.parametrize(
    ("dtype", "extra"),
    [("bfloat16", {}), ("float32", {"bf16": True}), ("float32", {"gradient_accumulation_steps": 2})],
)
def test_other_ways_of_training_are_published_as_well(tiny_model, tmp_path, dtype, extra):
    bucket = tmp_path / "bucket"
    model = load(tiny_model("qwen3-tied"), dtype)
    make_trainer(model, tmp_path, DeltaSyncCallback(str(bucket)), **extra).train()
    assert_bucket_holds(bucket, model)


def test_weights_that_are_no_known_checkpoint_are_uploaded_as_one(tiny_model, tmp_path):
    bucket = tmp_path / "bucket"
    model = load(tiny_model("qwen3-tied"))
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    expected = weights(model)
    session = DeltaSyncSession(str(bucket))
    session.start(model, processing_class=AutoTokenizer.from_pretrained(tiny_model("qwen3-tied")))
    session.close()
    manifest = reader_of(bucket).manifest(0)
    assert manifest.anchor is not None
    assert manifest.anchor.reference is None
    folder = reader_of(bucket).fetch_anchor(manifest, tmp_path / "anchor")
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    assert reloaded.dtype == torch.bfloat16
    assert all(np.array_equal(bits, expected[name]) for name, bits in weights(reloaded).items())
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_a_model_made_in_the_program_is_uploaded(tiny_model, tmp_path):
    bucket = tmp_path / "bucket"
    model = AutoModelForCausalLM.from_config(load(tiny_model("qwen3")).config)
    make_trainer(model, tmp_path, DeltaSyncCallback(str(bucket))).train()
    assert_bucket_holds(bucket, model)


def test_skipped_steps_are_part_of_the_next_version_and_the_last_step_is_published(tiny_model, tmp_path):
    bucket = tmp_path / "bucket"
    model = load(tiny_model("qwen3"))
    make_trainer(model, tmp_path, DeltaSyncCallback(str(bucket), DeltaSyncConfig(delta_sync_steps=3))).train()
    latest = reader_of(bucket).latest()
    assert [manifest.step for manifest in reader_of(bucket).walk(latest)] == [STEPS, 3, 0]
    assert_bucket_holds(bucket, model)


def test_a_second_training_continues_the_run_under_the_next_epoch(tiny_model, tmp_path):
    bucket = tmp_path / "bucket"
    model = load(tiny_model("qwen3"))
    make_trainer(model, tmp_path, DeltaSyncCallback(str(bucket))).train()
    first = reader_of(bucket).latest()
    make_trainer(model, tmp_path, DeltaSyncCallback(str(bucket))).train()
    second = reader_of(bucket).latest()
    assert (second.version.run, second.version.epoch) == (first.version.run, first.version.epoch + 1)
    assert second.version.seq > first.version.seq
    assert_bucket_holds(bucket, model)


def test_a_bucket_with_other_weights_is_refused_with_both_digests(tiny_model, tmp_path):
    bucket = tmp_path / "bucket"
    make_trainer(load(tiny_model("qwen3")), tmp_path, DeltaSyncCallback(str(bucket))).train()
    head = reader_of(bucket).latest()
    with pytest.raises(BaseMismatchError, match=str(head.digest)):
        make_trainer(load(tiny_model("qwen3")), tmp_path, DeltaSyncCallback(str(bucket))).train()
    assert reader_of(bucket).latest() == head


def test_a_model_with_other_tensors_than_its_checkpoint_is_refused_with_both_lists(tiny_model, tmp_path):
    model = load(tiny_model("qwen3"))
    model.model.layers[1].mlp.extra = torch.nn.Linear(2, 2, bias=False)
    del model.model.layers[0].mlp.up_proj
    with pytest.raises(ModelMismatchError) as refused:
        DeltaSyncSession(str(tmp_path / "bucket")).start(model)
    assert "model.layers.1.mlp.extra.weight" in str(refused.value)
    assert "model.layers.0.mlp.up_proj.weight" in str(refused.value)


def test_several_processes_without_torch_distributed_are_refused_before_anything_is_written(tiny_model, tmp_path):
    with pytest.raises(SetupError, match=r"runs on 2 processes, torch\.distributed knows none"):
        DeltaSyncSession(str(tmp_path / "bucket")).start(load(tiny_model("qwen3")), world_size=2)
    assert not (tmp_path / "bucket").exists()


def test_a_callback_serves_one_run(tiny_model, tmp_path):
    callback = DeltaSyncCallback(str(tmp_path / "bucket"))
    make_trainer(load(tiny_model("qwen3")), tmp_path, callback).train()
    with pytest.raises(SetupError, match="has started already"):
        make_trainer(load(tiny_model("qwen3")), tmp_path, callback).train()


class Remove(TrainerCallback):
    """Removes a bucket at the end of step 2."""

    def __init__(self, bucket: Path, callback: DeltaSyncCallback):
        self.bucket = bucket
        self.session = callback.session

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            # what is on its way is let through, so that the test knows what is lost
            assert self.session.publisher.wait(60)
            self.bucket.rename(self.bucket.with_name("removed"))
            shutil.rmtree(self.bucket.with_name("removed"))


def test_training_survives_the_loss_of_its_bucket_and_says_so_once(tiny_model, tmp_path, caplog):
    bucket = tmp_path / "bucket"
    callback = DeltaSyncCallback(str(bucket), DeltaSyncConfig(delta_sync_close_timeout_s=2))
    trainer = make_trainer(load(tiny_model("qwen3")), tmp_path, callback, Remove(bucket, callback))
    with caplog.at_level(logging.WARNING, logger="trl_delta"):
        trainer.train()
    assert trainer.state.global_step == STEPS
    said = [record.getMessage() for record in caplog.records if record.name.startswith("trl_delta")]
    assert len(said) == 2
    assert "cannot publish version 3" in said[0]
    assert "training has ended" in said[1]
    assert "could not be written for 2 s" in said[1] and "bucket is 2, the weights of step 5" in said[1]
    assert not bucket.exists()


class BreakLooks(TrainerCallback):
    """At some steps the weights cannot be looked at; waits for the version of every other step."""

    def __init__(self, callback: DeltaSyncCallback, steps: tuple[int, ...]):
        self.session = callback.session
        self.steps = steps
        self.seqs: list[int] = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step:
            durable = self.session.publisher.wait(60)
            assert durable == (state.global_step not in self.steps)
            self.seqs.append(self.session.publisher.durable_seq)
        self.session.content.own = self.broken if state.global_step + 1 in self.steps else self.own

    def on_train_begin(self, args, state, control, **kwargs):
        self.own = self.session.content.own

    def broken(self, turn: bool = True) -> None:
        raise ValueError("no memory left")


def test_a_look_at_the_weights_that_fails_costs_a_version_and_is_told_once(tiny_model, tmp_path, caplog):
    bucket = tmp_path / "bucket"
    callback = DeltaSyncCallback(str(bucket))
    breaks = BreakLooks(callback, (2, 3))
    trainer = make_trainer(load(tiny_model("qwen3")), tmp_path, callback, breaks)
    with caplog.at_level(logging.WARNING, logger="trl_delta"):
        trainer.train()
    assert breaks.seqs == [1, 1, 1, 2]
    said = [record.getMessage() for record in caplog.records if record.name.startswith("trl_delta")]
    assert len(said) == 2
    assert "the weights of step 2 could not be looked at and are not published: no memory left" in said[0]
    assert "version" in said[1] and "with what had been left out before" in said[1]
    assert reader_of(bucket).latest().step == STEPS
    assert all(check.ok for check in verify(reader_of(bucket)))


def test_last_weights_that_cannot_be_looked_at_are_not_said_to_be_published(tiny_model, tmp_path, caplog):
    callback = DeltaSyncCallback(str(tmp_path / "bucket"))
    trainer = make_trainer(load(tiny_model("qwen3")), tmp_path, callback, BreakLooks(callback, (STEPS, STEPS + 1)))
    with caplog.at_level(logging.WARNING, logger="trl_delta"):
        trainer.train()
    assert "its last weights could not be looked at" in caplog.records[-1].getMessage()


def test_the_policy_to_stop_ends_training_where_the_weights_cannot_be_looked_at(tiny_model, tmp_path):
    callback = DeltaSyncCallback(str(tmp_path / "bucket"), DeltaSyncConfig(delta_sync_on_failure="stop"))
    trainer = make_trainer(load(tiny_model("qwen3")), tmp_path, callback, BreakLooks(callback, (2,)))
    with pytest.raises(ValueError, match="no memory left"):
        trainer.train()
    assert trainer.state.global_step == 2


def steal(bucket: Path) -> None:
    """Another trainer writes the version that comes next."""
    seq = reader_of(bucket).latest().version.seq + 1
    (bucket / "versions" / f"{seq:012d}.json").write_bytes(b"{}")


class Steal(TrainerCallback):
    """Steals the next version after step 1 and lets the trainer find out before it goes on."""

    def __init__(self, bucket: Path, callback: DeltaSyncCallback):
        self.bucket = bucket
        self.session = callback.session

    def on_step_begin(self, args, state, control, **kwargs):
        durable = state.global_step == 0 or self.session.publisher.wait(60)
        assert durable == (state.global_step <= 1)
        if state.global_step == 1:
            steal(self.bucket)


def test_a_second_writer_stops_publishing_with_one_warning(tiny_model, tmp_path, caplog):
    bucket = tmp_path / "bucket"
    callback = DeltaSyncCallback(str(bucket))
    trainer = make_trainer(load(tiny_model("qwen3")), tmp_path, callback, Steal(bucket, callback))
    with caplog.at_level(logging.WARNING, logger="trl_delta"):
        trainer.train()
    assert trainer.state.global_step == STEPS
    said = [record.getMessage() for record in caplog.records if record.name.startswith("trl_delta")]
    assert len(said) == 1
    assert "has stopped at version 1" in said[0]


def test_a_second_writer_stops_training_where_that_is_asked_for(tiny_model, tmp_path):
    bucket = tmp_path / "bucket"
    callback = DeltaSyncCallback(str(bucket), DeltaSyncConfig(delta_sync_on_failure="stop"))
    trainer = make_trainer(load(tiny_model("qwen3")), tmp_path, callback, Steal(bucket, callback))
    with pytest.raises(WriterConflictError):
        trainer.train()
    callback.session.close()
    assert trainer.state.global_step < STEPS


class AwaitPublication(TrainerCallback):
    """Holds training up at the end of each step until what was handed over is durable."""

    def __init__(self, callback: DeltaSyncCallback):
        self.session = callback.session

    def on_step_end(self, args, state, control, **kwargs):
        assert self.session.publisher.wait(60)


def test_metrics_reach_the_log_history(tiny_model, tmp_path):
    callback = DeltaSyncCallback(str(tmp_path / "bucket"))
    trainer = make_trainer(load(tiny_model("qwen3")), tmp_path, callback, AwaitPublication(callback))
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == STEPS
    for step, line in enumerate(lines, 1):
        assert 0 < line["delta/changed_frac"] < 0.5
        assert line["delta/extract_s"] > 0
        assert line["delta/version"] == step
        assert 0 < line["delta/ratio"] < 0.5
    # the summary of the whole training is no step
    assert not any("delta/version" in line for line in trainer.state.log_history if "loss" not in line)


def test_metrics_tell_what_is_served(tiny_model, tmp_path):
    bucket = tmp_path / "bucket"
    model = load(tiny_model("qwen3"))
    callback = DeltaSyncCallback(str(bucket), DeltaSyncConfig(delta_sync_ack_poll_s=0.01))
    session = callback.session
    session.start(model)
    try:
        first = reader_of(bucket).latest()
        reader_of(bucket).write_ack(Ack("server", first.version, first.digest, "serving", None, 2.5, time.time()))
        assert session.watcher.wait_for(0, 10)
        with torch.no_grad():
            model.model.norm.weight.add_(0.5)
        session.step(1)
        assert session.publisher.wait(10)
        logs = {"loss": 1.0}
        args = SimpleNamespace()
        callback.on_log(args, TrainerState(), TrainerControl(), logs=logs)  # pyright: ignore[reportArgumentType]
        assert logs["delta/served_version"] == 0
        assert logs["delta/version"] == 1
        assert logs["delta/lag_versions"] == 1
        assert logs["delta/bytes"] == session.publisher.records[0].delta_bytes
    finally:
        session.close()


def test_no_bucket_is_refused_when_the_trainer_is_made(tiny_model, tmp_path):
    with pytest.raises(SetupError, match="has no bucket"):
        make_trainer(load(tiny_model("qwen3")), tmp_path, DeltaSyncCallback())
