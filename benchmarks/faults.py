# SPDX-License-Identifier: Apache-2.0
"""Everything that can go wrong between a trainer and its servers, many times over, in a real bucket.

    python benchmarks/faults.py --count 1000 --seed 1 --store file --json

One trainer and several servers run in processes of their own and share nothing but the bucket. Faults come one to
three at a time: a process is killed by SIGKILL at a random line of the protocol or suspended, calls to the store are
refused, hang, or lose their answer, what is read is truncated, flipped, swapped, stale or missing, objects in the
bucket are damaged, lost or put in each other's place, disks are full, clocks jump, a second trainer or a stranger
writes. After each round training goes on, and every server has to arrive at the newest version without help.

At every step of its engine a server notes its label and a hash of its live weights. Both must belong together: the
label is a version that a trainer committed, the bits are that version's in full. `wrong_states` counts where they do
not, `unrecovered` the rounds in which a server or the trainer did not arrive in time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fault_processes import Place, preload, serve, train
from fault_services import RemoteStore, Service, start

from delta_wire.errors import DeltaError, ObjectNotFoundError, StoreError
from delta_wire.manifest import POINTER_KEY

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from fake_server import write_checkpoint

_FORK = multiprocessing.get_context("fork")
_MAX_OBJECT_BYTES = 1 << 24
# of the second half of a soak over the first
_MOST_GROWTH = 1.5
_TREND_VERSIONS = 1000
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
        timeout_s (`float`): a round that takes longer has not recovered.
    """

    def __init__(self, place: Place, service: Service, seed: int, servers: int, timeout_s: float):
        self.place = place
        self._faults = dict(_FAULTS)
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
        self._await_recovery("start")

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
        self._await_recovery("+".join(kinds))
        self._check_journals()

    def _await_recovery(self, what: str) -> None:
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

    # -- a long quiet run ---------------------------------------------------------------------------------------

    def soak(self, versions: int) -> dict[str, Any]:
        """Publish so many versions without a fault and watch what grows."""
        self.settle()
        samples: list[dict[str, int]] = []
        while self.versions < versions:
            self.trainer.send("train", 20)
            self._await_recovery("soak")
            self._check_journals()
            if self.versions >= (len(samples) + 1) * versions // 20:
                sizes = [info.size_bytes for info in self.store.list("")]
                memory = [_resident_bytes(child.process.pid) for child in (self.trainer, *self.servers)]
                samples.append(
                    {
                        "version": self.versions,
                        "bucket_bytes": sum(sizes),
                        "objects": len(sizes),
                        "trainer_bytes": memory[0],
                        "server_bytes": max(memory[1:]),
                    }
                )
        # without faults every process lives from the first to the last version
        half = len(samples) // 2
        early, late = samples[1:half], samples[half:]
        grown = {
            name: max(sample[name] for sample in late) / max(sample[name] for sample in early)
            for name in samples[0]
            if name != "version"
        }
        # over few versions the teeth of anchors and sweeps, which depend on the clock, are larger than any trend
        if versions >= _TREND_VERSIONS and any(factor > _MOST_GROWTH for factor in grown.values()):
            self.result.unrecovered += 1
            self.result.note(f"something grows without a bound: {grown}")
        return {"samples": samples, "growth": {name: round(factor, 3) for name, factor in grown.items()}}

    # -- the oracle ---------------------------------------------------------------------------------------------

    def _check_journals(self) -> None:
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


def _resident_bytes(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _lines(path: Path) -> Any:
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)


def _kill(campaign: Campaign) -> None:
    campaign.any_child().send("kill", int(2 ** (campaign.random.random() * 10)))


def _kill_now(campaign: Campaign) -> None:
    campaign.any_child().signal(signal.SIGKILL)


def _suspend(campaign: Campaign) -> None:
    child = campaign.any_child()
    child.signal(signal.SIGSTOP)
    campaign.later(lambda: child.signal(signal.SIGCONT), 0.2)


def _suspend_long(campaign: Campaign) -> None:
    """A server that sleeps until what it needed next has been swept."""
    child = campaign.random.choice(campaign.servers)
    child.signal(signal.SIGSTOP)
    campaign.later(lambda: child.signal(signal.SIGCONT), 3 * campaign.place.grace_s)


def _chaos(kind: str) -> Callable[[Campaign], None]:
    def fault(campaign: Campaign) -> None:
        campaign.any_child().send("chaos", (kind, campaign.random.randrange(1, 4)))

    return fault


def _disk(campaign: Campaign) -> None:
    child = campaign.any_child()
    child.send("disk", campaign.random.choice((0, 64, 700)))
    campaign.later(lambda: child.send("disk", -1))


def _clock(campaign: Campaign) -> None:
    campaign.any_child().send("clock", campaign.random.choice((-1e9, -86400, 86400, 3e8)))


def _damage(prefix: str, how: str) -> Callable[[Campaign], None]:
    def fault(campaign: Campaign) -> None:
        keys = campaign.keys(prefix)
        if not keys:
            return
        # the newest are the ones that are looked at
        key = campaign.random.choice(keys[-3:])
        before = campaign.read(key)
        if before is None:
            return
        for_good = prefix in ("deltas/", "anchors/") and campaign.random.random() < 0.5
        campaign.replace(key, before, _broken(campaign, prefix, key, before, how), for_good)

    return fault


