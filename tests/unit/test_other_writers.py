# SPDX-License-Identifier: Apache-2.0
"""What else changes the weights of a server: sleep at level 2, which discards them, and vLLM's own ways to write them.

vLLM's CPU build ignores sleep in its workers, so no server of these tests can lose its weights that way. Here vLLM's
own engine core and executor fall asleep and wake up, over ranks that do discard them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import FakeWorker, as_loaded, parameters_of, write_checkpoint
from training import Training
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.abstract import Executor

from delta_wire.checkpoint import Checkpoint
from vllm_delta.commit import Coordinator
from vllm_delta.engine import BETWEEN_STEPS, VllmEngine
from vllm_delta.plugin import _watch_writers
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.subscriber import Subscriber


class Ranked:
    """vLLM's executor as far as it sleeps and wakes; level 2 leaves nothing of the weights."""

    sleep = Executor.sleep
    wake_up = Executor.wake_up
    is_sleeping = Executor.is_sleeping

    def __init__(self, workers: list[FakeWorker]):
        self.workers = workers
        self.sleeping_tags: set[str] = set()

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        if method == "sleep":
            assert kwargs == {"level": 2}
            return [[param.data.zero_() for param in worker.model.parameters()] and None for worker in self.workers]
        if method in ("reload_weights", "update_weights"):
            # what the server was started on, but not all of it
            bits = {name: kwargs["base"].bits(name) for name in kwargs["base"].table()}
            for rank, worker in enumerate(self.workers):
                base = as_loaded(bits, rank, len(self.workers))
                worker.model.load_state_dict({"o": base.state_dict()["o"]}, strict=False)
            raise RuntimeError("the disk is full")
        if method == "wake_up":
            return [None for _ in self.workers]
        return [getattr(worker, method)(*args) for worker in self.workers]


class Scheduler:
    pause_state = PauseState.UNPAUSED

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def finish_requests(self, *_: Any) -> list[Any]:
        return []


class Core(EngineCoreProc):
    """vLLM's engine core without a model: its loop runs what is put into its queue."""

    def __init__(self, workers: list[FakeWorker]):
        self.model_executor: Any = Ranked(workers)
        self.scheduler: Any = Scheduler()
        self.batch_queue = None
        self.input_queue: Any = Queue()
        self.vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False))
        self._loop = threading.Thread(target=self._run, daemon=True)
        self._loop.start()

    def _run(self) -> None:
        while (item := self.input_queue.get()) is not None:
            kind, action = item
            assert kind is BETWEEN_STEPS
            action()

    def stop(self) -> None:
        self.input_queue.put(None)
        self._loop.join(30)

    def _send_abort_outputs(self, aborted_reqs: list[Any]) -> None:
        assert not aborted_reqs

    def _pause_complete(self) -> bool:
        return True

    def _finish_pause(self, clear_cache: bool) -> None:
        assert clear_cache

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        return True


_watch_writers(Core)


class Server:
    """A coordinator over vLLM's engine core, and the run that it follows."""

    def __init__(self, folder: Path):
        self.training = Training(write_checkpoint(folder / "base"), folder / "bucket", changed_frac=0.1)
        self.writer = self.training.start()
        self.workers = [FakeWorker(self.training.base, rank, 2) for rank in range(2)]
        self.core = Core(self.workers)
        self.engine = VllmEngine(self.core)
        self.coordinator = Coordinator(
            self.engine,
            Ranks(self.engine),
            Subscriber(str(folder / "bucket"), folder),
            Settings(str(folder / "bucket"), stage_dir=folder, server_id="one", cache_policy="keep"),
            lambda: self.training.base,
        )
        driver = SimpleNamespace(suspect=self.coordinator.suspect, hold_on=self.engine.hold_on)
        self.core.delta_driver = driver  # type: ignore[attr-defined]

    def step(self) -> dict[str, Any]:
        self.coordinator.step()
        return self.coordinator.status.to_json()

    def asked(self, request: Callable[[], Any]) -> None:
        """A request to the engine core, which its loop carries out."""
        self.engine.between_steps(request)

    @property
    def paused(self) -> bool:
        return self.core.scheduler.pause_state is not PauseState.UNPAUSED

    def holds_newest(self) -> bool:
        loaded = [as_loaded(self.training.bits, rank, 2) for rank in range(2)]
        return [parameters_of(worker.model) for worker in self.workers] == [parameters_of(model) for model in loaded]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.training.publish(server.writer)
    assert server.step()["seq"] == 1 and server.holds_newest()
    yield server
    server.core.stop()


