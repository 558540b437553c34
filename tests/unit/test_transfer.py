# SPDX-License-Identifier: Apache-2.0
"""TRL's real AsyncGRPOTrainer with a stub for the rollouts: nothing but the bucket carries weights, labels tell the
truth."""

import pytest
import torch
from attention import put_attention_back
from stub_server import Acker, StubWorker
from transformers import AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from delta_wire.bucket import BucketReader
from delta_wire.digest import Digest
from delta_wire.errors import SetupError
from delta_wire.replay import materialise
from delta_wire.stores import open_store
from trl_delta import DeltaSyncCallback, DeltaSyncConfig, DeltaWeightTransfer, attach
from trl_delta.detector import tensor_digests

STEPS = 4


class Watch(TrainerCallback):
    """Notes digests of the live weights and the log lines."""

    def __init__(self):
        self.digests: dict[int, Digest] = {}
        self.lines: list[dict] = []

    def on_step_end(self, args, state, control, **kwargs):
        from trl_delta.names import live_tensors

        self.digests[state.global_step] = sum(tensor_digests(live_tensors(kwargs["model"])).values(), Digest())

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs or {}))


@pytest.fixture
def make_trainer(tiny_model, tmp_path):
    from trl_delta.cpu import cpu_training

    def make(*callbacks: TrainerCallback, peft_config=None, weight_transfer=None, **settings) -> AsyncGRPOTrainer:
        settings = {"learning_rate": 1e-5} | settings
        args = AsyncGRPOConfig(
            output_dir=str(tmp_path / "trainer"),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            num_generations=2,
            token_budget=0,
            max_staleness=100,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **settings,
        )
        from datasets import Dataset

        with cpu_training():
            return AsyncGRPOTrainer(
                model=str(tiny_model("qwen3")),
                args=args,
                train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}]),
                processing_class=AutoTokenizer.from_pretrained(tiny_model("qwen3")),
                callbacks=list(callbacks),
                rollout_worker=StubWorker(),
                peft_config=peft_config,
                weight_transfer=weight_transfer,
            )

    yield make
    put_attention_back()


@pytest.fixture
def acker(tmp_path):
    thread = Acker(tmp_path / "bucket", delay_s=0.1)
    thread.start()
    yield thread
    thread.stop.set()


def test_training_publishes_every_step_and_labels_what_is_served(make_trainer, acker, tmp_path):
    watch = Watch()
    trainer = make_trainer(watch)
    bucket = str(tmp_path / "bucket")
    callback = attach(trainer, bucket, DeltaSyncConfig(delta_sync_ack_poll_s=0.02))
    worker = trainer.rollout_worker
    truthful: list[bool] = []
    forward = worker.told.append

    class Told(list):
        def append(self, label: int) -> None:
            # TRL's label n stands for the weights of step n - 1 here; they must have been served before
            truthful.append(any(step >= label - 1 for step in acker.steps))
            forward(label)

    worker.told = Told()
    trainer.train()
    session = callback.session
    assert trainer.state.global_step == STEPS
    assert isinstance(trainer.weight_transfer, DeltaWeightTransfer)
    assert trainer.model_version == STEPS + 1
    # the first rollout is made after the server has acknowledged the base
    assert worker.started_at_version == 1
    assert truthful
    assert all(truthful)
    reader = BucketReader(open_store(bucket))
    latest = reader.latest()
    assert latest is not None
    assert latest.step == STEPS
    for manifest in reader.walk(latest):
        if manifest.step:
            assert manifest.digest == watch.digests[manifest.step]
    expected = tensor_digests(session.live())
    assert latest.digest == sum(expected.values(), Digest())
    with materialise(reader, latest) as state:
        assert state.digest == latest.digest
    steps = [line for line in watch.lines if "loss" in line]
    assert len(steps) == STEPS
    assert all("delta/changed_frac" in line and "delta/served_version" in line for line in steps)


def test_labels_do_not_move_while_no_server_serves_the_weights(make_trainer, tmp_path):
    trainer = make_trainer()
    attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(delta_sync_start_timeout_s=0))
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert trainer.model_version == STEPS + 1
    assert trainer.rollout_worker.told == []


def test_sparse_syncs_are_labelled_with_the_weights_they_stand_for(make_trainer, acker, tmp_path):
    trainer = make_trainer(weight_sync_steps=2, gradient_accumulation_steps=2)
    attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(delta_sync_ack_poll_s=0.02))
    trainer.train()
    assert trainer.model_version == 1 + STEPS // 2
    assert BucketReader(open_store(tmp_path / "bucket")).latest().step == STEPS
    assert trainer.rollout_worker.told[0] == 1


def test_a_start_without_a_server_is_refused_with_what_to_start(make_trainer, tmp_path):
    trainer = make_trainer()
    attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(delta_sync_start_timeout_s=0.2))
    with pytest.raises(
        SetupError, match=r"expected 1 server.*found none.*vllm_delta\.DeltaWorkerExtension"
    ) as refused:
        trainer.train()
    assert str(tmp_path / "bucket") in str(refused.value)
    assert trainer.rollout_worker.started_at_version is None


