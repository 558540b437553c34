# SPDX-License-Identifier: Apache-2.0
"""Taking over the weight transfer of TRL's trainers: `attach(trainer, bucket="...")`."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from delta_wire.errors import SetupError
from trl_delta.acks import RolloutLabels
from trl_delta.callback import DeltaSyncCallback
from trl_delta.config import DeltaSyncConfig
from trl_delta.rollouts import record_versions
from trl_delta.session import DeltaSyncSession
from trl_delta.wrappers import is_peft_model

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def attach(trainer: Any, bucket: str | None = None, config: DeltaSyncConfig | None = None) -> DeltaSyncCallback:
    """Let a trainer's weights travel through a bucket only. Call between its construction and `train()`.

    AsyncGRPO: no NCCL group is made and no weight is pushed; rollouts are labelled with the newest version number
    whose weights the servers have acknowledged. GRPO in vLLM server mode: generation waits until the servers serve the
    weights of its step (see `delta_sync_max_lag_versions`); construct the trainer inside [`server_mode`].

    Args:
        trainer (`AsyncGRPOTrainer` or `GRPOTrainer`): of TRL 1.14 to 1.16, on one process.
        bucket (`str`, *optional*): address of the bucket, by which the servers know it. May be given by the config
            instead.
        config ([`DeltaSyncConfig`], *optional*): settings; those in the trainer's own arguments if they have any.

    Returns:
        [`DeltaSyncCallback`]: the callback, already part of the trainer; its `session` tells what was published and is
        served.
    """
    seam = _require_seam(trainer)
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(callback, DeltaSyncCallback) for callback in callbacks):
        raise SetupError(
            "attach: the trainer has a DeltaSyncCallback already; give the bucket to attach() only, it adds its own"
        )
    if config is None and isinstance(trainer.args, DeltaSyncConfig):
        config = trainer.args
    callback = DeltaSyncCallback(bucket, config)
    session = callback.session
    # first: its extraction must come before TRL's sync announces the step, its start before TRL's cold sync, and its
    # metrics before anybody reads the log line
    callbacks.insert(0, callback)
    _ask_for_adapter(trainer, seam, session.config)
    if seam == "vllm_generation":
        trainer.vllm_generation.sync_weights = ServerSync(session)
        return callback
    transfer = DeltaWeightTransfer()
    transfer.bind(session, trainer)
    trainer.weight_transfer = transfer
    return callback


class DeltaWeightTransfer:
    """TRL's weight-transfer protocol with nothing to transfer: the callback has published before TRL syncs.

    Made by [`attach`]. Pass one of your own as `weight_transfer=` to an AsyncGRPOTrainer with a `peft_config`, whose
    constructor otherwise asks the server how adapters are to travel, and call [`attach`] then.
    """

    def __init__(self):
        self._session: DeltaSyncSession | None = None
        self._model: Any = None
        self._num_processes = 1
        self._labels: RolloutLabels | None = None

    def bind(self, session: DeltaSyncSession, trainer: Any) -> None:
        """Make it the transfer of a trainer whose callback drives the session."""
        self._session = session
        self._model = trainer.accelerator.unwrap_model(trainer.model)
        self._num_processes = trainer.accelerator.num_processes
        worker = trainer.rollout_worker
        self._labels = RolloutLabels(worker.update_model_version, lambda: trainer.state.global_step)
        # on the object and not by a stand-in: TRL asks for the worker's type before it saves or resumes
        worker.update_model_version = self._labels.announce
        record_versions(worker)

    @property
    def session(self) -> DeltaSyncSession:
        if self._session is None:
            raise SetupError("DeltaWeightTransfer: call attach(trainer, bucket=...) between construction and train()")
        return self._session

    def init_weight_transfer(self) -> None:
        """Called by TRL when training begins, before its first sync and before the first rollout."""
        session = self.session
        if not session.started:
            raise SetupError(
                "delta weight sync has not started before the trainer's first sync; another callback has moved "
                "DeltaSyncCallback from the head of the trainer's list. Call attach() last."
            )
        if self._labels is not None:
            session.watcher.add_listener(self._labels.acknowledged)
        # as TRL's own transfer waits here for its server: rollouts of a server with unknown weights are worth nothing
        session.pace.require_served(session.publisher.durable_seq, session.config.delta_sync_start_timeout_s)

    def pause(self) -> None:
        """Called by TRL before each sync. Servers have nothing to pause, they commit between two of their own steps.

        TRL merges adapters into the base weights for the time of a sync and subtracts them again, which moves a base
        in bf16 a little each time. Nobody reads what it merges here, so that is left out.
        """
        if is_peft_model(self._model):
            self._model.merge_adapter = self._model.unmerge_adapter = _leave_adapters

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Leave the weights where they are; with several processes take part in what the others gather."""
        if self._num_processes > 1:
            for _ in iterator:
                pass

    def resume(self) -> None:
        """Called by TRL after each sync."""
        for name in ("merge_adapter", "unmerge_adapter"):
            if self._model is not None and vars(self._model).get(name) is _leave_adapters:
                delattr(self._model, name)

    def destroy(self) -> None:
        """Called by TRL when training ends, also by an error."""
        self.resume()
        if self._session is not None:
            self._session.close()


