# SPDX-License-Identifier: Apache-2.0
"""One of several training processes fails while all publish; see `rank_programs.run_ranks`."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_adapters import adapt
from rank_programs import WAIT_S, batches, learn, load, wrap

from delta_wire.acks import Ack
from delta_wire.bucket import BucketReader
from delta_wire.manifest import Manifest
from delta_wire.stores import open_store
from trl_delta import DeltaSyncConfig, DeltaSyncSession, gathering, joint, names, rows, session, upkeep
from trl_delta.detector import Detector
from trl_delta.ranks import RankError
from trl_delta.requests import AnchorRequests

# where a look at the weights can fail: before, in and after the collectives, and while changes are looked for
LOOKS: dict[str, tuple[Any, str]] = {
    "read": (names.Naming, "live"),
    "memory for factors": (gathering.Gathering, "__init__"),
    "factors put together": (gathering.Gathering, "whole"),
    "rows of a weight": (joint, "own_tensors"),
    "changes": (Detector, "extract"),
}
# what a process does before the first step
STARTS: dict[str, tuple[Any, str]] = {
    "bucket": (joint, "open_store"),
    "names": (names.Naming, "live"),
    "signing key": (upkeep, "Signer"),
    "copy of the weights": (joint, "entry_bits"),
    "threads": (session, "make_publisher"),
}


class Broken(Exception):
    """What a process raises here."""


def broken(where: tuple[Any, str], here: bool) -> AbstractContextManager[Any]:
    """A function that raises, on this process or on another one."""
    return mock.patch.object(*where, side_effect=Broken("no memory left")) if here else nullcontext()


class Told(logging.Handler):
    """Warnings of delta sync in this process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("trl_delta").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fail_at_steps(rank: int, count: int, base: str, folder: str, kind: str) -> dict[str, Any]:
    """Train an adapter that is published merged. At some steps one process fails, each time at another place, and at
    the end; beside it, on the first process, one process publishes the gathered weights after the other steps."""
    told = Told()
    model = adapt(base)
    single = copy.deepcopy(model)
    model = wrap(model, kind, count)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    published = DeltaSyncSession(f"{folder}/sharded")
    published.start(model, world_size=count)
    alone = DeltaSyncSession(f"{folder}/single")
    if rank == 0:
        alone.start(single)
    # every place on every process, the first two steps in a row; factors that all hold are not gathered
    here = [place for place in LOOKS if kind == "fsdp2" or "factors" not in place]
    places = [(place, failing) for place in here for failing in range(count)]
    plan = [None, places[0], *(step for place in places for step in (place, None))]
    ids = batches(rank, len(plan) + 1)
    seqs = []
    for step, failure in enumerate(plan, 1):
        learn(model, optimizer, next(ids), single)
        with nullcontext() if failure is None else broken(LOOKS[failure[0]], failure[1] == rank):
            published.step(step)
        assert published.publisher.wait(WAIT_S) == (failure is None)
        seqs.append(published.publisher.durable_seq)
        if failure is None and rank == 0:
            alone.step(step)
            assert alone.publisher.wait(WAIT_S)
    with broken(LOOKS["changes"], rank == 1):
        finished = published.finish()
    if rank == 0:
        assert alone.finish()
    return {"plan": plan, "seqs": seqs, "told": told.lines, "finished": finished}


def fail_and_stop(rank: int, count: int, base: str, folder: str, kind: str) -> str:
    """With the policy to end training by what cannot be mended: what each process ends with, at the same step."""
    model = wrap(adapt(base), kind, count)
    published = DeltaSyncSession(folder, DeltaSyncConfig(delta_sync_on_failure="stop"))
    published.start(model, world_size=count)
    for step in range(1, 1000):
        try:
            with broken(LOOKS["changes"], rank == 1 and step == 2):
                published.step(step)
        except (Broken, RankError) as error:
            published.close()
            return f"step {step}: {type(error).__name__}: {error}"
        # a collective of the training
        dist.barrier()
    raise AssertionError("nobody was told")


def fail_at_the_start(rank: int, count: int, base: str, folder: str, kind: str) -> list[tuple[str, int, str]]:
    """Every place where one process can fail before the first step: what each process ends with."""
    model = wrap(adapt(base), kind, count)
    config = DeltaSyncConfig(delta_sync_signing_key="a key")
    found = []
    for number, (place, where) in enumerate(STARTS.items()):
        # only the first process signs, and holds a copy
        for failing in [0] if place in ("signing key", "copy of the weights") else range(count):
            started = DeltaSyncSession(f"{folder}/{number}-{failing}", config if place == "signing key" else None)
            try:
                with broken(where, failing == rank):
                    started.start(model, world_size=count)
            except (Broken, RankError) as error:
                found.append((place, failing, f"{type(error).__name__}: {error}"))
    return found


def answer_a_request(rank: int, count: int, base: str, bucket: str, kind: str, how: str) -> dict[str, Any]:
    """A server is cut off by a lost object and asks for an anchor while training goes on. At the first try one process
    has no room for its rows."""
    told = Told()
    model = wrap(adapt(base) if how else load(base), kind, count)
    single = adapt(base) if how else load(base)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    # no anchor for its price
    config = DeltaSyncConfig(delta_sync_adapter=how or "merged", delta_sync_anchor_factor=1e6)
    published = DeltaSyncSession(bucket, config)
    published.start(model, world_size=count)
    anchors = published._upkeep._replayed
    if anchors is not None:
        # two tries are minutes apart
        anchors.requests = AnchorRequests(least_pause_s=0.5)
    ids = batches(rank, 1000)

    def train(until: Callable[[], bool]) -> None:
        # the same number of steps everywhere
        while not any(_of_all(until())):
            learn(model, optimizer, next(ids), single)
            published.step(published.last_step + 1)
            assert published.publisher.wait(WAIT_S)

    train(lambda: published.last_step == 3)
    if rank == 0:
        _lose_and_ask(bucket)
    with mock.patch.object(rows, "write_tensors", side_effect=OSError("no room left")) if rank == 1 else nullcontext():
        train(lambda: any("no anchor for version" in line for line in told.lines))
    train(lambda: _newest(bucket).anchor is not None)
    anchored = _newest(bucket).version.seq
    # and on from there
    learn(model, optimizer, next(ids), single)
    published.step(published.last_step + 1)
    return {"anchored": anchored, "finished": published.finish(), "told": told.lines}


def _of_all(value: Any) -> list[Any]:
    """Of every process."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _newest(bucket: str) -> Manifest:
    latest = BucketReader(open_store(bucket)).latest()
    assert latest is not None
    return latest


def _lose_and_ask(bucket: str) -> None:
    """What a server does that was started on version 0 when the delta of version 2 is lost for good."""
    reader = BucketReader(open_store(bucket))
    newest = _newest(bucket)
    lost = reader.manifest(2).delta
    assert lost is not None
    reader.store.delete([lost.objects[0].key])
    first = reader.manifest(0)
    ack = Ack("server", first.version, first.digest, "degraded", "lost", None, time.time(), newest.version)
    reader.write_ack(ack)
