# SPDX-License-Identifier: Apache-2.0
"""A coordinator over fake workers, the run that it follows, and what can go wrong with both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_server import FakeEngine, FakeModel, FakeWorker, as_loaded, parameters_of, write_checkpoint
from training import Training, pointed_to

from delta_wire.acks import Ack
from delta_wire.anchors import stream_anchor
from delta_wire.bucket import BucketReader
from delta_wire.manifest import Manifest, ObjectRef, Pointer, manifest_key
from delta_wire.replay import checkout
from delta_wire.stores import open_store
from vllm_delta.commit import Coordinator
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.subscriber import Subscriber

Reply = dict[str, Any]


class Server:
    """A coordinator over fake workers, and the run that it follows."""

    def __init__(self, folder: Path, ranks: int = 2, model: Any = FakeModel, **settings: Any):
        self.training = Training(write_checkpoint(folder / "base"), folder / "bucket", changed_frac=0.1)
        (folder / "stage").mkdir(exist_ok=True)
        self.settings = Settings(str(folder / "bucket"), stage_dir=folder / "stage", server_id="one", **settings)
        self.engine = FakeEngine([FakeWorker(self.training.base, rank, ranks, model) for rank in range(ranks)])
        self.subscriber = Subscriber(self.settings.bucket, self.settings.stage_dir)
        self.coordinator = Coordinator(
            self.engine, Ranks(self.engine), self.subscriber, self.settings, lambda: self.training.base
        )

    def step(self) -> dict[str, Any]:
        self.coordinator.step()
        status = self.coordinator.status.to_json()
        json.dumps(status)
        return status

    def weights(self) -> list[dict[str, list[int]]]:
        return [parameters_of(worker.model) for worker in self.engine.workers]

    def loaded(self) -> list[dict[str, list[int]]]:
        """The weights of servers that loaded the trainer's newest state in full."""
        ranks = len(self.engine.workers)
        return [parameters_of(as_loaded(self.training.bits, rank, ranks)) for rank in range(ranks)]

    def ack(self) -> Ack:
        path = self.training.bucket / "acks" / "one.json"
        return Ack.from_bytes(path.read_bytes(), str(path))

    def staged_files(self) -> list[Path]:
        return [path for path in self.settings.stage_dir.rglob("*") if path.is_file()]


def publish(server: Server, encoding: str = "plain") -> Manifest:
    return server.training.publish(server.writer, encoding)  # type: ignore[attr-defined]


def on_rank(rank: int, change: Callable[[Callable[[], Reply]], Reply]) -> Callable[..., Reply]:
    return lambda at, call: change(call) if at == rank else call()


def refuses(call: Callable[[], Reply]) -> Reply:
    return {"error": "out of memory", "kind": "OutOfMemoryError"}


def writes_then_fails(call: Callable[[], Reply]) -> Reply:
    call()
    return {"error": "the device fell off the bus", "kind": "RuntimeError"}


def miscounts(call: Callable[[], Reply]) -> Reply:
    return call() | {"lanes_sha256": "0" * 64}


def forgets(call: Callable[[], Reply]) -> Reply:
    reply = call()
    del reply["lanes_sha256"]
    return reply


def raises(call: Callable[[], Reply]) -> Reply:
    raise RuntimeError("executor failed")


def checked_out(server: Server, tmp_path: Path) -> Path:
    return checkout(
        BucketReader(open_store(server.training.bucket)),
        pointed_to(server.training.bucket),
        tmp_path / "anchor",
        base_folder=tmp_path / "moved" if (tmp_path / "moved").exists() else None,
    )


def rewrite_latest(server: Server, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Replace the newest manifest, as no honest trainer does."""
    import hashlib

    manifest = change(pointed_to(server.training.bucket))
    raw, key = manifest.to_bytes(), manifest_key(manifest.version.seq)
    target = server.training.bucket / key
    target.unlink(missing_ok=True)
    target.write_bytes(raw)
    pointer = Pointer(manifest.version, ObjectRef(key, len(raw), hashlib.sha256(raw).hexdigest()))
    (server.training.bucket / "LATEST").write_bytes(pointer.to_bytes())
    return manifest


def steps_until(server: Server, key: str, most: int = 12) -> dict[str, Any]:
    status = {}
    for _ in range(most):
        status = server.step()
        if status[key]:
            break
    return status


def publish_anchor(server: Server) -> Manifest:
    """A version with an anchor of its own."""
    delta = server.training.change()
    writer = server.writer  # type: ignore[attr-defined]
    table = server.training.table
    anchor = stream_anchor(
        writer.store,
        table,
        lambda name: server.training.bits[name].reshape(table[name].shape),
        seq=writer.next_seq,
        digest=server.training.digest,
        files=server.training.base,
    )
    return writer.publish(delta, digest=server.training.digest, step=None, anchor=anchor).manifest


def publish_after_rewrite(server: Server) -> Manifest:
    server.writer = server.training.start()  # type: ignore[attr-defined]
    return publish(server)