def _broken(campaign: Campaign, prefix: str, key: str, data: bytes, how: str) -> bytes | None:
    if how == "missing":
        return None
    if not data:
        # truncated before this one came
        return data
    if how == "truncated":
        return data[: campaign.random.randrange(len(data))]
    if how == "flipped":
        at = campaign.random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << campaign.random.randrange(8)]) + data[at + 1 :]
    other = campaign.random.choice(campaign.keys(prefix) or [key])
    return campaign.read(other) or b""


def _lost_unseen(campaign: Campaign) -> None:
    """The delta of a version that no server has seen yet is lost for good."""
    for server in campaign.servers:
        server.signal(signal.SIGSTOP)
    before = set(campaign.keys("deltas/"))
    campaign.trainer.send("train", 1)
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        new = [key for key in campaign.keys("deltas/") if key not in before]
        content = campaign.read(new[-1]) if new else None
        if content is not None:
            campaign.replace(new[-1], content, None, for_good=True)
            break
        time.sleep(0.004)
    for server in campaign.servers:
        server.signal(signal.SIGCONT)


def _second_writer(campaign: Campaign) -> None:
    """The same run started twice: a trainer that was thought dead, or a job that was submitted twice."""
    second = Child(lambda c, s: train(c, campaign.place, s), campaign.random)
    second.send("train", 2)
    second.send("wait", 0.5)
    campaign.later(second.end, 0.6)


def _foreign(campaign: Campaign) -> None:
    """Somebody writes what is none of ours, or moves the pointer."""
    before = campaign.read(POINTER_KEY)
    keys = campaign.keys("versions/")
    what = campaign.random.choice(("noise", "pointer", "ack"))
    with suppress(StoreError):
        if what == "noise":
            campaign.store.put(f"deltas/{campaign.random.getrandbits(40):012d}-foreign.safetensors", b"noise")
            campaign.store.put("something/else.txt", b"noise")
        elif what == "ack":
            campaign.store.put("acks/stranger.json", b'{"format": 1')
        elif before is not None and keys:
            after = campaign.random.choice((b"", b"{}", before.replace(b'"run":"', b'"run":"x')))
            campaign.replace(POINTER_KEY, before, after, for_good=False)


_FAULTS: dict[str, Callable[[Campaign], None]] = {
    "kill_at_a_line": _kill,
    "kill_in_a_row": lambda campaign: [_kill(campaign) for _ in range(3)] and None,
    "kill_now": _kill_now,
    "suspend": _suspend,
    "suspend_long": _suspend_long,
    **{f"call_{kind}": _chaos(kind) for kind in ("refuse", "hang", "lose")},
    **{f"read_{kind}": _chaos(kind) for kind in ("truncate", "flip", "swap", "stale", "missing")},
    **{f"delta_{how}": _damage("deltas/", how) for how in ("missing", "truncated", "flipped", "swapped")},
    "delta_lost_unseen": _lost_unseen,
    **{f"manifest_{how}": _damage("versions/", how) for how in ("missing", "truncated", "flipped", "swapped")},
    **{f"pointer_{how}": _damage(POINTER_KEY, how) for how in ("missing", "truncated", "flipped")},
    **{f"anchor_{how}": _damage("anchors/", how) for how in ("missing", "truncated", "flipped")},
    "table_flipped": _damage("tables/", "flipped"),
    "disk_full": _disk,
    "clock_jump": _clock,
    "second_writer": _second_writer,
    "foreign_writer": _foreign,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="faults to inject, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=["file", "s3", "hf"], default="file")
    parser.add_argument("--soak", type=int, metavar="VERSIONS", help="publish so many versions without any fault")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=30.0, help="a round that takes longer has not recovered")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="delta-faults-"))
    began_s = time.monotonic()
    soak: dict[str, Any] = {}
    try:
        preload(folder / "warm")
        write_checkpoint(folder / "base")
        with start(args.store, folder) as service:
            # a hub has more ways to be slow
            grace_s = 0.5 if args.store == "file" else 2.0
            place = Place(service.url, folder, poll_s=0.01 if args.store == "file" else 0.05, grace_s=grace_s)
            campaign = Campaign(place, service, args.seed, args.servers, args.timeout_s)
            try:
                if args.soak:
                    soak = campaign.soak(args.soak)
                    args.count = 0
                else:
                    campaign.settle()
                while campaign.result.faults < args.count:
                    campaign.round()
            finally:
                campaign.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = campaign.result
    recovery_s = sorted(result.recovery_s)
    report = {
        "store": args.store,
        "seed": args.seed,
        "servers": args.servers,
        "faults": result.faults,
        "by_kind": dict(sorted(result.by_kind.items())),
        "restarts": result.kills,
        "anchors_needed": result.cut_off,
        "wrong_states": result.wrong_states,
        "unrecovered": result.unrecovered,
        "versions": campaign.versions,
        "states_checked": result.looks,
        "recovery_s": {
            f"p{p}": round(recovery_s[int(p / 100 * (len(recovery_s) - 1))], 3)
            for p in (50, 90, 99, 100)
            if recovery_s
        },
        "wall_s": round(time.monotonic() - began_s, 1),
        **soak,
        "problems": result.problems,
    }
    print(json.dumps(report, indent=None if args.json else 2))
    sys.exit(1 if result.wrong_states or result.unrecovered else 0)


if __name__ == "__main__":
    main()
