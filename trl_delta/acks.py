# SPDX-License-Identifier: Apache-2.0
"""What the servers say they serve, and what follows from it for the labels of rollouts."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from delta_wire.acks import Ack
from delta_wire.errors import DeltaError
from trl_delta.publisher import Publisher

logger = logging.getLogger(__name__)
_JOIN_S = 5.0
# between a hint and the look it leads to
_HINT_PAUSE_S = 0.2
_MAX_LABELS = 10_000


@dataclass
class _Seen:
    ack: Ack
    changed_s: float
    # written before this session, and behind its first version: a server of an earlier time, until it speaks again
    is_past: bool


class AckWatcher:
    """Polls the acknowledgements of a bucket in a thread of its own.

    A version counts as acknowledged when at least `expected_servers` live servers serve it or a later one, each with
    the digest it was published with; the slowest of them decides. What was written before the session and is behind
    its first version is left over from servers of an earlier time, and does not count.

    Args:
        read_acks (callable): returns all acknowledgements of the bucket; store errors are tolerated.
        publisher ([`Publisher`]): knows the versions of this session, and heeds what servers ask for.
        expected_servers (`int`, *optional*, defaults to `1`): servers without which nothing is acknowledged.
        server_timeout_s (`float`, *optional*, defaults to `300.0`): a server that is behind and has written nothing
            new for so long is left out until it writes again.
        poll_s (`float`, *optional*, defaults to `0.2`): time between two polls.
        watch (`Callable`, *optional*): begins to call a function when there may be something new, as
            [`~delta_wire.stores.Store.watch`] does, and returns what ends it.
    """

    def __init__(
        self,
        read_acks: Callable[[], list[Ack]],
        publisher: Publisher,
        *,
        expected_servers: int = 1,
        server_timeout_s: float = 300.0,
        poll_s: float = 0.2,
        watch: Callable[[Callable[[], None]], Callable[[], None] | None] | None = None,
    ):
        self._read_acks = read_acks
        self._publisher = publisher
        self._expected_servers = expected_servers
        self._server_timeout_s = server_timeout_s
        self._poll_s = poll_s
        self._run = publisher.writer.version.run
        self._seen: dict[str, _Seen] = {}
        self._silent: set[str] = set()
        self._wrong: set[tuple[str, int]] = set()
        self._listeners: list[Callable[[int], None]] = []
        self._start_seq = publisher.durable_seq
        self._polls = 0
        self._failing = False
        self._seq: int | None = None
        self._advanced = threading.Condition()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._unwatch = None if watch is None else watch(self._wake.set)
        self._thread = threading.Thread(target=self._loop, name="delta-acks", daemon=True)
        self._thread.start()

    @property
    def seq(self) -> int | None:
        """Newest acknowledged version, `None` while there is none."""
        return self._seq

    @property
    def step(self) -> int | None:
        """Newest optimizer step whose weights every live server serves, as far as known."""
        return None if self._seq is None else self._publisher.step_of(self._seq)

    @property
    def servers(self) -> dict[str, Ack]:
        """Newest acknowledgement of every server of this run."""
        with self._advanced:
            return {server: seen.ack for server, seen in self._seen.items()}

    def add_listener(self, listener: Callable[[int], None]) -> None:
        """Call `listener(step)` in the watcher's thread after each poll that knows an acknowledged step."""
        self._listeners.append(listener)

    def wait_for(self, seq: int, timeout_s: float) -> bool:
        """Wait until a version is acknowledged."""
        with self._advanced:
            return self._advanced.wait_for(lambda: self._seq is not None and self._seq >= seq, timeout_s)

    def close(self) -> None:
        """Look once more, then end the thread. Safe to call again."""
        if self._unwatch is not None:
            self._unwatch()
        self._stop.set()
        self._wake.set()
        self._thread.join(_JOIN_S)

    def _loop(self) -> None:
        while True:
            # hints come in swarms, one for each server
            if self._wake.wait(self._poll_s):
                self._stop.wait(min(_HINT_PAUSE_S, self._poll_s))
            self._wake.clear()
            last = self._stop.is_set()
            try:
                self.poll()
            except Exception as error:
                # a thread that dies in silence would leave every label where it is
                if not self._failing:
                    logger.exception("delta sync: cannot tell what the servers serve, which is tried again: %s", error)
                self._failing = True
            else:
                self._failing = False
            if last:
                return

    def poll(self) -> None:
        """One look; called by the thread."""
        try:
            acks = self._read_acks()
        except DeltaError as error:
            # the publisher reports a bucket that is out of reach; labels simply stay where they are
            logger.debug("delta sync: cannot read the acknowledgements: %s", error)
            return
        self._publisher.heed(acks)
        with self._advanced:
            for ack in acks:
                self._note(ack)
            self._polls += 1
            seq = self._acknowledged()
        step = None if seq is None else self._publisher.step_of(seq)
        if step is not None:
            for listener in self._listeners:
                listener(step)
        # last, so that whoever waits for a version finds that the listeners know of it
        with self._advanced:
            self._seq = seq
            self._advanced.notify_all()

    def _note(self, ack: Ack) -> None:
        if ack.version is None or ack.version.run != self._run:
            return
        seen = self._seen.get(ack.server)
        if seen is None or seen.ack != ack:
            is_past = self._polls == 0 and ack.version.seq < self._start_seq
            self._seen[ack.server] = _Seen(ack, time.monotonic(), is_past)
            self._silent.discard(ack.server)

    def _acknowledged(self) -> int | None:
        live = [
            seen.ack.version.seq
            for seen in self._seen.values()
            if seen.ack.version is not None and self._is_live(seen) and self._is_right(seen.ack)
        ]
        return min(live) if len(live) >= self._expected_servers else None

    def _is_live(self, seen: _Seen) -> bool:
        ack = seen.ack
        assert ack.version is not None
        if ack.version.seq >= self._publisher.durable_seq:
            return True
        if seen.is_past:
            return False
        # a server that keeps up writes with every version; only the time since it fell behind counts
        behind_s = time.monotonic() - max(seen.changed_s, self._publisher.durable_since_s(ack.version.seq + 1))
        if behind_s < self._server_timeout_s:
            return True
        if ack.server not in self._silent:
            self._silent.add(ack.server)
            logger.warning(
                "delta sync: server %s still serves version %d and has said nothing for %.0f s; it no longer counts. "
                "If it runs, look at its log and at its GET /delta/status.",
                ack.server,
                ack.version.seq,
                behind_s,
            )
        return False

    def _is_right(self, ack: Ack) -> bool:
        assert ack.version is not None
        expected = self._publisher.digest_of(ack.version.seq)
        if expected is None or ack.digest == expected:
            return True
        if (ack.server, ack.version.seq) not in self._wrong:
            self._wrong.add((ack.server, ack.version.seq))
            logger.warning(
                "delta sync: server %s says that it serves version %s with digest %s, published was %s; it does not "
                "count. Restart that server.",
                ack.server,
                ack.version,
                ack.digest,
                expected,
            )
        return False


