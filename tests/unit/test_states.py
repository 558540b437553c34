# SPDX-License-Identifier: Apache-2.0
"""Every state that a server can get into, and everything that can happen in it.

A deterministic scheduler stands at every point where the coordinator meets the outside: each remote call, each look
into the bucket, each staged file, the caches. What happens there is its choice. From the start the test explores: in
every state not seen before it tries every event, alone and together with one failure at each point that the next step
passes. After every action in the engine, generation is either paused or the weights of all ranks are, bit for bit, the
version that the label says; and from every state the server comes back by itself to the newest version.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import torch
from fake_server import FakeEngine, FakeWorker, as_loaded, write_checkpoint
from half_written import run_half
from training import Training

from delta_wire.errors import StoreUnavailableError
from delta_wire.stores.memory import MemoryStore
from vllm_delta.commit import Coordinator
from vllm_delta.live import Live
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.subscriber import Staged, Subscriber

RANKS = 2
NEWEST = 2
_MOST_BYTES = 1 << 20
Reply = dict[str, Any]

# what a remote call may do instead of what it should; rank 0 answers first, rank 1 last
FAILURES = {
    "delta_commit": ("0 refuses", "1 refuses", "0 writes and fails", "1 writes half and fails", "executor fails"),
    "delta_undo": ("1 refuses", "0 says no", "executor fails"),
}
OTHER_CALLS = ("1 answers and fails", "executor fails")
EVENTS = ("nothing", "publish", "foreign write", "flip", "verify")
# the steps that follow these pass all points
WITH_FAILURES = ("nothing", "publish")


class Synchronous:
    """A side thread that is done at once."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class World:
    """The run that all servers follow; written once, only its pointer moves. The ranks are made once, too.

    The bucket is kept in memory: a file system would spend more time on its pointer than everything else takes.
    """

    def __init__(self, folder: Path):
        self.bucket = MemoryStore(f"states-{uuid4().hex}")
        self.bucket.ensure()
        self.stage = folder / "stage"
        self.stage.mkdir()
        self.training = Training(write_checkpoint(folder / "base"), folder / "bucket", changed_frac=0.1)
        self.workers = [FakeWorker(folder / "base", rank, RANKS) for rank in range(RANKS)]
        self.base = [copy.deepcopy(worker.model.state_dict()) for worker in self.workers]
        writer = self.training.start()
        self.pointers = [writer.store.get("LATEST", _MOST_BYTES)]
        # what all ranks hold when they serve a version
        self.held = {held_by([worker.model for worker in self.workers]): 0}
        for seq in range(1, NEWEST + 1):
            self.training.publish(writer, ("plain", "packed")[seq % 2])
            self.pointers.append(writer.store.get("LATEST", _MOST_BYTES))
            self.held[held_by([as_loaded(self.training.bits, rank, RANKS) for rank in range(RANKS)])] = seq
        for info in writer.store.list(""):
            self.bucket.put(info.key, writer.store.get(info.key, _MOST_BYTES))
        # what every server finds out that starts without a failure
        self.live: Live | None = None
        first = Run(self)
        first.step("nothing")
        self.live = first.coordinator._at.live
        first.close()


def held_by(models: list[torch.nn.Module]) -> bytes:
    return b"".join(
        param.detach().view(torch.int16).numpy().tobytes() for model in models for _, param in model.named_parameters()
    )


class Scheduler:
    """Lets everything go well but for one point.

    Args:
        failure: `(number of the point, what happens there)`.
    """

    def __init__(self, failure: tuple[int, str] | None = None):
        self._failure = failure
        self.points: list[tuple[str, ...]] = []

    def at(self, *failures: str) -> str | None:
        """What happens at this point, `None` if nothing bad; the ways in which it can fail are told."""
        self.points.append(failures)
        if self._failure is not None and self._failure[0] == len(self.points) - 1:
            return self._failure[1]
        return None


