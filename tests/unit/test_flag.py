# SPDX-License-Identifier: Apache-2.0
"""Ways to switch delta sync on in a real Trainer, what it logs, and what a trainer's checkpoint keeps of it."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from training import pointed_to
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from yaml_training import copy_configs

from delta_wire.bucket import BucketReader
from delta_wire.errors import BaseMismatchError, SetupError
from delta_wire.replay import checkout, materialise, verify
from delta_wire.stores import open_store
from trl_delta import DeltaSyncCallback, DeltaSyncConfig


@dataclass
class MyArguments(DeltaSyncConfig, TrainingArguments):
    """Somebody's own config class, with delta sync as a mixin."""


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def rows() -> list[dict]:
    torch.manual_seed(0)
    return [{"input_ids": (ids := torch.randint(3, 500, (24,)).tolist()), "labels": ids} for _ in range(64)]


def settings(tmp_path: Path, **more) -> dict:
    return {
        "output_dir": str(tmp_path / "trainer"),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 2e-5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **more,
    }


def make_trainer(folder: Path, tmp_path: Path, *callbacks: TrainerCallback, **more) -> Trainer:
    args = TrainingArguments(**settings(tmp_path, **more))
    return Trainer(model=load(folder), args=args, train_dataset=rows(), callbacks=list(callbacks))


def assert_newest_is(bucket: Path, model: PreTrainedModel) -> None:
    reader = BucketReader(open_store(bucket))
    with materialise(reader, pointed_to(bucket)) as state:
        for name, param in model.named_parameters():
            expected = param.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(state.bits(name), expected), name


def assert_bucket_holds(bucket: Path, model: PreTrainedModel) -> None:
    assert_newest_is(bucket, model)
    assert all(check.ok for check in verify(BucketReader(open_store(bucket))))


class Tracker(TrainerCallback):
    """Reads a log line as the integrations of `report_to` do."""

    lines: list[dict]

    def __init__(self):
        self.lines = []
        trackers.append(self)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs or {}))


trackers: list[Tracker] = []


@pytest.fixture
def tracker_name(monkeypatch):
    from transformers.integrations import integration_utils

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "a_tracker", Tracker)
    trackers.clear()
    return "a_tracker"


def test_settings_of_a_mixin_reach_the_callback(tiny_model, tmp_path):
    bucket = tmp_path / "bucket"
    args = MyArguments(**settings(tmp_path), delta_sync_bucket=str(bucket), delta_sync_steps=2)
    assert args.optim  # the trainer's own part of the config has been set up, too
    callback = DeltaSyncCallback()
    trainer = Trainer(model=load(tiny_model("qwen3")), args=args, train_dataset=rows(), callbacks=[callback])
    trainer.train()
    assert callback.session.config is args
    assert [m.step for m in BucketReader(open_store(bucket)).walk(pointed_to(bucket))] == [4, 2, 0]
    assert_bucket_holds(bucket, trainer.model)


def test_a_wrong_value_of_a_mixin_names_its_key(tmp_path):
    with pytest.raises(SetupError, match="delta_sync_encoding"):
        MyArguments(**settings(tmp_path), delta_sync_encoding="zip")


def test_report_to_delta_sync_needs_no_callback(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("DELTA_SYNC_BUCKET", str(tmp_path / "bucket"))
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, report_to=["delta_sync"])
    trainer.train()
    assert pointed_to(tmp_path / "bucket").step == 4
    assert_bucket_holds(tmp_path / "bucket", trainer.model)


def test_report_to_delta_sync_works_in_trls_own_script(tiny_model, tmp_path, monkeypatch):
    """What `trl grpo` runs, with a YAML file and no code: the reward function's module brings the callback."""
    from trl.scripts.grpo import main, make_parser

    folder = copy_configs(tmp_path / "cpu", tiny_model("qwen3"))
    given = yaml.safe_load((folder / "grpo.yaml").read_text())
    given = {name: value for name, value in given.items() if "vllm" not in name and name != "delta_sync"}
    given |= {
        "report_to": ["delta_sync"],
        "reward_funcs": ["rewards.digits", "trl_delta.rewards.none"],
        "env": {"DELTA_SYNC_BUCKET": str(tmp_path / "bucket")},
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(given))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    # the parser sets it for good
    monkeypatch.setenv("DELTA_SYNC_BUCKET", "")
    main(*make_parser().parse_args_and_config(["--config", "own.yaml"]))
    assert pointed_to(tmp_path / "bucket").step == given["max_steps"]
    assert all(check.ok for check in verify(BucketReader(open_store(tmp_path / "bucket"))))


