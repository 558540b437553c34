# SPDX-License-Identifier: Apache-2.0
"""Taking over the weight transfer of TRL's AsyncGRPOTrainer: `attach(trainer, bucket="...")`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from delta_wire.errors import SetupError
from trl_delta.acks import RolloutLabels
from trl_delta.callback import DeltaSyncCallback
from trl_delta.config import DeltaSyncConfig
from trl_delta.session import DeltaSyncSession

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def attach(trainer: Any, bucket: str | None = None, config: DeltaSyncConfig | None = None) -> DeltaSyncCallback:
    """Let a trainer's weights travel through a bucket only. Call between its construction and `train()`.

    No NCCL group is made and no weight is pushed; rollouts are labelled with the newest version number whose weights
    the servers have acknowledged.

    Args:
        trainer (`AsyncGRPOTrainer`): of TRL 1.14 to 1.16, on one process.
        bucket (`str`, *optional*): address of the bucket, a folder that trainer and servers reach. May be given by the
            config instead.
        config ([`DeltaSyncConfig`], *optional*): settings.

    Returns:
        [`DeltaSyncCallback`]: the callback, already part of the trainer; its `session` tells what was published and is
        served.
    """
    _require_async_grpo(trainer)
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(callback, DeltaSyncCallback) for callback in callbacks):
        raise SetupError(
            "attach: the trainer has a DeltaSyncCallback already; give the bucket to attach() only, it adds its own"
        )
    callback = DeltaSyncCallback(bucket, config)
    session = callback.session
    # first: its extraction must come before TRL's sync announces the step, its start before TRL's cold sync, and its
    # metrics before anybody reads the log line
    callbacks.insert(0, callback)
    trainer.weight_transfer = DeltaWeightTransfer(session, trainer.accelerator.num_processes)
    worker = trainer.rollout_worker
    labels = RolloutLabels(worker.update_model_version, lambda: trainer.state.global_step)
    # on the object and not by a stand-in: TRL asks for the worker's type before it saves or resumes
    worker.update_model_version = labels.announce
    trainer.weight_transfer.labels = labels
    return callback


class DeltaWeightTransfer:
    """TRL's weight-transfer protocol with nothing to transfer: the callback has published before TRL syncs.

    Args:
        session ([`DeltaSyncSession`]): of the callback.
        num_processes (`int`): training processes.
    """

    def __init__(self, session: DeltaSyncSession, num_processes: int):
        self.session = session
        self.labels: RolloutLabels | None = None
        self._num_processes = num_processes

    def init_weight_transfer(self) -> None:
        """Called by TRL when training begins, before its first sync and before the first rollout."""
        session, config = self.session, self.session.config
        if not session.started:
            raise SetupError(
                "delta weight sync has not started before the trainer's first sync; another callback has moved "
                "DeltaSyncCallback from the head of the trainer's list. Call attach() last."
            )
        if self.labels is not None:
            session.watcher.add_listener(self.labels.acknowledged)
        seq, timeout_s = session.publisher.durable_seq, config.delta_sync_start_timeout_s
        # as TRL's own transfer waits here for its server: rollouts of a server with unknown weights are worth nothing
        if timeout_s > 0 and not session.watcher.wait_for(seq, timeout_s):
            raise SetupError(self._nobody_serves(seq, timeout_s))

    def pause(self) -> None:
        """Nothing to pause: servers commit between two of their own steps."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Leave the weights where they are; with several processes take part in what the others gather."""
        if self._num_processes > 1:
            for _ in iterator:
                pass

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """Called by TRL when training ends, also by an error."""
        self.session.close()

    def _nobody_serves(self, seq: int, timeout_s: float) -> str:
        expected, bucket = self.session.config.delta_sync_expected_servers, self.session.bucket
        found = [
            f"{server} serves {ack.version} and is {ack.state}" + (f" ({ack.reason})" if ack.reason else "")
            for server, ack in self.session.watcher.servers.items()
        ]
        return (
            f"{bucket}: expected {expected} server(s) to serve version {seq} within {timeout_s:.0f} s "
            f"(delta_sync_start_timeout_s), found {'; '.join(found) or 'none'}. Start 'vllm serve MODEL "
            f"--worker-extension-cls vllm_delta.DeltaWorkerExtension' with DELTA_SYNC_BUCKET={bucket} in its "
            "environment, or look at its log."
        )


def _require_async_grpo(trainer: Any) -> None:
    """The one place that knows which trainers can be attached to.

    TRL 1.14 to 1.16 take `weight_transfer` in the constructor of AsyncGRPOTrainer and read the attribute of that name
    at every sync (https://github.com/huggingface/trl/pull/6269).
    """
    kind = type(trainer).__name__
    if "weight_transfer" not in inspect.signature(type(trainer).__init__).parameters:
        raise SetupError(
            f"attach: {kind} has no weight transfer that can be replaced; this release attaches to AsyncGRPOTrainer "
            "of TRL 1.14 to 1.16. Any other trainer can publish with callbacks=[DeltaSyncCallback(bucket=...)], its "
            "own weight sync stays as it is."
        )
    if trainer.accelerator.num_processes > 1:
        raise SetupError(
            f"attach: {kind} runs on {trainer.accelerator.num_processes} processes, which is not supported yet in "
            "this release; train on one process"
        )
    if isinstance(trainer.weight_transfer, DeltaWeightTransfer):
        raise SetupError("attach: the trainer is attached already")
    if vars(trainer).get("_lora_sync"):
        raise SetupError("attach: PEFT adapters are not supported yet in this release; train the full model")
