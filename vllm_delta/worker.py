# SPDX-License-Identifier: Apache-2.0
"""What runs in each worker: a thin extension over [`Rank`].

A remote call that raises leaves vLLM's multiprocess executor out of step with its ranks for good, so no method here
ever raises: failures come back as `{"error", "kind"}`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_wire.errors import DeltaError, LayoutError
from vllm_delta.heap import leave_heap_alone

if TYPE_CHECKING:
    import torch

    from delta_wire.digest import Digest
    from vllm_delta.adapter_slot import AdapterPlan, AdapterSlot
    from vllm_delta.computed import Computed
    from vllm_delta.patcher import Patcher, Plan

logger = logging.getLogger("vllm.vllm_delta.worker")


def _answers(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            return _failure(error)

    return guarded


def _failure(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, DeltaError):
        logger.error("unexpected error", exc_info=error)
    return {"error": str(error) or repr(error), "kind": type(error).__name__}


def checkpoint_folder(model_config: Any) -> Path:
    """The folder of the checkpoint that vLLM was started with."""
    from delta_wire.checkpoint import resolve_reference

    if Path(model_config.model).is_dir():
        return Path(model_config.model)
    return resolve_reference(f"{model_config.model}@{model_config.revision or 'main'}")


class Rank:
    """One rank's share of the state machine: its patcher, one plan, and one side thread.

    Args:
        model (`torch.nn.Module`): the live model.
        vllm_config: that it was made with.
        folder (`Path`): the checkpoint it was loaded from.
        lora (*optional*): vLLM's manager of adapters.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, folder: Path, lora: Any = None):
        self._model = model
        self._vllm_config = vllm_config
        self._folder = folder
        self._patcher: Patcher | None = None
        self._lora = lora
        self._adapter: AdapterSlot | None = None
        self._plan: Plan | AdapterPlan | None = None
        # what makes, writes and takes back the plan
        self._writer: Any = None
        self._side = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delta-plan")
        self._job: tuple[int, Future[dict[str, Any]]] | None = None

    def trace(self) -> dict[str, Any]:
        """Trace the loader. Main thread, between two steps; milliseconds."""
        from delta_wire import kernels
        from delta_wire.checkpoint import Checkpoint
        from vllm_delta.computed import trace_with_computed
        from vllm_delta.orders import find_orders
        from vllm_delta.patcher import Patcher

        table = Checkpoint(self._folder).table()
        with self._without_adapters() as model:
            found = trace_with_computed(model, table)
            found.orders = find_orders(model, found.storages)
        if not found.problems:
            self._patcher = Patcher(found, table)
        return {
            "regions": [(region.tensor, region.source) for region in found.regions],
            "problems": found.problems,
            "table_sha256": table.sha256,
            "cores": kernels.bound_cores(),
        }

    def _without_adapters(self) -> AbstractContextManager[torch.nn.Module]:
        from vllm_delta.unwrapped import unwrapped

        return nullcontext(self._model) if self._lora is None else unwrapped(self._model)

    def submit(self, job: int, kind: str, *args: str) -> dict[str, Any]:
        """Start work in the side thread; nothing it does touches a live weight."""
        jobs = {
            "check": self._check,
            "digest": self._digest,
            "plan_delta": self._plan_delta,
            "plan_checkpoint": self._plan_checkpoint,
            "plan_adapter": self._plan_adapter,
            "check_adapter": self._check_adapter,
            "keep_off": self._keep_off,
            "leave_heap_alone": self._leave_heap_alone,
        }
        self._job = (job, self._side.submit(jobs[kind], *args))
        return {}

    def poll(self, job: int) -> dict[str, Any]:
        """Result of the work, `{"pending"}` while it runs."""
        if self._job is None or self._job[0] != job:
            raise LayoutError(f"this rank knows no job {job}")
        future = self._job[1]
        if not future.done():
            return {"pending": True}
        error = future.exception()
        return future.result() if error is None else _failure(error)

    @property
    def patcher(self) -> Patcher:
        if self._patcher is None:
            raise LayoutError("this rank has not traced its model, or the trace was refused")
        return self._patcher

    @property
    def adapter(self) -> AdapterSlot:
        """The slot of the run's adapter."""
        from vllm_delta.adapter_slot import AdapterSlot

        if self._adapter is None:
            self._adapter = AdapterSlot(self._lora)
        return self._adapter

    @property
    def plan(self) -> Plan | AdapterPlan:
        if self._plan is None:
            raise LayoutError("this rank holds no plan")
        return self._plan

    def _check(self) -> dict[str, Any]:
        from delta_wire import kernels

        # what is compiled here is not compiled inside a commit
        for device in self.patcher.devices:
            kernels.warm_up(device)
        parts = self.patcher.computed
        for part in parts:
            part.fill(self._folder)
        self.patcher.settle()
        return {"problems": self.patcher.sample(self._folder), "computed": [part.name for part in parts]}

    def _digest(self, share_frac: str = "1") -> dict[str, Any]:
        from vllm_delta.pace import Pace

        return {"lanes": self.patcher.digest(Pace(float(share_frac)))}

    def _plan_delta(self, path: str) -> dict[str, Any]:
        return self._planned(lambda: self.patcher.plan_delta(Path(path)))

    def _plan_checkpoint(self, folder: str) -> dict[str, Any]:
        return self._planned(lambda: self.patcher.plan_checkpoint(Path(folder)))

    def _planned(self, make: Callable[[], Plan]) -> dict[str, Any]:
        # the memory of an earlier plan goes first
        self._plan, self._writer = None, self.patcher
        self._plan = plan = make()
        plan.lanes_sha256 = hashlib.sha256(repr(plan.lanes).encode()).hexdigest()
        return {"lanes": plan.lanes, "lanes_sha256": plan.lanes_sha256, "num_changed": plan.num_changed}

    def _plan_adapter(self, folder: str, name: str) -> dict[str, Any]:
        self._plan, self._writer = None, self.adapter
        self._plan, reply = self.adapter.plan(Path(folder), name)
        return reply

    def _check_adapter(self) -> dict[str, Any]:
        return self.adapter.check()

    def _keep_off(self, *cores: str) -> dict[str, Any]:
        from delta_wire import kernels

        # from the side thread, for it and what it makes
        kernels.keep_off(map(int, cores))
        return {}

    def _leave_heap_alone(self) -> dict[str, Any]:
        leave_heap_alone()
        return {}

    def commit(self) -> dict[str, Any]:
        """Write the plan. Main thread, between two steps."""
        start = time.perf_counter()
        self._writer.commit(self.plan)
        scatter_ms = (time.perf_counter() - start) * 1000
        # a plan of an adapter has none
        lanes_sha256 = getattr(self.plan, "lanes_sha256", "")
        return {"lanes_sha256": lanes_sha256, "scatter_ms": scatter_ms, "computed": len(self._computed)}

    def undo(self) -> dict[str, Any]:
        """Take the plan back. Main thread, between two steps."""
        return {"restored": self._writer.undo(self.plan), "computed": len(self._computed)}

    def prove(self, number: int) -> dict[str, Any]:
        """Show that a computed part can be computed anew. Main thread, between two steps, on all ranks."""
        parts = self.patcher.computed[number : number + 1]
        with self._without_adapters() as model:
            reasons = {part: part.prove(model, self._vllm_config) for part in parts}
        return {"problems": {name: reason for part, reason in reasons.items() if reason for name in part.tensors}}

    def compute(self) -> dict[str, Any]:
        """Compute anew what the plan has changed the weights of. Main thread, between two steps, on all ranks.

        Only after all ranks have written: quantising a weight may need what the others hold of it.
        """
        with self._without_adapters() as model:
            for part in self._computed:
                part.rebuild(model, self._vllm_config)
        return {"restored": all(part.seal == seal for part, seal in self._computed.items())}

    @property
    def _computed(self) -> dict[Computed, Digest | None]:
        """The plan's; a plan of an adapter has none."""
        return getattr(self.plan, "computed", {})

    def release(self) -> dict[str, Any]:
        """Forget the plan and its memory."""
        self._plan = None
        return {}