class ScheduledEngine(FakeEngine):
    """An engine whose calls go as the scheduler says, and that looks at the weights after every action."""

    def __init__(self, world: World, workers: list[FakeWorker]):
        super().__init__(workers)
        self._world = world
        self.scheduler = Scheduler()
        # something has changed a bit and told nobody: only a verification can find out
        self.tampered = False

    def between_steps(self, action: Callable[[], Any]) -> Any:
        try:
            return super().between_steps(action)
        finally:
            self.require_label()

    def require_label(self) -> None:
        if not self.paused and not self.tampered:
            served = 0 if self.label == "default" else int(self.label.rsplit("-", 1)[1])
            assert self.holds() == served, f"labelled {self.label}, but the ranks hold version {self.holds()}"

    def holds(self) -> int | None:
        return self._world.held.get(held_by([worker.model for worker in self.workers]))

    def rpc(self, method: str, *args: Any) -> list[Reply]:
        fault = self.scheduler.at(*FAILURES.get(method, OTHER_CALLS))
        if fault == "executor fails":
            raise RuntimeError("executor failed")
        replies = []
        for rank, worker in enumerate(self.workers):
            if fault == f"{rank} refuses":
                replies.append({"error": "out of memory", "kind": "OutOfMemoryError"})
                continue
            if fault == f"{rank} writes half and fails":
                halve(worker)
            reply = getattr(worker, method)(*args)
            if method == "delta_trace":
                worker.delta_rank_._side = Synchronous()  # type: ignore[assignment]
            if fault == f"{rank} says no":
                reply = {"restored": False}
            elif fault in (f"{rank} writes and fails", f"{rank} answers and fails", f"{rank} writes half and fails"):
                reply = {"error": "the device fell off the bus", "kind": "RuntimeError"}
            replies.append(reply)
        return replies

    def renew_caches(self, policy: str, label: str) -> None:
        if self.scheduler.at("blocks are still in use"):
            raise RuntimeError("blocks are still in use")
        super().renew_caches(policy, label)


def halve(worker: FakeWorker) -> None:
    """Let a commit write only the first half of its plan; what it takes back is the whole plan."""
    (write,) = worker.delta_rank_.plan.writes
    write.changes.run = lambda: run_half(write.changes)  # type: ignore[method-assign]


class ScheduledSubscriber(Subscriber):
    """A bucket and a disk that fail as the scheduler says."""

    scheduler = Scheduler()

    def target(self) -> Any:
        if self.scheduler.at("unreachable"):
            raise StoreUnavailableError("the bucket is unreachable")
        return super().target()

    def stage(self, *args: Any, **kwargs: Any) -> Staged:
        fault = self.scheduler.at("disk full", "killed", "cut off", "bit flipped")
        if fault == "disk full":
            raise OSError("no space left on device")
        if fault == "killed":
            (self.folder / "half a download").write_bytes(b"\0" * 99)
            raise SystemExit("killed")
        staged = super().stage(*args, **kwargs)
        if fault == "cut off":
            staged.path.write_bytes(staged.path.read_bytes()[:-9])
        elif fault == "bit flipped":
            raw = bytearray(staged.path.read_bytes())
            raw[-1] ^= 1
            staged.path.write_bytes(raw)
        return staged

    def clear(self) -> None:
        if self.scheduler.at("read-only file system"):
            raise OSError("read-only file system")
        super().clear()


class State(NamedTuple):
    """What makes a difference to what happens next."""

    attached: bool
    position: int | None
    unproven: bool
    suspected: bool
    recovered: bool
    wrong: bool
    paused: bool
    label: str
    holds: int | None
    tampered: bool
    state: str
    published: int


