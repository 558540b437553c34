# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers on several processes; see `rank_programs.run_ranks`."""

from __future__ import annotations

from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from stub_server import StubWorker
from transformers import AutoTokenizer

from delta_wire.digest import Digest
from trl_delta import DeltaSyncCallback, DeltaSyncConfig, DeltaWeightTransfer, attach, server_mode
from trl_delta.detector import tensor_digests
from trl_delta.dtensors import whole_tensor

STEPS = 3
_SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "num_generations": 2,
    "learning_rate": 1e-4,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": [],
    "logging_steps": 1,
    "disable_tqdm": True,
}
_FSDP2: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
}


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Unequal in every group of two, so that every step has a gradient."""
    return [float(number % 2) for number in range(len(completions))]


def _settings(kind: str) -> dict[str, Any]:
    if kind == "ddp":
        return _SETTINGS
    # accelerate takes FSDP for an affair of GPUs and would use DDP; all else here is its own code
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return _SETTINGS | _FSDP2


def _dataset() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": [{"role": "user", "content": str(number)}]} for number in range(8)])


def _outcome(trainer: Any, callback: DeltaSyncCallback) -> dict[str, Any]:
    """What a process says at the end; all call this, for sharded weights are gathered to be compared."""
    session = callback.session
    digest = sum(tensor_digests(session.live()).values(), Digest())
    return {
        "step": trainer.state.global_step,
        "digest": str(digest),
        "durable": session.publisher.durable_seq,
        "served": session.watcher.seq,
        "lines": sum("delta/changed_frac" in line for line in trainer.state.log_history),
    }


def grpo(
    rank: int, count: int, model: str, folder: str, url: str, kind: str, settings: dict[str, Any], **arguments: Any
) -> dict[str, Any]:
    """GRPO in vLLM server mode with the server at `url`; `settings` are delta sync's, `arguments` the trainer's."""
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    args = GRPOConfig(
        output_dir=f"{folder}/trainer",
        per_device_train_batch_size=2,
        max_completion_length=6,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        **_settings(kind) | arguments,
    )
    with server_mode():
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=_dataset(),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
    callback = attach(trainer, f"{folder}/bucket", DeltaSyncConfig(delta_sync_ack_poll_s=0.02, **settings))
    trainer.train()
    return _outcome(trainer, callback)


def async_grpo(rank: int, count: int, model: str, folder: str, kind: str, adapter: str) -> dict[str, Any]:
    """AsyncGRPO with rollouts that are made up; of an `adapter`, if there is one, published as that says."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from trl_delta.cpu import cpu_training

    args = AsyncGRPOConfig(
        output_dir=f"{folder}/trainer",
        per_device_train_batch_size=2,
        token_budget=0,
        max_staleness=100,
        **({"dtype": "bfloat16"} if adapter else {}),
        **_settings(kind),
    )
    peft_config = None
    if adapter:
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    with cpu_training():
        trainer = AsyncGRPOTrainer(
            model=model,
            args=args,
            train_dataset=_dataset(),
            processing_class=AutoTokenizer.from_pretrained(model),
            rollout_worker=StubWorker(),
            weight_transfer=DeltaWeightTransfer(),
            peft_config=peft_config,
        )
    settings = {"delta_sync_adapter": adapter} if adapter else {}
    callback = attach(trainer, f"{folder}/bucket", DeltaSyncConfig(delta_sync_ack_poll_s=0.02, **settings))
    frozen = {name: param.detach().clone() for name, param in trainer.model.named_parameters() if adapter}
    trainer.train()
    moved = [
        name
        for name, param in trainer.model.named_parameters()
        if name in frozen and not param.requires_grad and not whole_tensor(param).equal(frozen[name])
    ]
    worker = trainer.rollout_worker
    return _outcome(trainer, callback) | {
        "moved": moved,
        "told": None if worker is None else worker.told,
        "began": None if worker is None else worker.started_at_version,
        "model_version": trainer.model_version,
    }