class DeltaWorkerExtension:
    """Adds the remote calls of [`Rank`] to vLLM's worker, whatever its class."""

    # set by vLLM's own worker
    model_config: Any
    vllm_config: Any
    delta_rank_: Rank

    @_answers
    def delta_trace(self) -> dict[str, Any]:
        model = self.get_model()  # type: ignore[attr-defined]
        lora = getattr(getattr(self, "model_runner", None), "lora_manager", None)
        self.delta_rank_ = Rank(model, self.vllm_config, checkpoint_folder(self.model_config), lora)
        return self.delta_rank_.trace()

    @_answers
    def delta_submit(self, job: int, kind: str, *args: str) -> dict[str, Any]:
        return self.delta_rank_.submit(job, kind, *args)

    @_answers
    def delta_poll(self, job: int) -> dict[str, Any]:
        return self.delta_rank_.poll(job)

    @_answers
    def delta_commit(self) -> dict[str, Any]:
        return self.delta_rank_.commit()

    @_answers
    def delta_undo(self) -> dict[str, Any]:
        return self.delta_rank_.undo()

    @_answers
    def delta_prove(self, number: int) -> dict[str, Any]:
        return self.delta_rank_.prove(number)

    @_answers
    def delta_compute(self) -> dict[str, Any]:
        return self.delta_rank_.compute()

    @_answers
    def delta_release(self) -> dict[str, Any]:
        return self.delta_rank_.release()