def test_a_transfer_that_nothing_drives_says_what_is_missing(make_trainer):
    trainer = make_trainer(weight_transfer=DeltaWeightTransfer())
    with pytest.raises(SetupError, match=r"call attach\(trainer"):
        trainer.train()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_adapter_is_published_merged_and_trl_never_merges_it_into_the_base(make_trainer, acker, tmp_path, dtype):
    """TRL merges and subtracts at every sync, which moves a base in bf16; here no bit of it may move."""
    from peft import LoraConfig

    trainer = make_trainer(
        weight_transfer=DeltaWeightTransfer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
        dtype=dtype,
        learning_rate=1e-3,
    )
    callback = attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(delta_sync_ack_poll_s=0.02))
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert base
    for name, param in trainer.model.named_parameters():
        if name in base:
            assert torch.equal(param, base[name]), name
    latest = BucketReader(open_store(tmp_path / "bucket")).latest()
    assert latest is not None
    assert latest.step == STEPS
    assert latest.digest == sum(tensor_digests(callback.session.live()).values(), Digest())
    # it is PEFT's again afterwards
    assert "merge_adapter" not in vars(trainer.model)
    trainer.model.merge_adapter()
    assert not torch.equal(
        dict(trainer.model.named_parameters())[changed := next(n for n in base if "q_proj" in n)], base[changed]
    )


def test_a_separate_adapter_is_what_rollouts_ask_for(make_trainer, acker, tmp_path):
    from peft import LoraConfig, get_peft_model_state_dict

    trainer = make_trainer(
        weight_transfer=DeltaWeightTransfer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
        dtype="bfloat16",
        learning_rate=1e-3,
    )
    config = DeltaSyncConfig(
        delta_sync_ack_poll_s=0.02, delta_sync_adapter="separate", delta_sync_adapter_name="policy"
    )
    callback = attach(trainer, str(tmp_path / "bucket"), config)
    assert trainer.rollout_worker.model_name == "policy"
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert base
    for name, param in trainer.model.named_parameters():
        if name in base:
            assert torch.equal(param, base[name]), name
    latest = BucketReader(open_store(tmp_path / "bucket")).latest()
    assert latest is not None and latest.adapter is not None
    assert latest.step == STEPS
    assert set(BucketReader(open_store(tmp_path / "bucket")).table(latest)) == set(
        get_peft_model_state_dict(trainer.model, save_embedding_layers=False)
    )
    assert latest.digest == sum(tensor_digests(callback.session.live()).values(), Digest())


def test_a_trainer_that_waits_for_its_servers_never_gets_further_ahead(make_trainer, tmp_path):
    acker = Acker(tmp_path / "bucket", delay_s=0.3)
    acker.start()
    trainer = make_trainer()
    config = DeltaSyncConfig(delta_sync_ack_poll_s=0.02, delta_sync_max_lag_versions=1)
    callback = attach(trainer, str(tmp_path / "bucket"), config)
    lags: list[float] = []

    class Lags(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            lags.append(callback.session.pace.lag_versions)

    trainer.add_callback(Lags())
    trainer.train()
    acker.stop.set()
    assert len(lags) == STEPS
    assert max(lags) <= 1


@pytest.mark.parametrize("on_failure", ["warn", "stop"])
def test_a_wait_in_vain_is_reported_once(make_trainer, tmp_path, caplog, on_failure):
    """No server at all: with `warn` one bounded wait for the whole training."""
    trainer = make_trainer()
    config = DeltaSyncConfig(
        delta_sync_start_timeout_s=0,
        delta_sync_max_lag_versions=0,
        delta_sync_lag_timeout_s=0.3,
        delta_sync_on_failure=on_failure,
    )
    attach(trainer, str(tmp_path / "bucket"), config)
    if on_failure == "stop":
        with pytest.raises(SetupError, match="none that serves"):
            trainer.train()
        return
    trainer.train()
    assert trainer.state.global_step == STEPS
    said = [record for record in caplog.records if "delta_sync_lag_timeout_s" in record.getMessage()]
    assert len(said) == 1


def test_attaching_twice_or_beside_a_callback_is_refused(make_trainer, tmp_path):
    trainer = make_trainer()
    attach(trainer, str(tmp_path / "bucket"))
    with pytest.raises(SetupError, match="attached already"):
        attach(trainer, str(tmp_path / "bucket"))
    other = make_trainer(DeltaSyncCallback(str(tmp_path / "bucket")))
    with pytest.raises(SetupError, match="has a DeltaSyncCallback already"):
        attach(other, str(tmp_path / "bucket"))


def test_other_trainers_are_refused_with_the_way_that_works(tmp_path):
    model = torch.nn.Linear(2, 2)
    trainer = Trainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]))
    with pytest.raises(SetupError, match=r"callbacks=\[DeltaSyncCallback"):
        attach(trainer, str(tmp_path / "bucket"))


def test_a_callback_moved_behind_the_first_sync_is_refused(make_trainer, tmp_path):
    trainer = make_trainer()
    callback = attach(trainer, str(tmp_path / "bucket"))
    callbacks = trainer.callback_handler.callbacks
    callbacks.remove(callback)
    callbacks.append(callback)
    with pytest.raises(SetupError, match=r"Call attach\(\) last"):
        trainer.train()


def test_attach_without_a_bucket_leaves_the_trainer_as_it_was(make_trainer):
    trainer = make_trainer()
    before = (list(trainer.callback_handler.callbacks), trainer.weight_transfer)
    with pytest.raises(SetupError, match="has no bucket"):
        attach(trainer)
    assert (trainer.callback_handler.callbacks, trainer.weight_transfer) == before
