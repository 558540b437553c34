# SPDX-License-Identifier: Apache-2.0
"""Taking over the weight transfer of TRL's trainers: `attach(trainer, bucket="...")`."""

from __future__ import annotations

import importlib
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

    On several processes (DDP, FSDP2) all of them call it. As in TRL the first one alone has to do with the servers;
    every one publishes what it owns, and no weight is gathered.

    Args:
        trainer (`AsyncGRPOTrainer` or `GRPOTrainer`): of TRL 1.14 to 1.16.
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
    trainer._sync_weight_merged = AsyncSync(session, trainer)
    if trainer.accelerator.is_main_process:
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
        self._labels: RolloutLabels | None = None

    def bind(self, session: DeltaSyncSession, trainer: Any) -> None:
        """Make it the transfer of a trainer whose callback drives the session."""
        self._session = session
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

    def pause(self) -> None:
        """Called by TRL before each sync. Servers commit between two of their own steps and need no pause."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Leave the weights where they are."""

    def resume(self) -> None:
        """Called by TRL after each sync."""

    def destroy(self) -> None:
        """Called by TRL when training ends, also by an error."""
        if self._session is not None:
            self._session.close()


class AsyncSync:
    """Stands in for `AsyncGRPOTrainer._sync_weight_merged` on every process: TRL's own, with no weight touched.

    TRL gathers sharded weights one by one to send them, and merges adapters into the base weights for the time of a
    sync and subtracts them again, which moves a base in bf16 a little each time. Nobody reads either here.

    Args:
        session ([`DeltaSyncSession`]): of the callback.
        trainer (`AsyncGRPOTrainer`): not training yet.
    """

    def __init__(self, session: DeltaSyncSession, trainer: Any):
        self.session = session
        self._model = trainer.accelerator.unwrap_model(trainer.model)
        self._sync = trainer._sync_weight_merged
        self._first = True
        trainer._streaming_iter = _no_weights

    def __call__(self, *args: Any) -> Any:
        if self._first:
            # as TRL's own transfer waits for its server: rollouts of a server with unknown weights are worth nothing
            self.session.require_served()
            self._first = False
        with _adapters_left(self._model):
            return self._sync(*args)


def _no_weights() -> Iterator[tuple[str, torch.Tensor]]:
    return iter(())


@contextmanager
def _adapters_left(model: Any) -> Iterator[None]:
    """PEFT merges nothing in this context."""
    if not is_peft_model(model):
        yield
        return
    model.merge_adapter = model.unmerge_adapter = _leave_adapters
    try:
        yield
    finally:
        del model.merge_adapter, model.unmerge_adapter


def _leave_adapters(*args: Any, **kwargs: Any) -> None:
    """Stands in for PEFT's merge during a sync."""


class ServerSync:
    """Stands in for `VLLMGeneration.sync_weights`, which TRL calls on every process before it generates with new
    weights; the first process then generates for all.

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
            session.require_served()
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

    AsyncGRPOTrainer of TRL 1.14 to 1.16 reads the attribute `weight_transfer` at every sync
    (https://github.com/huggingface/trl/pull/6269), which is its `_sync_weight_merged` over its `_streaming_iter`. GRPO
    and its kin call `vllm_generation.sync_weights()`.
    """
    if all(hasattr(trainer, name) for name in ("weight_transfer", "_sync_weight_merged", "_streaming_iter")):
        return "weight_transfer"
    generation = getattr(trainer, "vllm_generation", None)
    if getattr(generation, "mode", None) == "server" and callable(getattr(generation, "sync_weights", None)):
        return "vllm_generation"
    return None


def _ask_for_adapter(trainer: Any, seam: str, config: DeltaSyncConfig) -> None:
    """Rollouts of a run that publishes an adapter are those of the adapter and not of its base."""
    # the first process asks
    if config.delta_sync_adapter != "separate" or not trainer.accelerator.is_main_process:
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
    bound = getattr(trainer, "weight_transfer", None)
    if isinstance(bound, DeltaWeightTransfer) and bound._session is not None:
        raise SetupError("attach: the trainer is attached already")
    if vars(trainer).get("_lora_sync"):
        raise SetupError(
            "attach: the trainer has agreed with its server on sending adapters itself; pass "
            "weight_transfer=DeltaWeightTransfer() to its constructor"
        )
    return seam
