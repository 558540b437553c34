# SPDX-License-Identifier: Apache-2.0
"""Publishing by several ranks, here threads over a store of torch.distributed: turns, rounds, and what goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from faulty_store import FaultyStore, Gate
from torch.distributed import HashStore

from delta_wire.acks import Ack
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest, digest_tensor
from delta_wire.errors import SetupError, StoreError, WriterConflictError
from delta_wire.manifest import VersionId
from delta_wire.replay import materialise, verify
from delta_wire.shards import Shard
from delta_wire.state import Delta, TensorDelta
from trl_delta.config import DeltaSyncConfig
from trl_delta.pace import Pace
from trl_delta.ranks import RankError, Ranks
from trl_delta.replica import ReplayedAnchors
from trl_delta.requests import AnchorRequests
from trl_delta.rounds import Opened, PartWriter
from trl_delta.rows import Rows, upload_rows
from trl_delta.sharded import ShardedPublisher

WAIT_S = 30.0


class Rank:
    """One rank of a training whose weights are `run.bits`: what it owns are its rows of every tensor."""

    def __init__(self, fleet: Fleet, rank: int, encoding: str):
        self.fleet = fleet
        self.rank = rank
        run, count = fleet.run, fleet.count
        self.shard = Shard(rank, count)
        self.spans = {name: self.shard.span(run.table[name]) for name in run.table}
        self.held = {name: self.rows(name).copy() for name in run.table}
        self.failures: list[str] = []
        ranks = Ranks(fleet.keys.clone(), rank, count, "test")
        # all write to one bucket in memory, each by a store of its own, whose writes can be disturbed
        self.store = run.store if rank == 0 else fleet.second_store()
        writer = PartWriter(
            ranks.clone(),
            self.store,
            run.table,
            Opened(run.writer.head, run.writer.next_seq, run.writer if rank == 0 else None),
            dict.fromkeys(run.table, self.shard),
            fleet.anchors if rank == 0 else None,
        )
        self.publisher = ShardedPublisher(
            ranks,
            writer,
            starts={name: start for name, (start, _) in self.spans.items()},
            sizes={name: stop - start for name, (start, stop) in self.spans.items() if stop > start},
            snapshot=lambda name: self.held[name].copy(),
            step=0,
            encoding=encoding,
            mirror={name: bits.copy() for name, bits in self.held.items()} if encoding == "context" else None,
            retry_min_s=0.01,
            retry_max_s=0.05,
            turn_timeout_s=fleet.turn_timeout_s,
        )

    def rows(self, name: str) -> np.ndarray:
        start, stop = self.spans[name]
        return self.fleet.run.bits[name].reshape(-1)[start:stop]

    def extract(self) -> Delta:
        delta: Delta = {}
        for name, held in self.held.items():
            now = self.rows(name)
            changed = np.flatnonzero(now != held)
            if changed.size:
                indices = (changed + self.spans[name][0]).astype(np.int32)
                delta[name] = TensorDelta(name, indices, now[changed].copy(), held[changed].copy())
                held[changed] = now[changed]
        return delta

    def digest(self) -> Digest:
        """Of what it owns."""
        parts = (digest_tensor(name, held, self.spans[name][0]) for name, held in self.held.items())
        return sum(parts, Digest())

    def step(self, step: int, *, last: bool = False) -> bool:
        """What a session does after a step; whether it published."""
        publisher = self.publisher
        turn = publisher.take_last_turn(WAIT_S) if last else publisher.take_turn(step, due=True)
        if publisher.failure is not None:
            self.failures.append(str(publisher.failure))
        elif turn:
            with publisher.extracting:
                try:
                    delta = self.extract()
                except ValueError as error:
                    publisher.skip(error, step=step, stops=False)
                else:
                    publisher.submit(delta, digest=self.digest(), step=step)
        return turn and publisher.failure is None


class Fleet:
    """All ranks. `step` changes the weights and calls every rank, in the order of a real training."""

    def __init__(self, run, count: int, encoding: str, turn_timeout_s: float):
        self.run = run
        self.count = count
        self.turn_timeout_s = turn_timeout_s
        self.keys = HashStore()
        self.clock_s = 1000.0
        self.anchors = ReplayedAnchors(
            run.store,
            run.table,
            run.writer.head,
            factor=1e6,
            make_reader=run.reader,
            files=run.base,
            requests=AnchorRequests(clock=lambda: self.clock_s),
        )
        self.ranks = [Rank(self, rank, encoding) for rank in range(count)]
        self.steps = 0

    def second_store(self) -> FaultyStore:
        store = FaultyStore()
        store.name, store.url = self.run.store.name, self.run.store.url
        return store

    def step(self, *, per_tensor: int = 3, last: bool = False) -> list[bool]:
        self.steps += 1
        if per_tensor:
            self.run.next_delta(per_tensor)
        return [rank.step(self.steps, last=last) for rank in self.ranks]

    def step_until_turn(self) -> None:
        """Until the weights of a step become a version, of which there are no more than two under way."""
        until_s = time.monotonic() + WAIT_S
        while not all(self.step()):
            assert time.monotonic() < until_s
            time.sleep(0.001)

    def ask(self, seq: int) -> None:
        """A server cannot get past a version."""
        run = self.run.writer.version.run
        ack = Ack("a", VersionId(run, 1, 0), Digest(), "degraded", "lost", None, 1.0, VersionId(run, 1, seq))
        self.ranks[0].publisher.heed([ack])

    def settle(self) -> None:
        assert all(rank.publisher.wait(WAIT_S) for rank in self.ranks)

    def assert_bucket_holds_the_weights(self) -> None:
        reader = self.run.reader()
        with materialise(reader, reader.latest()) as state:
            assert all(np.array_equal(state.bits(name), bits) for name, bits in self.run.bits.items())
        assert all(check.ok for check in verify(reader))

    def close(self) -> None:
        closing = [threading.Thread(target=rank.publisher.close, args=(0,)) for rank in self.ranks]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


@pytest.fixture
def make_fleet(tools, base: Path) -> Iterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def make(count: int = 3, encoding: str = "packed", turn_timeout_s: float = WAIT_S) -> Fleet:
        fleets.append(Fleet(tools.Run(FaultyStore(), base), count, encoding, turn_timeout_s))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.mark.parametrize("encoding", ["packed", "context", "plain"])
@pytest.mark.parametrize("count", [2, 5])
def test_every_step_is_published_by_all(make_fleet, count: int, encoding: str):
    fleet = make_fleet(count, encoding)
    for _ in range(3):
        assert fleet.step() == [True] * count
        fleet.settle()
    for rank in fleet.ranks:
        assert [record.seq for record in rank.publisher.records] == [1, 2, 3]
        assert [record.num_changed for record in rank.publisher.records] == [9, 9, 9]
        assert rank.publisher.digest_of(2) == fleet.run.reader().manifest(2).digest
        assert rank.publisher.step_of(3) == 3
    fleet.assert_bucket_holds_the_weights()


def test_a_step_without_a_change_needs_no_version(make_fleet):
    fleet = make_fleet()
    fleet.step()
    fleet.settle()
    assert fleet.step(per_tensor=0) == [True] * 3
    fleet.settle()
    assert fleet.run.reader().latest().version.seq == 1
    assert [rank.publisher.step_of(1) for rank in fleet.ranks] == [2, 2, 2]
    # changes on one rank only
    fleet.run.bits["embed.weight"][0, 0] ^= 1
    fleet.step(per_tensor=0)
    fleet.settle()
    latest = fleet.run.reader().latest()
    assert (latest.version.seq, latest.changed_params, len(latest.delta.objects)) == (2, 1, 1)
    fleet.assert_bucket_holds_the_weights()


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank_delays_versions_and_holds_up_nobody(make_fleet, slow: int):
    fleet = make_fleet()
    gate = Gate()
    fleet.ranks[slow].store.fault = gate
    published = [fleet.step() for _ in range(10)]
    # one on its way, one waiting; no rank extracted what another did not
    assert published[:2] == [[True] * 3, [True] * 3] and published[2:] == [[False] * 3] * 8
    assert gate.reached.wait(WAIT_S)
    assert fleet.run.reader().latest().version.seq == 0
    gate.open()
    fleet.settle()
    assert fleet.run.reader().latest().version.seq == 2
    # the first step after that tells the ranks, the one after it publishes all the rest
    assert fleet.step() == [False] * 3 and fleet.step() == [True] * 3
    fleet.settle()
    assert [rank.publisher.step_of(3) for rank in fleet.ranks] == [12] * 3
    fleet.assert_bucket_holds_the_weights()


def test_a_bucket_out_of_reach_costs_freshness_only(make_fleet):
    fleet = make_fleet()

    def refuse(key: str) -> None:
        raise StoreError(f"{key}: no bucket")

    for store in [rank.store for rank in fleet.ranks]:
        store.fault = refuse
    for _ in range(6):
        fleet.step()
    fleet.ranks[1].store.fault = fleet.ranks[2].store.fault = None
    fleet.step()
    assert fleet.run.reader().latest().version.seq == 0
    # the manifest's outcome stays open after the parts are there
    fleet.run.store.fault = lambda key: None if key.startswith("deltas/") else refuse(key)
    time.sleep(0.1)
    fleet.run.store.fault = None
    fleet.step(last=True)
    fleet.settle()
    fleet.assert_bucket_holds_the_weights()
    assert all(rank.publisher.failure is None for rank in fleet.ranks)


def test_the_last_step_is_published_whatever_waits(make_fleet):
    fleet = make_fleet()
    gate = Gate()
    fleet.ranks[1].store.fault = gate
    for _ in range(4):
        fleet.step()
    assert fleet.step(last=True) == [True] * 3
    gate.open()
    fleet.settle()
    assert [record.step for record in fleet.ranks[0].publisher.records] == [1, 2, 5]
    fleet.assert_bucket_holds_the_weights()


class NoServers:
    seq = None


def test_a_generation_waits_for_room_but_not_for_ever(make_fleet, caplog):
    """Before weights between two turns are handed over: what waits must not grow while the bucket is away."""
    fleet = make_fleet()
    gate = Gate()
    fleet.ranks[1].store.fault = gate
    fleet.step()
    fleet.step()
    publisher = fleet.ranks[0].publisher
    config = DeltaSyncConfig(delta_sync_lag_timeout_s=0.1)
    pace = Pace("the bucket", config, publisher, NoServers())  # pyright: ignore[reportArgumentType]
    assert not pace.wait_for_room()
    assert "the bucket: expected version 1 in the bucket, found none that serves after 0.1 s" in caplog.text
    gate.open()
    fleet.settle()
    assert pace.wait_for_room()


def fail(*args: object) -> None:
    raise ValueError("a bug")


def stopped(fleet: Fleet) -> list[str]:
    """Step until all ranks have stopped: at the same step."""
    until_s = time.monotonic() + WAIT_S
    while not any(rank.failures for rank in fleet.ranks):
        assert time.monotonic() < until_s
        fleet.step()
        time.sleep(0.01)
    assert all(len(rank.failures) == 1 for rank in fleet.ranks)
    return [rank.failures[0] for rank in fleet.ranks]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_stops_all_after_the_same_step(make_fleet, failing: int):
    fleet = make_fleet()
    fleet.ranks[failing].store.fault = fail
    assert all("a bug" in reason for reason in stopped(fleet))
    assert fleet.run.reader().latest().version.seq == 0
    before = [list(rank.failures) for rank in fleet.ranks]
    fleet.step()
    # told once
    assert fleet.step() == [False] * 3
    assert [rank.failures[:1] for rank in fleet.ranks] == before


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_look_costs_a_version_and_nobody_loses_a_change(make_fleet, failing: int, caplog):
    fleet = make_fleet(encoding="context")
    rank = fleet.ranks[failing]
    extract = rank.extract
    for waits in (False, True):
        gate = Gate()
        if waits:
            # the next version is begun before it is known everywhere that this one does not come about
            fleet.ranks[2].store.fault = gate
        rank.extract = broken_look
        fleet.step_until_turn()
        rank.extract = extract
        if not waits:
            assert not any(other.publisher.wait(WAIT_S) for other in fleet.ranks)
        fleet.step_until_turn()
        gate.open()
        fleet.settle()
    assert fleet.run.reader().latest().version.seq == 2
    assert [record.seq for record in rank.publisher.records] == [1, 2]
    fleet.assert_bucket_holds_the_weights()
    said = [record.getMessage() for record in caplog.records if "could not be looked at" in record.getMessage()]
    assert len(said) == 2 and all(f"rank {failing}: no memory" in line for line in said)
    # the last one: nobody says that it is there
    rank.extract = broken_look
    fleet.step(last=True)
    assert not any(other.publisher.wait(WAIT_S) for other in fleet.ranks)
    assert all(other.publisher.left_out for other in fleet.ranks)
    assert fleet.run.reader().latest().version.seq == 2


def broken_look() -> Delta:
    raise ValueError("no memory")


def test_a_wait_in_vain_with_the_policy_to_stop_ends_all(make_fleet):
    """The first rank alone waits for servers, and would leave the others to their next collective."""
    fleet = make_fleet()
    fleet.step()
    fleet.ranks[0].publisher.stop(SetupError("the servers are behind"))
    assert all("the servers are behind" in reason for reason in stopped(fleet))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_between_two_rounds_stops_all(make_fleet, failing: int):
    """What a thread does after its round is heard of by those that wait for it in the next one."""
    fleet = make_fleet()
    fleet.ranks[failing].publisher._advance_mirror = fail
    fleet.ranks[failing].publisher._mirror = {}
    assert all("a bug" in reason for reason in stopped(fleet))


def test_a_server_that_asks_gets_an_anchor_of_what_the_ranks_remember(make_fleet, tmp_path: Path, monkeypatch):
    """And not of what the bucket holds, from which the server has been cut off."""
    fleet = make_fleet()
    for _ in range(2):
        fleet.step_until_turn()
        fleet.settle()
    lost = fleet.run.reader().manifest(1).delta.objects[0].key
    fleet.run.store.delete([lost])
    fleet.ask(2)
    publisher = fleet.ranks[0].publisher
    assert publisher.needs_step
    gate = Gate()

    def upload_later(store, *args, **kwargs) -> Rows:
        if store is fleet.ranks[1].store:
            gate("rows")
        return upload_rows(store, *args, **kwargs)

    monkeypatch.setattr("trl_delta.sharded.upload_rows", upload_later)
    while not gate.reached.wait(0.1):
        fleet.step()
    assert not publisher.needs_step
    # what each remembers goes on while it is read
    later = [fleet.step() for _ in range(3)]
    gate.open()
    fleet.settle()
    fleet.step_until_turn()
    fleet.settle()
    reader = fleet.run.reader()
    anchored = [manifest for manifest in reader.walk(reader.latest()) if manifest.anchor and manifest.version.seq]
    assert len(anchored) == 1 and any(all(turn) for turn in later)
    assert anchored[0].version.seq < reader.latest().version.seq
    folder = reader.fetch_anchor(anchored[0], tmp_path / "anchor")
    assert Checkpoint(folder).digest() == anchored[0].digest and (folder / "config.json").is_file()
    assert not [info.key for info in fleet.run.store.list("anchors/") if "-rows/" in info.key]
    with materialise(reader, reader.latest()) as state:
        assert all(np.array_equal(state.bits(name), bits) for name, bits in fleet.run.bits.items())
    # one answers all that were before it, and the next comes after ten minutes
    fleet.ask(2)
    assert not publisher.needs_step
    fleet.ask(reader.latest().version.seq)
    assert not publisher.needs_step
    fleet.clock_s += 600.0
    assert publisher.needs_step


def test_rows_that_cannot_be_brought_together_cost_the_anchor_and_not_the_version(make_fleet, monkeypatch, caplog):
    fleet = make_fleet()
    fleet.step()
    fleet.settle()
    tries = []

    def full(*args: object, **kwargs: object) -> None:
        tries.append(1)
        raise OSError("No space left on device")

    monkeypatch.setattr("trl_delta.rows.write_tensors", full)
    fleet.ask(1)
    while not tries:
        fleet.step_until_turn()
        fleet.settle()
    assert "No space left on device" in caplog.text
    newest = fleet.run.reader().latest()
    assert newest.version.seq > 1 and newest.anchor is None
    # not at every version: after a minute
    assert not fleet.ranks[0].publisher.needs_step
    monkeypatch.undo()
    fleet.clock_s += 60.0
    assert fleet.ranks[0].publisher.needs_step
    while fleet.run.reader().latest().anchor is None:
        # nothing changes any more
        fleet.step(per_tensor=0)
        fleet.settle()
    fleet.assert_bucket_holds_the_weights()


def test_a_wait_for_servers_ends_where_only_the_next_step_helps_them(make_fleet):
    fleet = make_fleet()
    fleet.step()
    fleet.settle()
    publisher = fleet.ranks[0].publisher
    pace = Pace("the bucket", DeltaSyncConfig(), publisher, NoServers())  # pyright: ignore[reportArgumentType]
    fleet.ask(1)
    began_s = time.monotonic()
    assert not pace.wait(0)
    # and not after delta_sync_lag_timeout_s
    assert time.monotonic() - began_s < 60


def test_parts_of_another_state_are_never_committed(make_fleet):
    """A rank whose changes are not what leads from the newest version to what it holds."""
    fleet = make_fleet()
    held = fleet.ranks[2].held["embed.weight"]
    held[0] ^= 1
    fleet.run.bits["embed.weight"].reshape(-1)[fleet.ranks[2].spans["embed.weight"][0]] ^= 1
    assert all("their parts do not begin at version" in reason for reason in stopped(fleet))
    assert fleet.run.reader().latest().version.seq == 0


def test_another_writer_stops_all_ranks(make_fleet):
    fleet = make_fleet()
    fleet.run.start()
    fleet.run.store.put("LATEST", b"{}")
    reasons = stopped(fleet)
    assert all("LATEST" in reason for reason in reasons)
    assert isinstance(fleet.ranks[0].publisher.failure, WriterConflictError)
    assert isinstance(fleet.ranks[1].publisher.failure, RankError)


def test_ranks_of_which_one_has_died_do_not_hang(make_fleet):
    """The dead one is here one that is never called again; its process is gone in the test of the trainer."""
    fleet = make_fleet()
    fleet.step()
    fleet.settle()
    alive = fleet.ranks[:2]
    for step in range(2, 8):
        fleet.run.next_delta()
        assert [rank.step(step) for rank in alive] == [step < 4] * 2
    assert [rank.step(8, last=True) for rank in alive] == [True] * 2
    began_s = time.monotonic()
    assert not any(rank.publisher.wait(0.2) for rank in alive)
    assert time.monotonic() - began_s < WAIT_S
    assert fleet.run.reader().latest().version.seq == 1


def test_a_first_rank_that_has_died_is_noticed(make_fleet):
    fleet = make_fleet(turn_timeout_s=0.2)
    fleet.step()
    fleet.settle()
    for step in range(2, 4):
        fleet.run.next_delta()
        fleet.ranks[1].step(step)
    assert "rank 0 has said nothing" in fleet.ranks[1].failures[0]
    assert not fleet.ranks[1].publisher.wait(WAIT_S)


def test_a_first_rank_that_dies_between_two_steps_leaves_its_weights_unpublished(make_fleet):
    """The others have nothing under way then, and yet what they hold is not in the bucket."""
    fleet = make_fleet()
    fleet.step()
    fleet.settle()
    survivor = fleet.ranks[1].publisher

    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    store, survivor._ranks._store = survivor._ranks._store, Gone()
    fleet.run.next_delta()
    fleet.ranks[1].step(2)
    assert "cannot reach the store" in fleet.ranks[1].failures[0]
    assert not survivor.wait(WAIT_S)
    survivor._ranks._store = store


def test_errors_of_one_rank_are_told_to_all_at_the_start():
    keys = HashStore()
    found: dict[int, str] = {}

    def start(rank: int) -> None:
        def action() -> int:
            if rank == 1:
                raise ValueError("no model here")
            return rank

        try:
            Ranks(keys.clone(), rank, 3, "test").all_do(action)
        except (ValueError, RankError) as error:
            found[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found[1] == "ValueError: no model here"
    told = "RankError: rank 1 of 3 has failed: ValueError: no model here"
    assert found[0] == found[2] == told


def test_what_was_told_is_forgotten():
    """A generation of GRPO tells something at every step, for as long as a training lasts."""
    keys = HashStore()

    def talk(rank: int) -> None:
        ranks = Ranks(keys.clone(), rank, 3, "test")
        for number in range(20):
            told.append(ranks.first_does(lambda number=number: number) == number)

    told: list[bool] = []
    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert told == [True] * 60
    assert keys.num_keys() <= 3


def test_one_process_needs_no_store():
    ranks = Ranks.join(1)
    assert ranks.is_first and ranks.count == 1
    assert ranks.all_do(lambda: 7) == [7] and ranks.first_does(lambda: 8) == 8
    with pytest.raises(ValueError, match="own error"):
        ranks.all_do(lambda: (_ for _ in ()).throw(ValueError("own error")))
