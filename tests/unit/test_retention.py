# SPDX-License-Identifier: Apache-2.0
"""What retention removes, and what it must never remove."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from delta_wire.acks import Ack
from delta_wire.bucket import BucketReader
from delta_wire.checkpoint import Checkpoint
from delta_wire.errors import FormatError, SetupError
from delta_wire.manifest import manifest_key
from delta_wire.replay import State, verify
from delta_wire.retention import Policy, Sweeper, plan, sweep


def make_chain(run, kinds: str) -> None:
    """`d` for a delta, `A` for a version with an anchor."""
    for kind in kinds:
        if kind == "A":
            run.publish_anchor()
        else:
            run.publish()


def keys(run) -> set[str]:
    return {info.key for info in run.store.list("")}


def ack(run, seq: int, served_unix_s: float = 1e12) -> Ack:
    version = run.reader().manifest(seq).version
    return Ack("one", version, run.reader().manifest(seq).digest, "serving", None, None, served_unix_s)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sweeper(run, clock: Clock) -> Sweeper:
    return Sweeper(run.reader(), Policy(grace_s=10, lease_s=10), clock)


def test_an_anchor_is_an_ordinary_checkpoint(run, tmp_path: Path):
    run.publish_anchor()
    latest = run.reader().latest()
    folder = run.reader().fetch_anchor(latest, tmp_path / "anchor")
    checkpoint = Checkpoint(folder)
    assert checkpoint.digest() == latest.digest and len(checkpoint.weight_files()) > 2
    assert (folder / "config.json").read_bytes() == (run.base / "config.json").read_bytes()
    assert not (folder / "optimizer.pt").exists()
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(folder / checkpoint.weight_files()[0], "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    state = State(run.reader(), latest, tmp_path)
    assert all(np.array_equal(state.bits(name), run.bits[name]) for name in run.table)


def test_nothing_goes_before_there_are_two_restart_points(run, sweeper: Sweeper, clock: Clock):
    make_chain(run, "ddd")
    before = keys(run)
    sweeper.sweep(run.writer.version)
    clock.now_s += 100
    assert not sweeper.sweep(run.writer.version).delete and keys(run) == before
    with pytest.raises(SetupError, match="two restart points"):
        Policy(restart_points=1)


def test_two_restart_points_and_what_follows_the_older_stay(run, sweeper: Sweeper, clock: Clock):
    make_chain(run, "ddAddAdd")
    first = sweeper.sweep(run.writer.version)
    assert not first.delete and first.waiting
    clock.now_s += 9
    assert not sweeper.sweep(run.writer.version).delete
    clock.now_s += 1
    found = sweeper.sweep(run.writer.version)
    assert found.oldest is not None and found.oldest.seq == 3
    # the deltas of versions 1 and 2 and their manifests; that of the first version stays
    assert {info.key for info in found.delete} == {info.key for info in first.waiting}
    left = keys(run)
    assert manifest_key(0) in left and manifest_key(1) not in left and manifest_key(3) in left
    assert not any(key.startswith(("deltas/000000000001", "deltas/000000000002")) for key in left)
    checks = list(verify(run.reader()))
    assert [check.seq for check in checks] == [3, 4, 5, 6, 7, 8] and all(check.ok for check in checks)
    run.publish()


def test_a_server_keeps_what_it_needs_next_while_it_is_heard_of(run, sweeper: Sweeper, clock: Clock):
    make_chain(run, "ddd")
    run.store.put("acks/one.json", ack(run, 2).to_bytes())
    make_chain(run, "AdA")
    sweeper.plan()
    clock.now_s += 9
    found = sweeper.plan()
    assert found.oldest is not None and found.oldest.seq == 2
    clock.now_s += 2
    # silent for longer than its lease
    assert sweeper.plan().oldest.seq == 4  # type: ignore[union-attr]
    clock.now_s += 20
    sweeper.sweep(run.writer.version)
    assert run.reader().chain(ack(run, 0).digest, run.reader().latest()) is None


def test_orphans_below_the_newest_version_go_and_others_stay(run, sweeper: Sweeper, clock: Clock):
    make_chain(run, "dd")
    mine = (
        "deltas/000000000001-0123456789abcdef.safetensors",
        "anchors/000000000002-0123456789abcdef/model.safetensors",
    )
    others = (
        "deltas/000000000003-0123456789abcdef.safetensors",
        "versions/000000000003.json",
        "deltas/foreign.safetensors",
        "something/else.txt",
    )
    for key in (*mine, *others):
        run.store.put(key, b"x")
    sweeper.plan()
    clock.now_s += 100
    swept = {info.key for info in sweeper.sweep(run.writer.version).delete}
    assert swept == set(mine) and keys(run) >= set(others)


def test_nothing_is_removed_from_a_run_that_another_trainer_took_over(run, sweeper: Sweeper, clock: Clock):
    make_chain(run, "ddAdA")
    owner = run.writer.version
    sweeper.plan()
    run.writer = run.start()
    run.publish()
    clock.now_s += 100
    before = keys(run)
    assert sweeper.sweep(owner).delete and keys(run) == before


def test_a_clock_that_jumps_does_not_shorten_the_grace_period(run, sweeper: Sweeper, monkeypatch):
    make_chain(run, "ddAdA")
    sweeper.plan()
    monkeypatch.setattr("time.time", lambda: 1e11)
    assert not sweeper.plan().delete


def test_a_damaged_manifest_stops_retention(run, sweeper: Sweeper, clock: Clock):
    make_chain(run, "ddAdA")
    path = run.store.root / manifest_key(4)
    path.write_bytes(path.read_bytes()[:-1])
    before = keys(run)
    with pytest.raises(FormatError, match="000000000004"):
        Sweeper(BucketReader(run.store), Policy(grace_s=0), clock).sweep(run.writer.version)
    assert keys(run) == before


def test_planning_once_goes_by_the_dates_of_the_run(run):
    make_chain(run, "ddAdAd")
    newest_anchor = run.reader().manifest(5)
    policy = Policy(grace_s=60)
    early = plan(run.reader(), policy, now_unix_s=newest_anchor.created_unix_s + 59)
    assert not early.delete and early.waiting
    late = plan(run.reader(), policy, now_unix_s=newest_anchor.created_unix_s + 61)
    assert {info.key for info in late.delete} == {info.key for info in early.waiting}
    total = sum(info.size_bytes for info in run.store.list("") if not info.key.startswith(("tables/", "LATEST")))
    assert late.freed_bytes > 0 and late.kept_bytes + late.freed_bytes == total
    assert sweep(run.store, late) == len(late.delete)
    assert sweep(run.store, late) == len(late.delete)
    assert not plan(run.reader(), policy, now_unix_s=1e11).delete
    assert all(check.ok for check in verify(run.reader()))


def test_an_empty_bucket_has_nothing_to_remove(run):
    run.store.delete([info.key for info in run.store.list("")])
    found = plan(run.reader())
    assert (found.head, found.delete, found.kept_bytes) == (None, (), 0)