def _leave_adapters(*args: Any, **kwargs: Any) -> None:
    """Stands in for PEFT's merge during a sync."""


class ServerSync:
    """Stands in for `VLLMGeneration.sync_weights`, which TRL calls before it generates with new weights.

    Args:
        session ([`DeltaSyncSession`]): of the callback.
    """

    def __init__(self, session: DeltaSyncSession):
        self.session = session
        self._first = True

    def __call__(self) -> None:
        session = self.session
        if not session.started:
            raise SetupError(
                "delta weight sync has not started before the trainer generates; train with trainer.train() before "
                "anything else makes completions"
            )
        if self._first:
            session.pace.require_served(session.publisher.durable_seq, session.config.delta_sync_start_timeout_s)
            self._first = False
        session.sync()


@contextmanager
def server_mode() -> Iterator[None]:
    """Construct a `GRPOTrainer` with `use_vllm=True, vllm_mode="server"` inside this context to [`attach`] it.

    Its constructor joins the servers' NCCL group, which takes a GPU and servers that were started for it. Weights that
    travel through a bucket need neither.
    """
    generation: Any = importlib.import_module("trl.generation.vllm_generation")
    client = generation.VLLMClient

    class WithoutGroup(client):
        def init_communicator(self, device: Any = 0) -> None:
            """No group to join."""

        def get_server_info(self) -> dict[str, Any]:
            # asked for one thing only, and answered by servers in development mode only, which this does not take
            try:
                return super().get_server_info()
            except RuntimeError as error:
                logger.warning(
                    "delta sync: %s TRL's importance sampling correction expects --logprobs-mode processed_logprobs, "
                    "which cannot be checked without; start the server with it.",
                    error,
                )
                return {"model_config": {"logprobs_mode": "processed_logprobs"}, "weight_transfer_config": None}

    generation.VLLMClient = WithoutGroup
    try:
        yield
    finally:
        generation.VLLMClient = client


def attachable(trainer: Any) -> str | None:
    """What of a trainer [`attach`] would replace; the one place that knows which trainers have such a seam.

    TRL 1.14 to 1.16 take `weight_transfer` in the constructor of AsyncGRPOTrainer and read the attribute of that name
    at every sync (https://github.com/huggingface/trl/pull/6269). GRPO and its kin call
    `vllm_generation.sync_weights()`.
    """
    if "weight_transfer" in inspect.signature(type(trainer).__init__).parameters or hasattr(
        trainer, "weight_transfer"
    ):
        return "weight_transfer"
    generation = getattr(trainer, "vllm_generation", None)
    if getattr(generation, "mode", None) == "server" and callable(getattr(generation, "sync_weights", None)):
        return "vllm_generation"
    return None


def _ask_for_adapter(trainer: Any, seam: str, config: DeltaSyncConfig) -> None:
    """Rollouts of a run that publishes an adapter are those of the adapter and not of its base."""
    if config.delta_sync_adapter != "separate":
        return
    if seam == "vllm_generation":
        trainer.vllm_generation.vllm_client.model = config.delta_sync_adapter_name
    else:
        trainer.rollout_worker.model_name = config.delta_sync_adapter_name


def _require_seam(trainer: Any) -> str:
    kind, seam = type(trainer).__name__, attachable(trainer)
    if seam is None:
        raise SetupError(
            f"attach: {kind} has no weight transfer that can be replaced; this release attaches to AsyncGRPOTrainer "
            "of TRL 1.14 to 1.16 and to GRPOTrainer in vLLM server mode. Any other trainer can publish with "
            "callbacks=[DeltaSyncCallback(bucket=...)], its own weight sync stays as it is."
        )
    if trainer.accelerator.num_processes > 1:
        raise SetupError(
            f"attach: {kind} runs on {trainer.accelerator.num_processes} processes, which is not supported yet in "
            "this release; train on one process"
        )
    bound = getattr(trainer, "weight_transfer", None)
    if isinstance(bound, DeltaWeightTransfer) and bound._session is not None:
        raise SetupError("attach: the trainer is attached already")
    if vars(trainer).get("_lora_sync"):
        raise SetupError(
            "attach: the trainer has agreed with its server on sending adapters itself; pass "
            "weight_transfer=DeltaWeightTransfer() to its constructor"
        )
    return seam
