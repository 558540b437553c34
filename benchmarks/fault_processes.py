# SPDX-License-Identifier: Apache-2.0
"""The processes of a fault campaign: one trainer, several servers. Each may be killed at any moment.

A trainer is the real publisher over random changes; a server is the real state machine over a small model, with a
thread that plays the engine and looks at label and weights between any two steps.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fault_store import ChaosStore, Killer

from delta_wire import kernels
from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.errors import DeltaError, StoreError
from delta_wire.manifest import Manifest
from delta_wire.retention import Policy, Sweeper
from delta_wire.state import Delta, TensorDelta, TensorTable, change_of_digest
from delta_wire.stores import open_store
from trl_delta.acks import AckWatcher
from trl_delta.anchors import AnchorMaker
from trl_delta.publisher import Publisher
from trl_delta.requests import AnchorRequests
from trl_delta.retention import Keeper
from vllm_delta import ranks as ranks_module
from vllm_delta import subscriber as subscriber_module
from vllm_delta.commit import Coordinator
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.subscriber import Subscriber

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from fake_server import INNER, QUERY, SHAPES, SHARED, VOCAB, FakeEngine, FakeModel, FakeWorker, write_checkpoint

Bits = dict[str, np.ndarray]
_real_time = time.time


@dataclass(frozen=True)
class Place:
    """Where a campaign lies.

    Args:
        bucket (`str`): its address.
        folder (`Path`): for everything else: `base`, the ledger, what a trainer saves.
        poll_s (`float`): of the servers.
        grace_s (`float`): of retention.
    """

    bucket: str
    folder: Path
    poll_s: float
    grace_s: float

    @property
    def base(self) -> Path:
        return self.folder / "base"


def note(path: Path, **entry: Any) -> None:
    """Append a line that survives a kill of this process, on a disk that is never full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, limits[1]))
    try:
        with path.open("ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def hash_bits(bits: Bits) -> str:
    """SHA-256 of a whole state."""
    total = hashlib.sha256()
    for name in sorted(bits):
        total.update(np.ascontiguousarray(bits[name]).reshape(-1).tobytes())
    return total.hexdigest()


def unload(model: FakeModel) -> Bits:
    """The checkpoint's tensors out of the live model of one rank, undoing what its loader does."""
    live = {name: param.data.view(torch.int16).numpy() for name, param in model.named_parameters()}
    qkv, gate_up = live["qkv"], live["gate_up"]
    found = {
        "embed.weight": live["embed"][:VOCAB],
        "q.weight": qkv[:QUERY],
        "k.weight": qkv[QUERY : QUERY + SHARED],
        "v.weight": qkv[QUERY + SHARED :],
        "o.weight": live["o"],
        "gate.weight": gate_up[:INNER],
        "up.weight": gate_up[INNER:],
        "down.weight": live["down"].T,
        "norm.weight": live["norm"],
        "scale": live["scale"],
        # upper halves
        "router.weight": live["router"][:, 1::2],
    }
    assert found.keys() == SHAPES.keys()
    return {name: array.view(np.uint16) for name, array in found.items()}


class _Last(logging.Handler):
    """Keeps the last line."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class _Process:
    """What both kinds have in common: commands from the campaign, and ways to go wrong."""

    def __init__(self, connection: Connection, place: Place, seed: int):
        self._parent = os.getppid()
        # what is logged here is expected; the last line says more when a round does not recover
        self.log = _Last()
        root = logging.getLogger()
        root.handlers = [self.log]
        root.setLevel(logging.INFO)
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        # for a campaign that wonders where this process is
        stacks = (place.folder / f"stack-{os.getpid()}.txt").open("w")
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        self.connection = connection
        self.place = place
        self.random = random.Random(seed)
        self.killer = Killer()
        self.killer.install()
        self.chaos: ChaosStore | None = None
        self._seed = seed

    def open(self, url: str, on_put: Callable[[str, bytes], None] | None = None) -> ChaosStore:
        """The bucket, with the same faults to come as before."""
        inner = open_store(url)
        if self.chaos is None:
            self.chaos = ChaosStore(inner, self._seed, on_put)
        self.chaos.inner = inner
        return self.chaos

    def obey(self, timeout_s: float = 0.0) -> list[Any] | None:
        """Carry faults out; returns a command that is none."""
        if os.getppid() != self._parent:
            # nobody is left to end this process
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.connection.poll(timeout_s):
            return None
        command = self.connection.recv()
        kind, value = command
        if kind == "kill":
            self.killer.arm(value)
        elif kind == "chaos":
            assert self.chaos is not None
            self.chaos.arm(*value)
        elif kind == "disk":
            # the file system refuses to let any file grow beyond so many bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (value, resource.RLIM_INFINITY))
        elif kind == "clock":
            time.time = lambda: _real_time() + value
        else:
            return command
        return None


def preload(folder: Path) -> None:
    """Import and compile in this process what its children will need, so that they start in milliseconds."""
    torch.set_num_threads(1)
    kernels.warm_up()
    base = write_checkpoint(folder / "base")
    checkpoint = Checkpoint(base)
    store = open_store(folder / "bucket", create=True)
    digest = checkpoint.digest()
    writer = BucketWriter.start(store, table=checkpoint.table(), digest=digest, reference=str(base))
    name = "norm.weight"
    old = checkpoint.bits(name)[:1].copy()
    delta = {name: TensorDelta(name, np.array([0], np.int32), old ^ 1, old)}
    settings = Settings(str(folder / "bucket"), stage_dir=folder, server_id="warm")
    engine = FakeEngine([FakeWorker(base)])
    coordinator = Coordinator(engine, Ranks(engine), Subscriber(settings.bucket, folder), settings, lambda: base)
    coordinator.step()
    writer.publish(delta, digest=digest + change_of_digest(delta), step=1)
    coordinator.step()
    assert coordinator.status.state == "serving" and coordinator.status.version == writer.version


def train(connection: Connection, place: Place, seed: int) -> None:
    """Main function of a trainer's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Trainer(connection, place, seed).run()


class Trainer(_Process):
    """Trains, saves, resumes, publishes."""

    def __init__(self, connection: Connection, place: Place, seed: int):
        super().__init__(connection, place, seed)
        self._numbers = np.random.default_rng(seed)
        self._ledger = place.folder / "ledger.jsonl"
        self._saved = place.folder / "saved.npz"
        checkpoint = Checkpoint(place.base)
        self.table: TensorTable = checkpoint.table()
        self.bits: Bits = {name: checkpoint.bits(name).copy() for name in self.table}
        self.digest = checkpoint.digest()
        self.step = 0
        if self._saved.is_file():
            with np.load(self._saved) as saved:
                self.bits = {name: saved[name] for name in self.table}
                self.step = int(saved["/step"])
            self.digest = _digest(self.bits)
        self._note_state()

    def run(self) -> None:
        writer = self._start()
        anchors = AnchorMaker(
            writer.store,
            self.table,
            BucketReader(writer.store).latest(),
            factor=3,
            files=self.place.base,
            # nobody trains while a round waits: only what servers ask for leads past what is lost
            requests=AnchorRequests(least_pause_s=1.0),
        )
        publisher = Publisher(
            writer,
            step=self.step,
            anchors=anchors,
            snapshot=lambda name: self.bits[name].copy(),
            retry_min_s=0.01,
            retry_max_s=0.1,
        )
        AckWatcher(writer.acks, publisher, poll_s=0.1)
        policy = Policy(grace_s=self.place.grace_s, lease_s=self.place.grace_s)
        sweeper = Sweeper(BucketReader(open_store(self.place.bucket)), policy)
        Keeper(sweeper, lambda: writer.version, self.place.grace_s)
        self.connection.send(("started", str(writer.version)))
        while True:
            command = self.obey(1.0)
            if command is None:
                continue
            kind, value = command
            if kind == "train":
                for _ in range(value):
                    if publisher.failure is None:
                        self._train(publisher)
            elif kind == "wait":
                publisher.wait(value)
                failure = publisher.failure
                digest = publisher.digest_of(publisher.durable_seq)
                durable = digest == self.digest
                self.connection.send(
                    ("durable", (str(writer.version), durable, failure and repr(failure), self.log.text))
                )

    def _start(self) -> BucketWriter:
        store = self.open(self.place.bucket, self._note_manifest)
        while True:
            try:
                return BucketWriter.start(
                    store,
                    table=self.table,
                    digest=self.digest,
                    reference=str(self.place.base),
                    step=self.step,
                    bits=self.bits.__getitem__,
                    files=self.place.base,
                )
            except StoreError:
                time.sleep(0.02)
                self._drop_commands()
            except DeltaError as error:
                self.connection.send(("refused", repr(error)))
                time.sleep(0.05)
                self._drop_commands()

    def _drop_commands(self) -> None:
        while (command := self.obey()) is not None:
            if command[0] == "wait":
                self.connection.send(("durable", ("", False, None, "starting")))

    def _train(self, publisher: Publisher) -> None:
        save = self.random.choice((None, "before", None, "after", None))
        with publisher.extracting:
            delta = self._change()
            if save == "before":
                self._save()
            publisher.submit(delta, digest=self.digest, step=self.step)
        if save == "after":
            self._save()
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 0.02)

    def _change(self) -> Delta:
        delta: Delta = {}
        for name, bits in self.bits.items():
            flat = bits.reshape(-1)
            count = int(self._numbers.integers(0, max(2, flat.size // 8)))
            if not count:
                continue
            indices = np.sort(self._numbers.choice(flat.size, count, replace=False)).astype(np.int32)
            old = flat[indices]
            new = old ^ self._numbers.integers(1, 1 << 16, count).astype(np.uint16)
            flat[indices] = new
            delta[name] = TensorDelta(name, indices, new, old)
        self.digest = self.digest + change_of_digest(delta)
        self.step += 1
        self._note_state()
        return delta

    def _save(self) -> None:
        temporary = self._saved.with_name(f".saved-{os.getpid()}.npz")
        # a full disk keeps the checkpoint before
        with suppress(OSError):
            np.savez(temporary, **self.bits, **{"/step": np.array(self.step)})
            os.replace(temporary, self._saved)

    def _note_state(self) -> None:
        note(self._ledger, digest=str(self.digest), bits=hash_bits(self.bits))

    def _note_manifest(self, key: str, data: bytes) -> None:
        if key.startswith("versions/"):
            manifest = Manifest.from_bytes(data, key)
            note(self._ledger, version=str(manifest.version), digest=str(manifest.digest))


def _digest(bits: Bits) -> Digest:
    from delta_wire.digest import digest_tensor

    total = Digest()
    for name, array in bits.items():
        total = total + digest_tensor(name, array)
    return total


class Engine(FakeEngine):
    """Steps in a thread of its own; what each step would have generated with is noted."""

    def __init__(self, worker: FakeWorker, journal: Path):
        super().__init__([worker])
        self._journal = journal
        self._lock = threading.RLock()
        self._seen: tuple[str, str] | None = None
        self._thread = threading.Thread(target=self._steps, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def between_steps(self, action: Callable[[], Any]) -> Any:
        with self._lock:
            return super().between_steps(action)

    def _steps(self) -> None:
        while True:
            with self._lock:
                if not self.paused:
                    self._look()
            time.sleep(0.003)

    def _look(self) -> None:
        seen = (self.label, hash_bits(unload(self.workers[0].model)))
        if seen != self._seen:
            self._seen = seen
            note(self._journal, label=seen[0], bits=seen[1])


def serve(connection: Connection, place: Place, seed: int, number: int) -> None:
    """Main function of a server's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Server(connection, place, seed, number).run()


class Server(_Process):
    """Follows the bucket."""

    def __init__(self, connection: Connection, place: Place, seed: int, number: int):
        super().__init__(connection, place, seed)
        ranks_module._POLL_S = 0.002
        subscriber_module.open_store = self.open  # type: ignore[assignment]
        stage = place.folder / f"stage-{number}"
        stage.mkdir(exist_ok=True)
        settings = Settings(place.bucket, poll_s=place.poll_s, stage_dir=stage, server_id=f"server-{number}")
        self._journal = place.folder / f"server-{number}.jsonl"
        self._engine = Engine(FakeWorker(place.base), self._journal)
        self._subscriber = Subscriber(place.bucket, stage)
        self._coordinator = Coordinator(
            self._engine, Ranks(self._engine), self._subscriber, settings, lambda: place.base
        )

    def run(self) -> None:
        self.open(self.place.bucket)
        self._engine.start()
        while True:
            while self.obey() is not None:
                pass
            wait_s = self._coordinator.step()
            status = self._coordinator.status
            needs_anchor = status.needs_anchor and str(status.needs_anchor)
            self.connection.send((status.state, str(status.version), status.reason, needs_anchor))
            time.sleep(min(wait_s, 0.25))