def test_report_to_delta_sync_without_a_bucket_is_refused(tiny_model, tmp_path, monkeypatch):
    monkeypatch.delenv("DELTA_SYNC_BUCKET", raising=False)
    with pytest.raises(SetupError, match="has no bucket"):
        make_trainer(tiny_model("qwen3"), tmp_path, report_to=["delta_sync"])


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_trackers_get_the_metrics_once_per_log_line(tiny_model, tmp_path, tracker_name, logging_steps):
    callback = DeltaSyncCallback(str(tmp_path / "bucket"))
    trainer = make_trainer(
        tiny_model("qwen3"), tmp_path, callback, report_to=[tracker_name], logging_steps=logging_steps
    )
    trainer.train()
    (tracker,) = trackers
    lines = [line for line in tracker.lines if "loss" in line]
    # as many lines as without delta sync, each with its metrics in it
    assert len(lines) == 4 // logging_steps
    assert len(tracker.lines) == len(lines) + 1
    for line in lines:
        assert line["delta/changed_frac"] > 0
        assert line["delta/extract_s"] > 0
        assert "delta/version" in line


# --- resume


class Keep(TrainerCallback):
    """Copies the bucket, as it is once the version of a step is durable, and stops training after another."""

    def __init__(self, callback: DeltaSyncCallback, at_step: int, copy: Path, stop_after: int):
        self.callback, self.at_step, self.copy, self.stop_after = callback, at_step, copy, stop_after

    def on_step_end(self, args, state, control, **kwargs):
        session = self.callback.session
        assert session.publisher.wait(60)
        if state.global_step == self.at_step:
            shutil.copytree(session.bucket, self.copy)
        control.should_training_stop = state.global_step >= self.stop_after


def train_until(folder: Path, tmp_path: Path, *, copy_at: int, stop_after: int) -> Path:
    """A training that ends early, with checkpoints of all steps, and a copy of its bucket at one."""
    callback = DeltaSyncCallback(str(tmp_path / "bucket"))
    keep = Keep(callback, copy_at, tmp_path / "copy", stop_after)
    make_trainer(folder, tmp_path, callback, keep, save_strategy="steps", save_steps=1).train()
    return tmp_path / "trainer"


def resume(folder: Path, tmp_path: Path, checkpoint: Path, bucket: Path, **more) -> Trainer:
    trainer = make_trainer(folder, tmp_path, DeltaSyncCallback(str(bucket)), **more)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def test_a_checkpoint_keeps_what_a_resume_needs(tiny_model, tmp_path):
    trainer = train_until(tiny_model("qwen3"), tmp_path, copy_at=2, stop_after=2)
    saved = json.loads((trainer / "checkpoint-2" / "trainer_state.json").read_text())
    head = pointed_to(tmp_path / "bucket")
    attributes = saved["stateful_callbacks"]["DeltaSync"]["attributes"]
    assert attributes["run"] == head.version.run
    assert attributes["digest"] == str(head.digest)
    assert attributes["step"] == 2


