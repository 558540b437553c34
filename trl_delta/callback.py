# SPDX-License-Identifier: Apache-2.0
"""The callback: `Trainer(..., callbacks=[DeltaSyncCallback(bucket="...")])`."""

from __future__ import annotations

import inspect
import os

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils
from transformers.trainer_callback import CallbackHandler

from trl_delta.config import DeltaSyncConfig
from trl_delta.resume import Resumed
from trl_delta.session import DeltaSyncSession

# under which a trainer's checkpoint says what had been published
STATE_KEY = "DeltaSync"
BUCKET_VARIABLE = "DELTA_SYNC_BUCKET"


class DeltaSyncCallback(TrainerCallback):
    """Publishes the weights of any [`~transformers.Trainer`] after its optimizer steps.

    Args:
        bucket (`str`, *optional*): address of the bucket, by which the servers know it. May be given by the config
            instead.
        config ([`DeltaSyncConfig`], *optional*): settings; those in the trainer's own arguments if they have any.

    Example:

    ```python
    trainer = GRPOTrainer(..., callbacks=[DeltaSyncCallback(bucket="/mnt/shared/run-1")])
    ```
    """

    def __init__(self, bucket: str | None = None, config: DeltaSyncConfig | None = None):
        self._bucket = bucket
        self._config = config
        self._session: DeltaSyncSession | None = None

    @property
    def session(self) -> DeltaSyncSession:
        """What publishes; [`~delta_wire.errors.SetupError`] if no bucket is known."""
        if self._session is None:
            config = self._config or DeltaSyncConfig()
            self._session = DeltaSyncSession(config.require_bucket(self._bucket), config)
        return self._session

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if self._config is None and isinstance(args, DeltaSyncConfig):
            self._config = args
        # a missing bucket is said now and not after the model has been loaded and the data prepared
        _ = self.session
        _move_ahead(self)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.session.start(
            kwargs["model"],
            processing_class=kwargs.get("processing_class"),
            step=state.global_step,
            world_size=args.world_size,
            resumed=_resumed(state),
        )
        self._note(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.session.step(state.global_step)
        # part of trainer_state.json in every checkpoint
        self._note(state)

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

    def _note(self, state: TrainerState) -> None:
        # in the form of transformers' own callbacks with a state, which ignore what is none of theirs
        state.stateful_callbacks[STATE_KEY] = {"args": {}, "attributes": self.session.resume_state()}  # pyright: ignore


class DeltaSyncReport(DeltaSyncCallback):
    """What `report_to: [delta_sync]` means: the bucket comes from `DELTA_SYNC_BUCKET` in the environment, or from
    [`DeltaSyncConfig`] in the trainer's arguments."""

    def __init__(self):
        super().__init__(os.environ.get(BUCKET_VARIABLE) or None)


def _resumed(state: TrainerState) -> Resumed | None:
    found = (state.stateful_callbacks or {}).get(STATE_KEY)  # pyright: ignore[reportAttributeAccessIssue]
    return Resumed.parse(found.get("attributes")) if isinstance(found, dict) else None


def _move_ahead(callback: TrainerCallback) -> None:
    """Put a callback at the head of its trainer's list.

    The metrics must be in a log line before the integrations of `report_to` read it, and those stand before the user's
    callbacks. No event hands the list over, so it is taken from the handler that is calling.
    """
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)
            return
        frame = frame.f_back


# transformers looks the names of report_to up here, in every trainer's constructor
integration_utils.INTEGRATION_TO_CALLBACK["delta_sync"] = DeltaSyncReport
