# SPDX-License-Identifier: Apache-2.0
"""The script behind `trl-delta async_grpo`, shaped as TRL's own scripts are; TRL has none for this trainer."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from delta_wire.errors import SetupError


def make_parser(subparsers: Any = None, prog: str | None = None) -> Any:
    """A parser of script arguments, `AsyncGRPOConfig` and a mixture of datasets."""
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser

    @dataclass
    class AsyncGRPOScriptArguments(ScriptArguments):
        """What TRL's `ModelConfig` calls the same; the rest of that is in `AsyncGRPOConfig` already."""

        model_name_or_path: str | None = field(default=None, metadata={"help": "Model checkpoint to train."})
        reward_funcs: list[str] | None = field(
            default=None, metadata={"help": "Reward functions by import path, e.g. 'my_lib.rewards.custom_reward'."}
        )
        use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter; see delta_sync_adapter."})
        lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
        lora_alpha: int = field(default=32, metadata={"help": "Scaling of the adapter times its rank."})
        lora_target_modules: list[str] | None = field(default=None, metadata={"help": "Modules that get an adapter."})

    return TrlParser((AsyncGRPOScriptArguments, AsyncGRPOConfig, DatasetMixtureConfig), prog=prog)  # pyright: ignore


def main(script_args: Any, training_args: Any, dataset_args: Any) -> None:
    """Train; the last weights are saved to `output_dir`."""
    import torch
    from datasets import load_dataset
    from trl.scripts.utils import get_dataset

    from trl_delta.cpu import cpu_training

    if not script_args.model_name_or_path:
        raise SetupError("model_name_or_path: expected a model checkpoint, found none")
    if dataset_args.datasets:
        dataset = get_dataset(dataset_args)
    elif script_args.dataset_name:
        dataset = load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    else:
        raise SetupError("dataset_name: expected a dataset's name, or datasets: a mixture; found neither")
    # looked up now: `trl-delta` has put a trainer that publishes there
    trainers: Any = importlib.import_module("trl.experimental.async_grpo")
    with nullcontext() if torch.cuda.is_available() else cpu_training():
        trainer = trainers.AsyncGRPOTrainer(
            model=script_args.model_name_or_path,
            reward_funcs=[_reward(name) for name in script_args.reward_funcs or ()],
            args=training_args,
            train_dataset=dataset[script_args.dataset_train_split],
            peft_config=_peft_config(script_args),
        )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)


def _reward(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    # as TRL's grpo script: reward functions lie beside the YAML file
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(f"reward_funcs: expected a function's import path, found {name!r}: {error}") from error


def _peft_config(script_args: Any) -> Any:
    if not script_args.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=script_args.lora_r,
        lora_alpha=script_args.lora_alpha,
        target_modules=script_args.lora_target_modules,
    )