@pytest.mark.parametrize(
    ("case", "checkpoint", "copy_at"),
    [("level", 2, 2), ("bucket ahead", 1, 3), ("trainer ahead", 3, 1)],
)
@pytest.mark.parametrize("encoding", ["packed", "context"])
def test_a_resumed_training_continues_the_chain(tiny_model, tmp_path, case, checkpoint, copy_at, encoding):
    folder = tiny_model("qwen3")
    saved = train_until(folder, tmp_path, copy_at=copy_at, stop_after=3)
    bucket = tmp_path / "copy"
    before = pointed_to(bucket)
    trainer = make_trainer(
        folder,
        tmp_path,
        DeltaSyncCallback(str(bucket), DeltaSyncConfig(delta_sync_encoding=encoding)),
    )
    trainer.train(resume_from_checkpoint=str(saved / f"checkpoint-{checkpoint}"))
    assert trainer.state.global_step == 4
    after = pointed_to(bucket)
    assert after.version.run == before.version.run
    assert after.version.epoch > before.version.epoch
    assert after.step == 4
    # an unbroken chain of deltas, in which numbers only grow
    chain = list(BucketReader(open_store(bucket)).walk(after))
    assert before in chain
    assert [m.version.seq for m in chain] == sorted({m.version.seq for m in chain}, reverse=True)
    if case != "level":
        first = chain[chain.index(before) - 1]
        assert first.step == checkpoint
        attributes = json.loads((saved / f"checkpoint-{checkpoint}" / "trainer_state.json").read_text())
        assert str(first.digest) == attributes["stateful_callbacks"]["DeltaSync"]["attributes"]["digest"]
    assert_bucket_holds(bucket, trainer.model)


def test_where_the_chain_is_lost_a_resume_uploads_a_checkpoint_that_opens(tiny_model, tmp_path):
    folder = tiny_model("qwen3")
    saved = train_until(folder, tmp_path, copy_at=2, stop_after=2)
    bucket = tmp_path / "copy"
    head = pointed_to(bucket)
    assert head.delta is not None
    (bucket / head.delta.objects[0].key).unlink()
    trainer = resume(folder, tmp_path, saved / "checkpoint-1", bucket)
    reader = BucketReader(open_store(bucket))
    anchor = reader.restart_point(pointed_to(bucket))
    assert anchor.version.seq > head.version.seq and anchor.step == 1
    assert_newest_is(bucket, trainer.model)
    opened = AutoModelForCausalLM.from_pretrained(checkout(reader, anchor, tmp_path / "opened"))
    assert type(opened) is type(trainer.model)


def test_a_checkpoint_of_another_run_does_not_take_the_bucket_over(tiny_model, tmp_path):
    folder = tiny_model("qwen3")
    saved = train_until(folder, tmp_path, copy_at=1, stop_after=1)
    other = tmp_path / "other"
    make_trainer(folder, tmp_path, DeltaSyncCallback(str(other)), max_steps=2).train()
    head = pointed_to(other)
    with pytest.raises(BaseMismatchError, match=str(head.digest)):
        resume(folder, tmp_path, saved / "checkpoint-1", other)
    assert pointed_to(other) == head


def test_weights_that_changed_since_the_checkpoint_are_reported(tiny_model, tmp_path, caplog):
    from safetensors.torch import load_file, save_file

    folder = tiny_model("qwen3")
    saved = train_until(folder, tmp_path, copy_at=1, stop_after=2) / "checkpoint-2"
    weights = load_file(saved / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    trainer = resume(folder, tmp_path, saved, tmp_path / "bucket")
    assert "something has changed them since" in caplog.text
    assert_bucket_holds(tmp_path / "bucket", trainer.model)


def test_a_resume_into_an_empty_bucket_begins_a_run_with_a_checkpoint_of_its_own(tiny_model, tmp_path):
    folder = tiny_model("qwen3")
    saved = train_until(folder, tmp_path, copy_at=1, stop_after=2)
    trainer = resume(folder, tmp_path, saved / "checkpoint-2", tmp_path / "empty")
    first = BucketReader(open_store(tmp_path / "empty")).manifest(0)
    assert first.step == 2
    assert first.anchor is not None
    assert first.anchor.objects
    assert_bucket_holds(tmp_path / "empty", trainer.model)


# --- other ways of training

# times the loss it is infinite
TOO_LARGE = 2.0**127


class Overflows(TrainerCallback):
    """The scaler of fp16 training, whose scale is too large at some steps: accelerate leaves the optimizer's step out,
    the trainer counts it."""

    def __init__(self, steps: set[int]):
        self.steps = steps
        self.skipped: list[int] = []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0, backoff_factor=0.5)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.scaler.update(TOO_LARGE if state.global_step + 1 in self.steps else 1.0)

    def on_step_end(self, args, state, control, **kwargs):
        if self.scaler.get_scale() == TOO_LARGE / 2:
            self.skipped.append(state.global_step)