class Run:
    """One server from its start.

    Args:
        world (`World`): what it follows, and the ranks that it takes over as they were loaded.
        attached (`bool`): whether the live weights are mapped already, which takes most of the time.
    """

    def __init__(self, world: World, attached: bool = False):
        self._world = world
        self.engine = ScheduledEngine(world, world.workers)
        self.load_base()
        settings = Settings(world.bucket.url, ack=False, stage_dir=world.stage, server_id="one")
        self._subscriber = ScheduledSubscriber(settings.bucket, settings.stage_dir)
        ranks = Ranks(self.engine)
        self.coordinator = Coordinator(self.engine, ranks, self._subscriber, settings, lambda: world.training.base)
        if attached:
            assert world.live is not None
            self.coordinator._at.live = replace(world.live, ranks=ranks)
            for worker in world.workers:
                worker.delta_release()
        self.published = 0
        self._asked: list[Future[Any]] = []
        self.point_to(0)

    def load_base(self) -> None:
        for worker, base in zip(self._world.workers, self._world.base, strict=True):
            worker.model.load_state_dict(base)

    def point_to(self, seq: int) -> None:
        self._world.bucket.put("LATEST", self._world.pointers[seq])

    def step(self, event: str, failure: tuple[int, str] | None = None) -> list[tuple[str, ...]]:
        """Let something happen, and then the coordinator take a step. Returns the points that it passed."""
        if event == "publish":
            self.published = min(NEWEST, self.published + 1)
            self.point_to(self.published)
        elif event == "foreign write":
            # vLLM's own reload of what it was started on
            self.load_base()
            self.engine.between_steps(lambda: self.coordinator.suspect("a test"))
        elif event == "flip":
            self.engine.tampered = True
            self.engine.workers[1].model.flip("o")
            self._asked.append(self.coordinator.verify())
        elif event == "verify":
            self._asked.append(self.coordinator.verify())
        scheduler = self.engine.scheduler = self._subscriber.scheduler = Scheduler(failure)
        self.coordinator.step()
        # found out, or put back by a recovery on the way
        self.engine.tampered = self.engine.tampered and not self.engine.paused and self.engine.holds() is None
        self.engine.require_label()
        assert all(asked.done() for asked in self._asked) or self.coordinator.status.state == "degraded"
        self.coordinator.status.to_json()
        return scheduler.points

    def close(self) -> None:
        self._subscriber.close()

    @property
    def state(self) -> State:
        mine, status = self.coordinator, self.coordinator.status
        at, recovery = mine._at, mine._recovery
        return State(
            at.live is not None,
            None if at.position is None else at.position.version.seq,
            recovery.unproven is not None,
            recovery.suspected is not None,
            recovery.recovered,
            mine._wrong is not None,
            self.engine.paused,
            self.engine.label,
            self.engine.holds(),
            self.engine.tampered,
            status.state,
            self.published,
        )


@dataclass(frozen=True)
class Way:
    """How a server came into its state: with a failure while it was mapped or without, and what happened since."""

    attached: bool
    steps: tuple[tuple[str, tuple[int, str] | None], ...] = ()

    def then(self, event: str, failure: tuple[int, str] | None = None) -> Way:
        return Way(self.attached, (*self.steps, (event, failure)))


def replay(world: World, path: Way) -> tuple[Run, list[tuple[str, ...]]]:
    """A server in the state that a path leads to, and the points that its last step passed."""
    run, points = Run(world, path.attached), []
    for event, failure in path.steps:
        points = run.step(event, failure)
    return run, points


def alternatives(points: list[tuple[str, ...]]) -> list[tuple[int, str]]:
    return [(number, failure) for number, failures in enumerate(points) for failure in failures]


def require_recovery(run: Run, path: Way) -> None:
    """Nothing fails any more: the server comes back by itself, to the newest version."""
    run.published = NEWEST
    run.point_to(NEWEST)
    for event in ("nothing", "nothing", "nothing", "verify"):
        run.step(event)
    status = run.coordinator.status.to_json()
    assert (status["state"], status["seq"], run.engine.paused) == ("serving", NEWEST, False), (path, status)
    assert run.engine.holds() == NEWEST, path


def test_every_state_and_everything_that_can_happen_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL, "vllm.vllm_delta")
    world = World(tmp_path)
    start, points = replay(world, Way(attached=False).then("nothing"))
    start.close()
    # ways, and where they are known to lead
    paths: deque[tuple[Way, State | None]] = deque([(Way(attached=True).then("nothing"), None)])
    paths += [(Way(attached=False).then("nothing", failure), None) for failure in alternatives(points)]
    seen: set[State] = set()
    while paths:
        path, known = paths.popleft()
        if known in seen:
            continue
        run, _ = replay(world, path)
        state = run.state
        if state not in seen:
            seen.add(state)
            require_recovery(run, path)
            # a server that is not mapped yet does not look at the bucket, and one that was never whole is refused
            for event in EVENTS if state.attached else ("nothing",):
                after, points = replay(world, path.then(event))
                paths.append((path.then(event), after.state))
                after.close()
                if event in WITH_FAILURES:
                    paths += [(path.then(event, failure), None) for failure in alternatives(points)]
        run.close()
    # it does get into trouble, and everywhere
    for name in ("unproven", "wrong", "paused"):
        assert {state.position for state in seen if getattr(state, name)} >= {0, 1}, name
    assert {(s.position, s.published) for s in seen if s.attached} >= {
        (at, newest) for newest in range(NEWEST + 1) for at in range(newest + 1)
    }
