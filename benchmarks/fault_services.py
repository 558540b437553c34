# SPDX-License-Identifier: Apache-2.0
"""The bucket's service in a process of its own, which misbehaves on command: nothing, an S3 server, a hub."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from delta_wire.errors import DeltaError
from delta_wire.stores import open_store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

# a call that hangs is given up after so long
_TIMEOUT_S = 1.5


@dataclass(frozen=True)
class Service:
    """A bucket to use.

    Args:
        url (`str`): its address.
        faults: kinds of misbehaviour, each a function that begins one and returns what ends it, or nothing.
    """

    url: str
    faults: dict[str, Callable[[random.Random], Callable[[], None] | None]]


class RemoteStore:
    """The bucket by way of another process: clients that have run here would not survive in forked children.

    Args:
        url (`str`): its address; it is created.
    """

    def __init__(self, url: str):
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve_store, args=(theirs, url), daemon=True)
        self._process.start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._connection.send((name, args))
            done, value = self._connection.recv()
            if not done:
                raise value
            return value

        return call

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _serve_store(connection: Connection, url: str) -> None:
    store = open_store(url, create=True)
    parent = os.getppid()
    while os.getppid() == parent:
        if connection.poll(0.5):
            name, args = connection.recv()
            try:
                connection.send((True, getattr(store, name)(*args)))
            except DeltaError as error:
                connection.send((False, error))


@contextmanager
def start(store: str, folder: Path) -> Iterator[Service]:
    """Start the service of a kind of store and let this process and its children use it.

    Args:
        store (`str`): `file`, `s3` or `hf`.
        folder (`Path`): for what it keeps.
    """
    os.environ["DELTA_STORE_TIMEOUT_S"] = str(_TIMEOUT_S)
    if store == "file":
        yield Service(str(folder / "bucket"), {})
    elif store == "s3":
        yield from _start_s3(folder)
    else:
        yield from _start_hub(folder)


def _start_s3(folder: Path) -> Iterator[Service]:
    from moto_bucket import MotoServer

    with MotoServer(folder) as server:
        os.environ.update(server.env)
        server.create_bucket("campaign")

        def hang(random: random.Random) -> Callable[[], None]:
            server.process.send_signal(signal.SIGSTOP)
            return lambda: server.process.send_signal(signal.SIGCONT)

        yield Service("s3://campaign/runs/1", {"server_hang": hang})


def _start_hub(folder: Path) -> Iterator[Service]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_hub, args=(theirs,), daemon=True)
    process.start()
    os.environ.update(ours.recv())
    os.environ["HF_HOME"] = str(folder / "hub-home")
    os.environ["HF_HUB_OFFLINE"] = "0"
    import hf_xet
    import huggingface_hub

    assert hf_xet and huggingface_hub

    def fault(pattern: str, **what: object) -> Callable[[random.Random], None]:
        def begin(random: random.Random) -> None:
            ours.send((pattern, {**what, "times": random.randrange(1, 4), "after": random.randrange(4)}))

        return begin

    quota = {"RateLimit": '"api";r=0;t=1', "Retry-After": "1"}
    try:
        yield Service(
            "hf://buckets/team/campaign/runs/1",
            {
                "server_429": fault(".", status=429, headers=quota),
                "server_500": fault(".", status=500),
                "server_503_reading": fault("resolve", status=503),
                "server_hang": fault(".", hang=True),
                "server_close": fault(".", close=True),
                "server_lose": fault("POST", lose=True),
                "server_lose_batch": fault("batch", lose=True),
                "server_truncate": fault("GET", truncate=True),
                "server_partial": fault("batch", partial="runs"),
                "server_stale_list": fault("tree", stale=True),
                "server_slow": fault(".", delay_s=0.5),
            },
        )
    finally:
        process.kill()
        process.join()


def _serve_hub(connection: Connection) -> None:
    from hub_server import HubServer

    parent = os.getppid()
    with HubServer() as hub:
        connection.send(hub.env)
        while os.getppid() == parent:
            if connection.poll(0.2):
                pattern, what = connection.recv()
                hub.fault(pattern, **what)
            time.sleep(0.001)
