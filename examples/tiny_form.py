# SPDX-License-Identifier: Apache-2.0
"""The examples for GPUs in a form that takes a minute on a CPU: few short answers, and a model that is made here."""

from __future__ import annotations

from typing import Any

STEPS = 3
# of TRL's AsyncGRPOConfig
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": 3e-6,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    # batches of a fixed number of samples
    "token_budget": 0,
    # what is generated ahead is stale when it is trained on
    "max_inflight_tasks": 4,
    "queue_maxsize": 4,
    "max_staleness": STEPS + 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": [],
    "seed": 0,
}


def add_option(parser: Any) -> None:
    """`--tiny`."""
    parser.add_argument(
        "--tiny",
        action="store_true",
        help=f"{STEPS} short steps on the CPU; --model is a generated one: `python examples/prepare_model.py --help`",
    )
