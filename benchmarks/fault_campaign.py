# SPDX-License-Identifier: Apache-2.0
"""A trainer, servers and a bucket, to which something happens, and the oracle. See `faults.py`."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fault_processes import Place, serve, train
from fault_services import RemoteStore, Service

from delta_wire.errors import DeltaError, ObjectNotFoundError, StoreError

_FORK = multiprocessing.get_context("fork")
_MAX_OBJECT_BYTES = 1 << 24
# state, version, reason and need of a server that has not said anything
_BEGINNING = ("waiting", "None", None, None)


class Child:
    """One process, restarted when it has died.

    Args:
        main (callable): its main function, given a connection and a seed.
        random (`random.Random`): for seeds.
    """

    def __init__(self, main: Callable[[Connection, int], None], random: random.Random):
        self._main = main
        self._random = random
        self.start()

    def start(self) -> None:
        self.connection, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=self._main, args=(theirs, self._random.getrandbits(32)), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return self.process.exitcode is None

    def revive(self) -> bool:
        """Start it again if it has died; whether it had."""
        if self.alive:
            return False
        self.process.join()
        self.connection.close()
        self.start()
        return True

    def send(self, *command: Any) -> None:
        # a process that has died is started again by the next look
        with suppress(OSError):
            self.connection.send(command)

    def receive(self) -> list[Any]:
        """All that it has said."""
        found = []
        with suppress(EOFError, OSError):
            while self.connection.poll():
                found.append(self.connection.recv())
        return found

    def signal(self, number: int) -> None:
        if self.alive and self.process.pid:
            os.kill(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.join()
        self.connection.close()


@dataclass
class Result:
    """What the campaign found."""

    faults: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    # how often a server needed an anchor
    cut_off: int = 0
    wrong_states: int = 0
    unrecovered: int = 0
    looks: int = 0
    recovery_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        print(f"after {self.faults} faults: {problem}", file=sys.stderr)
        if len(self.problems) < 20:
            self.problems.append(problem)


class Campaign:
    """One bucket, its processes, and the oracle.

    Args:
        place (`Place`): where it lies.
        service (`Service`): what keeps it.
        seed (`int`): of everything random here.
        servers (`int`): how many follow.
        faults (`dict`): by their names, each given the campaign.
        timeout_s (`float`): a round that takes longer has not recovered.
    """

    def __init__(
        self,
        place: Place,
        service: Service,
        seed: int,
        servers: int,
        faults: Mapping[str, Callable[[Campaign], None]],
        timeout_s: float,
    ):
        self.place = place
        self._faults = dict(faults)
        for kind, begin in service.faults.items():
            self._faults |= {kind: lambda campaign, begin=begin: campaign.misbehave(begin)}
        self.random = random.Random(seed)
        self.timeout_s = timeout_s
        self.result = Result()
        self.store = RemoteStore(place.bucket)
        self.store.list("")
        # what gets better by itself, and when
        self._repairs: list[tuple[float, Callable[[], None]]] = []
        # how many misbehaviours of the service have yet to end
        self._away = 0
        # what was put in an object's place: first content, last damage
        self._damaged: dict[str, tuple[bytes, bytes | None]] = {}
        self.trainer = Child(lambda c, s: train(c, place, s), self.random)
        self.servers = [Child(lambda c, s, n=number: serve(c, place, s, n), self.random) for number in range(servers)]
        self._states: list[tuple[str, str, str | None, str | None]] = [_BEGINNING] * servers
        self._durable = ("", False, None, "")
        self._asked_s = 0.0
        self._said = "nothing"

    # -- a round ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Before the first fault."""
        self.await_recovery("start")

    def round(self) -> None:
        """Some faults at once, and the way back."""
        kinds = [self.random.choice(list(self._faults)) for _ in range(self.random.choice((1, 1, 2, 3)))]
        if self.random.random() < 0.5:
            self.trainer.send("train", self.random.randrange(1, 4))
        for kind in kinds:
            self._faults[kind](self)
            self.result.by_kind[kind] += 1
            self.result.faults += 1
        self.trainer.send("train", self.random.randrange(1, 4))
        self.await_recovery("+".join(kinds))
        self.check_journals()

    def await_recovery(self, what: str) -> None:
        """Until every server has the newest version, or it is too late."""
        began_s = time.monotonic()
        self._durable = ("", False, None, "")
        self._asked_s = 0.0
        nudged_s, pause_s = began_s, 1.0
        while time.monotonic() - began_s < self.timeout_s:
            self._tend()
            version, durable, *_ = self._durable
            if durable and not self._repairs and all(s[:2] == ("serving", version) for s in self._states):
                self.result.recovery_s.append(time.monotonic() - began_s)
                return
            if time.monotonic() - nudged_s > pause_s and all(s[0] == "serving" for s in self._states):
                # another trainer may have been there: this one finds out when it publishes; with growing pauses,
                # because nobody can be up to date with a trainer that is faster than the bucket. A server that is cut
                # off has to get on without
                self.trainer.send("train", int(pause_s))
                nudged_s, pause_s = time.monotonic(), 2 * pause_s
                self._durable = ("", False, None, "")
            time.sleep(0.004)
        self.result.unrecovered += 1
        self.result.note(f"{what}: not recovered after {self.timeout_s} s: {self._said}; {self._states}")
        print(self._stacks(), file=sys.stderr)

    def _tend(self) -> None:
        """What a supervisor does: start again what has died or given up. And time that heals."""
        now_s = time.monotonic()
        due = [repair for at_s, repair in self._repairs if at_s <= now_s]
        self._repairs = [entry for entry in self._repairs if entry[0] > now_s]
        for repair in due:
            repair()
        for number, server in enumerate(self.servers):
            for state in server.receive():
                if state[3] not in (None, self._states[number][3]):
                    self.result.cut_off += 1
                self._states[number] = state
            if server.revive():
                self.result.kills += 1
                self._states[number] = _BEGINNING
        for kind, value in self.trainer.receive():
            self._said = f"{kind} {value}"
            if kind == "durable":
                self._durable = value
                # a version that a server has asked for may follow
                self._asked_s = now_s if value[1] else 0.0
                if value[2] is not None:
                    # another trainer was there; the supervisor starts this one again
                    self._durable = ("", False, None, "")
                    self.trainer.end()
        if self.trainer.revive():
            self.result.kills += 1
            self._asked_s = 0.0
        if now_s - self._asked_s > 0.3:
            self._asked_s = now_s
            self.trainer.send("wait", 0.2)

    # -- the oracle ---------------------------------------------------------------------------------------------

    def check_journals(self) -> None:
        """Compare what every server has noted since the last time with what trainers committed."""
        digests: dict[str, str] = {}
        bits: dict[str, str] = {}
        for entry in _lines(self.place.folder / "ledger.jsonl"):
            if "version" in entry:
                before = digests.setdefault(entry["version"], entry["digest"])
                if before != entry["digest"]:
                    # another try under the same number, of which one was committed
                    digests[entry["version"]] = f"{before} {entry['digest']}"
            else:
                bits[entry["digest"]] = entry["bits"]
        base = next(_lines(self.place.folder / "ledger.jsonl"))["bits"]
        for number in range(len(self.servers)):
            for entry in _lines(self.place.folder / f"server-{number}.jsonl"):
                self.result.looks += 1
                allowed = (
                    {base}
                    if entry["label"] == "default"
                    else {bits.get(digest) for digest in digests.get(entry["label"], "").split()}
                )
                if entry["bits"] not in allowed:
                    self.result.wrong_states += 1
                    self.result.note(f"server {number}: labelled {entry['label']} with bits {entry['bits']}")
            (self.place.folder / f"server-{number}.jsonl").write_bytes(b"")

    @property
    def versions(self) -> int:
        version = self._durable[0]
        return int(version.rpartition("-")[2]) if version else 0

    def end(self) -> None:
        for child in (self.trainer, *self.servers):
            child.end()
        self.store.end()

    # -- faults -------------------------------------------------------------------------------------------------

    def misbehave(self, begin: Callable[[random.Random], Callable[[], None] | None]) -> None:
        end = begin(self.random)
        if end is None:
            return
        self._away += 1

        def back() -> None:
            end()
            self._away -= 1

        self.later(back, 2.0)

    def any_child(self) -> Child:
        return self.random.choice((self.trainer, self.trainer, *self.servers))

    def later(self, repair: Callable[[], None], most_s: float = 0.3) -> None:
        self._repairs.append((time.monotonic() + self.random.random() * most_s, repair))

    def keys(self, prefix: str) -> list[str]:
        with suppress(StoreError):
            return [info.key for info in self.store.list(prefix)]
        return []

    def replace(self, key: str, before: bytes, after: bytes | None, for_good: bool) -> None:
        """Put something else in an object's place, for a while or for good: only a later anchor leads past it."""
        original, damaged = self._damaged.get(key, (before, before))
        if before != damaged:
            # written anew since
            original = before
        self._damaged[key] = (original, after)
        # a service that stands still would do it later than it says, when all has been repaired
        while self._away:
            self._tend()
            time.sleep(0.004)
        with suppress(StoreError):
            if after is None:
                self.store.delete([key])
            else:
                self.store.put(key, after)

        def repair() -> None:
            try:
                # not over what a trainer has written since
                if self._look(key) == after:
                    self.store.put(key, original)
                    self._damaged.pop(key, None)
            except StoreError:
                # the service does not answer just now
                self.later(repair)

        if not for_good:
            self.later(repair)

    def read(self, key: str) -> bytes | None:
        with suppress(DeltaError):
            return self._look(key)
        return None

    def _look(self, key: str) -> bytes | None:
        """An object's content, `None` if there is none; raises if the store does not say."""
        with suppress(ObjectNotFoundError):
            return self.store.get(key, _MAX_OBJECT_BYTES)
        return None

    def _stacks(self) -> str:
        """Where each process is."""
        for child in (self.trainer, *self.servers):
            child.signal(signal.SIGUSR1)
        time.sleep(0.5)
        files = [self.place.folder / f"stack-{child.process.pid}.txt" for child in (self.trainer, *self.servers)]
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files if file.is_file())


def _lines(path: Path) -> Any:
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)
