# SPDX-License-Identifier: Apache-2.0
"""The engine core as the coordinator sees it: run something between two steps, ask all ranks, label, caches, pause."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from delta_wire.errors import SetupError
from vllm_delta.cache import renew
from vllm_delta.settings import CachePolicy

logger = logging.getLogger("vllm.vllm_delta.engine")
T = TypeVar("T")

# request type of the items that the wrapped engine loop runs between two steps
BETWEEN_STEPS = object()
_LOOK_S = 0.5


class EngineStopped(Exception):
    """The engine shuts down; whoever waits for it gives up."""


class Engine(Protocol):
    """What the coordinator needs. All but `between_steps` may only be used inside of it."""

    def between_steps(self, action: Callable[[], T]) -> T:
        """Run an action in the engine's thread between two steps and wait for its result."""
        ...

    def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of the worker extension on all ranks; their answers in order of rank."""
        ...

    def drain(self) -> None:
        """Finish the batches that are already with the ranks."""
        ...

    def set_label(self, label: str) -> None:
        """Label what is generated from now on."""
        ...

    def renew_caches(self, policy: CachePolicy, label: str) -> None:
        """Apply the cache policy."""
        ...

    def pause(self) -> None:
        """Generate nothing until `resume`; requests wait."""
        ...

    def resume(self) -> None:
        """Generate again."""
        ...


class VllmEngine:
    """[`Engine`] over vLLM's `EngineCoreProc`.

    Args:
        core: the engine core of this process.
    """

    def __init__(self, core: Any):
        self._core = core
        self._stopping = threading.Event()
        self._held: Any = None

    def stop(self) -> None:
        self._stopping.set()

    def between_steps(self, action: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def item() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(action())
                except Exception as error:
                    future.set_exception(error)

        self._core.input_queue.put_nowait((BETWEEN_STEPS, item))
        while True:
            try:
                return future.result(timeout=_LOOK_S)
            except TimeoutError:
                if future.done():
                    raise
                if self._stopping.is_set() and future.cancel():
                    raise EngineStopped from None

    def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        if self._core.model_executor.is_sleeping:
            raise SetupError("the engine sleeps and its weights may be gone; this goes on when it wakes up")
        return self._core.collective_rpc(method, args=args)

    def drain(self) -> None:
        # With pipeline stages or asynchronous scheduling, batches of the old weights are still on their way: their
        # outputs would be labelled with the new version. Nothing new is scheduled until they are in.
        core = self._core
        if not core.batch_queue:
            return
        from vllm.v1.core.sched.interface import PauseState

        before = core.scheduler.pause_state
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                core._process_engine_step()
        finally:
            core.scheduler.set_pause_state(before)

    def set_label(self, label: str) -> None:
        self._core.set_weight_version(label)

    def renew_caches(self, policy: CachePolicy, label: str) -> None:
        renew(self._core, policy, label)

    def pause(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        if self._held is None:
            self._held = self._core.scheduler.pause_state
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)

    def hold_on(self) -> None:
        """Somebody resumed the scheduler: stay paused if we need it, and let theirs be what `resume` goes back to."""
        if self._held is not None:
            self._held = self._core.scheduler.pause_state
            self.pause()

    def resume(self) -> None:
        if self._held is not None:
            self._core.scheduler.set_pause_state(self._held)
            self._held = None