@pytest.mark.parametrize("news", [False, True])
def test_weights_that_sleep_has_discarded_are_noticed_and_healed(server: Server, news: bool):
    server.asked(lambda: server.core.sleep(level=2))
    assert server.paused and not server.holds_newest()
    if news:
        server.training.publish(server.writer)
        asleep = server.step()
        assert asleep["state"] == "degraded" and "sleeps" in asleep["reason"] and asleep["seq"] == 1
    server.asked(lambda: server.core.wake_up())
    # vLLM would generate from here on
    assert server.paused and not server.holds_newest()
    noticed = server.step()
    assert noticed["state"] == "degraded" and "the engine slept" in noticed["reason"] and server.paused
    healed = server.step()
    assert (healed["state"], healed["seq"]) == ("serving", 1 + news)
    assert healed["digest"] == str(server.training.digest)
    assert server.holds_newest() and not server.paused


@pytest.mark.parametrize("method", ["reload_weights", "update_weights"])
def test_weights_that_somebody_else_writes_half_way_are_noticed_and_healed(server: Server, method: str):
    with pytest.raises(RuntimeError, match="disk is full"):
        server.asked(lambda: server.core.collective_rpc(method, kwargs={"base": Checkpoint(server.training.base)}))
    assert server.paused and not server.holds_newest()
    # somebody who resumes the scheduler does not end the pause
    server.asked(lambda: server.core.resume_scheduler())
    assert server.paused
    noticed = server.step()
    assert (
        noticed["state"] == "degraded" and f"{method} was called from outside" in noticed["reason"] and server.paused
    )
    healed = server.step()
    assert (healed["state"], healed["seq"]) == ("serving", 1)
    assert server.holds_newest() and not server.paused


def test_a_nap_that_kept_the_weights_is_over_when_they_are_proven(server: Server):
    server.core.model_executor.collective_rpc = lambda method, **_: None
    server.asked(lambda: server.core.sleep(level=2))
    server.asked(lambda: server.core.wake_up())
    del server.core.model_executor.collective_rpc
    assert server.paused
    status = server.step()
    assert (status["state"], status["seq"], status["refused_total"]) == ("serving", 1, 0)
    assert server.holds_newest() and not server.paused


def test_batches_that_old_weights_compute_come_in_before_the_commit_and_nothing_is_scheduled_meanwhile(
    server: Server,
):
    core = server.core
    old = core.get_weight_version()
    on_their_way = core.batch_queue = deque(["first", "second"])
    came_in = []

    def process() -> None:
        # what vLLM labels the outputs with, and whether it may schedule
        came_in.append((on_their_way.popleft(), core.get_weight_version(), core.scheduler.pause_state))
        assert not server.holds_newest()

    core._process_engine_step = process  # type: ignore[assignment]
    server.training.publish(server.writer)
    assert server.step()["seq"] == 2 and server.holds_newest()
    assert came_in == [(batch, old, PauseState.PAUSED_ALL) for batch in ("first", "second")]
    assert core.get_weight_version() != old and not server.paused

    def fail() -> None:
        raise RuntimeError("a stage is gone")

    on_their_way.append("third")
    core._process_engine_step = fail  # type: ignore[assignment]
    server.training.publish(server.writer)
    failed = server.step()
    assert (failed["state"], failed["seq"]) == ("degraded", 2) and "a stage is gone" in failed["reason"]
    assert not server.paused