class Digests(TrainerCallback):
    def __init__(self, callback: DeltaSyncCallback):
        self.callback = callback
        self.by_step: dict[int, str] = {}

    def on_step_end(self, args, state, control, **kwargs):
        # the callback goes first; no version is coalesced with the next
        assert self.callback.session.publisher.wait(60)
        self.by_step[state.global_step] = str(self.callback.session.detector.digest)


def test_a_step_that_changes_nothing_needs_no_version(tiny_model, tmp_path):
    callback = DeltaSyncCallback(str(tmp_path / "bucket"))
    digests, overflows = Digests(callback), Overflows({2, 3})
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, callback, overflows, digests)
    # as accelerate sets it where fp16 is computed, which is on GPUs only
    trainer.accelerator.scaler = overflows.scaler
    trainer.train()
    assert overflows.skipped == [2, 3]
    assert digests.by_step[1] == digests.by_step[2] == digests.by_step[3] != digests.by_step[4]
    assert [m.step for m in BucketReader(open_store(tmp_path / "bucket")).walk(pointed_to(tmp_path / "bucket"))] == [
        4,
        1,
        0,
    ]
    assert callback.session.publisher.step_of(1) == 3
    assert_bucket_holds(tmp_path / "bucket", trainer.model)


class ZeroGradients(TrainerCallback):
    """What a batch of equal rewards does: all gradients are zero, Adam's momentum is not."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step >= 1:
            for param in kwargs["model"].parameters():
                param.grad.zero_()


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}])
def test_a_step_without_gradient_still_changes_weights_and_is_published(tiny_model, tmp_path, more):
    callback = DeltaSyncCallback(str(tmp_path / "bucket"))
    digests = Digests(callback)
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, callback, ZeroGradients(), digests, **more)
    trainer.train()
    assert len(set(digests.by_step.values())) == 4
    published = {
        m.step: str(m.digest)
        for m in BucketReader(open_store(tmp_path / "bucket")).walk(pointed_to(tmp_path / "bucket"))
    }
    assert {step: digest for step, digest in published.items() if step} == digests.by_step
    assert_bucket_holds(tmp_path / "bucket", trainer.model)


# --- a bucket that is gone for a while


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Outage(TrainerCallback):
    """Takes the bucket away after one step and brings it back after another."""

    def __init__(self, callback: DeltaSyncCallback, begin: int, end: int):
        self.callback, self.begin, self.end = callback, begin, end
        self.most_bytes = 0

    def on_step_end(self, args, state, control, **kwargs):
        session = self.callback.session
        bucket = Path(session.bucket)
        if state.global_step == self.begin:
            assert session.publisher.wait(60)
            bucket.rename(bucket.with_name("away"))
        elif self.begin < state.global_step < self.end:
            wait_for(lambda: session.publisher.notices.is_outage)
            pending = session.publisher._pending
            if pending is not None:
                self.most_bytes = max(self.most_bytes, sum(part.indices.nbytes for part in pending.delta.values()))
        elif state.global_step == self.end:
            bucket.with_name("away").rename(bucket)


def test_a_long_outage_costs_nothing_but_freshness(tiny_model, tmp_path, caplog):
    """24 steps without a bucket: training goes on, memory stays within one delta of the model, the end is right."""
    bucket = tmp_path / "bucket"
    callback = DeltaSyncCallback(str(bucket))
    outage = Outage(callback, begin=2, end=26)
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, callback, outage, max_steps=28)
    before = set(threading.enumerate())
    trainer.train()
    assert trainer.state.global_step == 28
    # never more than one index per parameter, however long it lasts
    assert 0 < outage.most_bytes <= 4 * callback.session.table.num_params
    said = [record for record in caplog.records if "cannot publish version 3" in record.getMessage()]
    assert len(said) == 1
    latest = pointed_to(bucket)
    assert latest.step == 28
    # what was gathered is one version, or two if the bucket came back while one was on its way
    assert 3 <= latest.version.seq <= 6
    assert_bucket_holds(bucket, trainer.model)
    assert not [thread for thread in threading.enumerate() if thread not in before and "delta" in thread.name]
