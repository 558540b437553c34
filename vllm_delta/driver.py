# SPDX-License-Identifier: Apache-2.0
"""The thread in the engine core that drives the coordinator."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import Any

from delta_wire.errors import DeltaError, SetupError
from vllm_delta.adapter_label import ADAPTER_ID
from vllm_delta.commit import Coordinator
from vllm_delta.engine import EngineStopped, VllmEngine
from vllm_delta.heap import leave_heap_alone
from vllm_delta.polling import budget
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.subscriber import Subscriber

logger = logging.getLogger("vllm.vllm_delta.driver")
_STOP_S = 5.0
# between two versions, for the estimate of what following costs
_TYPICAL_S = 10.0


class Driver:
    """Runs a coordinator beside an engine core.

    Args:
        core: vLLM's engine core.
        settings (`Settings`): of the server.
    """

    def __init__(self, core: Any, settings: Settings):
        from vllm_delta.worker import checkpoint_folder

        self._settings = settings
        self._core = core
        lora = core.vllm_config.lora_config
        self._max_loras = 0 if lora is None else lora.max_loras
        self._engine = VllmEngine(core)
        self._ranks = Ranks(self._engine)
        self._subscriber = Subscriber(settings.bucket, settings.stage_dir, settings.verifier)
        self._coordinator = Coordinator(
            self._engine,
            self._ranks,
            self._subscriber,
            settings,
            lambda: checkpoint_folder(core.vllm_config.model_config),
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="delta-driver", daemon=True)

    def start(self) -> None:
        cost = budget(self._settings.poll_s, publish_s=_TYPICAL_S, acks=self._settings.ack)
        logger.info(
            "looking at %s every %g s: up to %s for this server, with a version every %g s",
            self._settings.bucket,
            self._settings.poll_s,
            cost,
            _TYPICAL_S,
        )
        self._thread.start()

    def _run(self) -> None:
        wake = self._coordinator.wake
        unwatch = self._subscriber.watch(self._coordinator.hint)
        is_settled = False
        try:
            while not self._stop.is_set():
                wait_s = self._coordinator.step()
                if self._coordinator.attached and not is_settled:
                    is_settled = True
                    self._leave_heaps_alone()
                wake.wait(wait_s)
                wake.clear()
        except EngineStopped:
            pass
        finally:
            if unwatch is not None:
                unwatch()
            self._subscriber.close()

    def _leave_heaps_alone(self) -> None:
        """Here and on all ranks, once all that following needs has been loaded."""
        try:
            self._ranks.job("leave_heap_alone")
        except DeltaError as error:
            logger.warning("garbage collections may hold tokens up: %s", error)
        leave_heap_alone()

    def stop(self) -> None:
        """Stop following; waits a moment for a staging in progress."""
        self._stop.set()
        self._engine.stop()
        self._coordinator.wake.set()
        self._thread.join(_STOP_S)

    def status(self) -> dict[str, Any]:
        return self._coordinator.status.to_json()

    def suspect(self, reason: str) -> None:
        """Something else may have written weights. In the engine's thread: no step runs until they are proven."""
        self._coordinator.suspect(reason)

    def require_foreign(self, lora_id: int) -> None:
        """Raise [`SetupError`] if something else is about to change the run's adapter."""
        if self._coordinator.adapter.position is not None and lora_id == ADAPTER_ID:
            raise SetupError(
                f"this adapter follows {self._settings.bucket}, whose versions are the only ones that are loaded as "
                "it; load another adapter under another name"
            )

    def require_room(self, lora_id: int) -> None:
        """Raise [`SetupError`] unless another adapter fits beside the run's. In the engine's thread.

        vLLM puts requests for as many adapters into a step as it has slots, and the run's keeps one of them.
        """
        if self._coordinator.adapter.position is None:
            return
        others = self._core.list_loras() - {ADAPTER_ID, lora_id}
        if len(others) + 1 >= self._max_loras:
            raise SetupError(
                f"of the server's {self._max_loras} slots for adapters one is that of the run in "
                f"{self._settings.bucket} and {len(others)} are taken; start with --max-loras "
                f"{len(others) + 2} or more to load another one, or unload one"
            )

    def hold_on(self) -> None:
        """The scheduler was resumed. In the engine's thread."""
        self._engine.hold_on()

    def verify(self) -> Future[dict[str, Any]]:
        return self._coordinator.verify()
