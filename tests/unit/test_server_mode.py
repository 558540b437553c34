# SPDX-License-Identifier: Apache-2.0
"""TRL's real GRPOTrainer in vLLM server mode, with a stub for the server: it answers, and acknowledges what it sees.

tests/integration/test_trainers.py does the same with a real server.
"""

from pathlib import Path

import pytest
import torch
from stub_server import StubServer
from training import pointed_to
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.errors import SetupError
from trl_delta import DeltaSyncConfig, attach, server_mode
from trl_delta.detector import tensor_digests

STEPS = 3


@pytest.fixture
def stub(tmp_path):
    server = StubServer(tmp_path / "bucket")
    yield server
    server.close()


def reward(completions, **kwargs):
    # unequal in every group of two, so that every step has a gradient
    return [float(number % 2) for number in range(len(completions))]


def make_trainer(
    folder: Path, tmp_path: Path, stub: StubServer, peft_config=None, rewards=reward, **more
) -> GRPOTrainer:
    from datasets import Dataset

    args = GRPOConfig(
        **{
            "output_dir": str(tmp_path / "trainer"),
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 6,
            "learning_rate": 1e-4,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": stub.url,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            "report_to": "none",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        | more
    )
    prompts = [{"prompt": [{"role": "user", "content": str(number)}]} for number in range(8)]
    with server_mode():
        return GRPOTrainer(
            model=str(folder),
            reward_funcs=rewards,
            args=args,
            train_dataset=Dataset.from_list(prompts),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=peft_config,
        )


FAST = {"delta_sync_ack_poll_s": 0.02}


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ({}, [0, 1, 2]),
        ({"gradient_accumulation_steps": 2}, [0, 1, 2]),
        # one generation for two optimizer steps
        ({"steps_per_generation": 2, "max_steps": 4}, [0, 2]),
    ],
)
def test_every_generation_has_the_weights_of_its_step(tiny_model, tmp_path, stub, more, steps):
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub, **more)
    callback = attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST))
    trainer.train()
    assert stub.answered_with == steps
    # the weights of the last step, which TRL itself never sends
    latest = pointed_to(tmp_path / "bucket")
    assert latest.step == trainer.state.global_step
    assert latest.digest == sum(tensor_digests(callback.session.live()).values(), Digest())
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert all("delta/changed_frac" in line for line in lines)


def test_without_advantages_momentum_moves_the_weights_and_generation_has_them(tiny_model, tmp_path, stub):
    calls = []

    def equal_after_the_first(completions, **kwargs):
        calls.append(len(completions))
        return reward(completions) if len(calls) == 1 else [1.0] * len(completions)

    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub, rewards=equal_after_the_first)
    attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST))
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["frac_reward_zero_std"] for line in lines] == [0, 1, 1]
    assert [line["grad_norm"] > 0 for line in lines] == [True, False, False]
    assert all(line["delta/changed_frac"] > 0 for line in lines)
    assert stub.answered_with == [0, 1, 2]
    assert pointed_to(tmp_path / "bucket").step == STEPS


def test_weights_between_two_cadences_are_published_for_a_generation(tiny_model, tmp_path, stub):
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub)
    attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST, delta_sync_steps=10))
    trainer.train()
    assert stub.answered_with == [0, 1, 2]


def test_a_bound_above_zero_lets_generation_be_behind_but_no_further(tiny_model, tmp_path, stub):
    stub.delay_s = 0.5
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub, max_steps=5)
    attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST, delta_sync_max_lag_versions=1))
    trainer.train()
    assert len(stub.answered_with) == 5
    assert all(step - 1 <= (answered or 0) <= step for step, answered in enumerate(stub.answered_with))


def test_servers_that_do_not_follow_are_reported_and_do_not_stop_training(tiny_model, tmp_path, stub, caplog):
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub)
    callback = attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST, delta_sync_lag_timeout_s=0.5))

    class Lose(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            # it has generated for the first step by now, and will not hear of another version
            stub.stop_following()

    trainer.add_callback(Lose())
    trainer.train()
    assert callback.session.watcher.seq == 0
    assert trainer.state.global_step == STEPS
    assert stub.answered_with == [0, 0, 0]
    said = [record for record in caplog.records if "delta_sync_lag_timeout_s" in record.getMessage()]
    assert len(said) == 1
    assert pointed_to(tmp_path / "bucket").step == STEPS


def test_no_server_that_follows_the_bucket_is_refused_with_what_to_start(tiny_model, tmp_path, stub):
    stub.stop_following()
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub)
    attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST, delta_sync_start_timeout_s=0.3))
    with pytest.raises(SetupError, match=r"found none.*vllm_delta\.DeltaWorkerExtension"):
        trainer.train()


def test_a_separate_adapter_is_what_generation_asks_for(tiny_model, tmp_path, stub):
    from peft import LoraConfig

    trainer = make_trainer(
        tiny_model("qwen3"),
        tmp_path,
        stub,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"),
        learning_rate=1e-3,
    )
    config = DeltaSyncConfig(**FAST, delta_sync_adapter="separate", delta_sync_adapter_name="policy")
    attach(trainer, str(tmp_path / "bucket"), config)
    assert trainer.vllm_generation.vllm_client.model == "policy"
    trainer.train()
    assert stub.answered_with == [0, 1, 2]
    adapter = pointed_to(tmp_path / "bucket").adapter
    assert adapter is not None and adapter.base_digest == Checkpoint(tiny_model("qwen3")).digest()


def test_an_adapter_never_moves_a_bf16_base(tiny_model, tmp_path, stub):
    from peft import LoraConfig

    trainer = make_trainer(
        tiny_model("qwen3"),
        tmp_path,
        stub,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"),
        model_init_kwargs={"dtype": "bfloat16"},
        learning_rate=1e-3,
    )
    callback = attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST))
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert base
    for name, param in trainer.model.named_parameters():
        if name in base:
            assert torch.equal(param, base[name]), name
    assert stub.answered_with == [0, 1, 2]
    assert pointed_to(tmp_path / "bucket").digest == sum(tensor_digests(callback.session.live()).values(), Digest())
