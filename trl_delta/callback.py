# SPDX-License-Identifier: Apache-2.0
"""The callback: `Trainer(..., callbacks=[DeltaSyncCallback(bucket="...")])`."""

from __future__ import annotations

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_delta.config import DeltaSyncConfig
from trl_delta.session import DeltaSyncSession


class DeltaSyncCallback(TrainerCallback):
    """Publishes the weights of any [`~transformers.Trainer`] after its optimizer steps.

    Args:
        bucket (`str`, *optional*): address of the bucket, a folder that trainer and servers reach. May be given by the
            config instead.
        config ([`DeltaSyncConfig`], *optional*): settings.

    Example:

    ```python
    trainer = GRPOTrainer(..., callbacks=[DeltaSyncCallback(bucket="/mnt/shared/run-1")])
    ```
    """

    def __init__(self, bucket: str | None = None, config: DeltaSyncConfig | None = None):
        config = config or DeltaSyncConfig()
        self.session = DeltaSyncSession(config.require_bucket(bucket), config)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.session.start(
            kwargs["model"],
            processing_class=kwargs.get("processing_class"),
            step=state.global_step,
            world_size=args.world_size,
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.session.step(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs,
    ):
        # evaluation and the summary at the end of training are logged too; only a step's line gets the metrics
        if logs is None or "loss" not in logs or not self.session.started:
            return
        metrics = self.session.metrics()
        logs.update(metrics)
        # the trainer has copied the line already
        if state.log_history:
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.session.finish()