class RolloutLabels:
    """Passes a trainer's version numbers on to the rollout worker once the servers serve the weights they stand for.

    TRL numbers its weight syncs and stamps every rollout with the number that the worker was told last. Deltas arrive
    later than they are sent; told at once, the worker would stamp rollouts of old weights as new.

    Args:
        forward (callable): the worker's own `update_model_version`.
        current_step (callable): optimizer step of the trainer, read when it announces a number.
    """

    def __init__(self, forward: Callable[[int], None], current_step: Callable[[], int]):
        self._forward = forward
        self._current_step = current_step
        self._lock = threading.Lock()
        self._announced: deque[tuple[int, int]] = deque(maxlen=_MAX_LABELS)
        self._acknowledged: int | None = None
        self._forwarded: int | None = None

    def announce(self, model_version: int) -> None:
        """Stands in for the worker's `update_model_version`; called by the training thread."""
        with self._lock:
            self._announced.append((self._current_step(), model_version))
            self._update()

    def acknowledged(self, step: int) -> None:
        """All servers serve the weights of `step`; called by the watcher. Goes back when a server does."""
        with self._lock:
            self._acknowledged = step
            self._update()

    def _update(self) -> None:
        served = self._acknowledged
        if served is None:
            return
        version = next((label for step, label in reversed(self._announced) if step <= served), None)
        if version is not None and version != self._forwarded:
            self._forwarded = version
            self._forward(version)
