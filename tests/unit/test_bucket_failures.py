# SPDX-License-Identifier: Apache-2.0
"""Calls that fail, trainers that die, and other writers: nothing is lost, nothing doubled, nobody overwritten."""

import threading

import pytest
from bucket_run import FaultyStore, replay, rewrite, same, write_through

from delta_wire.begin import pointer_bytes
from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.digest import Digest
from delta_wire.errors import (
    BaseMismatchError,
    BucketNotFoundError,
    ModelMismatchError,
    StoreUnavailableError,
    WriterConflictError,
)
from delta_wire.manifest import manifest_key
from delta_wire.state import TensorSpec, TensorTable, compose
from delta_wire.stores.memory import MemoryStore


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("coalesce", [False, True])
def test_a_failure_at_any_call_loses_and_doubles_nothing(run, after, coalesce):
    """Fail the n-th call for every n; the trainer repeats the delta, or sends it together with the next."""
    number = 0
    while True:
        number += 1
        store = FaultyStore(run.store)
        write_through(run, store)
        store.fail_at, store.after = number, after
        head = run.writer.version.seq
        # what the trainer knows to be published; more than a third of the smallest tensor changes, so it is sent whole
        mirror = {name: bits.copy() for name, bits in run.bits.items()}
        delta, digest = run.next_delta(per_tensor=4)
        options = {"step": number, "encoding": "plain", "old_bits": mirror.__getitem__}
        try:
            run.writer.publish(delta, digest=digest, **options)
            break
        except StoreUnavailableError:
            pass
        store.fail_at = None
        if coalesce:
            later, digest = run.next_delta(per_tensor=4)
            delta = compose(delta, later)
        published = run.writer.publish(delta, digest=digest, **options)
        reader = run.reader()
        assert reader.fetch_delta(published.manifest, run.base)["layer.0.norm.weight"].num_changed == 8
        assert reader.latest() == published.manifest == reader.manifest(run.writer.version.seq)
        assert run.writer.digest == digest == published.manifest.digest
        assert same(replay(run), run.bits)
        new = len(reader.chain(run.base_digest, reader.latest())) - head
        assert new == 1 or (coalesce and new == 2)
        seqs = [manifest.version.seq for manifest in reader.walk(reader.latest())]
        assert seqs == list(range(len(seqs)))[::-1]
    # pointer check, object, manifest, pointer check, pointer
    assert number == 6


@pytest.mark.parametrize("after", [False, True])
def test_a_start_that_fails_at_any_call_can_be_repeated(run, after):
    number = 0
    while True:
        number += 1
        inner = MemoryStore(f"start-{number}")
        inner.ensure()
        store = FaultyStore(inner)
        store.fail_at, store.after = number, after
        try:
            BucketWriter.start(store, table=run.table, digest=run.base_digest, reference=str(run.base))
            break
        except StoreUnavailableError:
            pass
        store.fail_at = None
        writer = BucketWriter.start(store, table=run.table, digest=run.base_digest, reference=str(run.base))
        latest = BucketReader(inner).latest()
        assert latest.version == writer.version and latest.digest == run.base_digest
        assert len(inner.list("versions/")) == 1
        inner.drop()
    assert number > 4


def test_an_answer_lost_below_the_store_is_no_conflict(run):
    """A store that repeats a create-only write by itself meets its own object."""

    class Repeating(FaultyStore):
        def __getattr__(self, name):
            call = super().__getattr__(name)
            if name != "put":
                return call

            def put(key, data, *, create_only=False):
                if create_only:
                    call(key, data, create_only=True)
                call(key, data, create_only=create_only)

            return put

    write_through(run, Repeating(run.store))
    run.publish()
    assert same(replay(run), run.bits)


def publish_until(run, delta, digest, fail_at):
    """Publish through a store of which the call of that number fails."""
    store = FaultyStore(run.store)
    store.fail_at = fail_at
    write_through(run, store)
    with pytest.raises(StoreUnavailableError):
        run.writer.publish(delta, digest=digest, step=1, encoding="plain")


def test_a_number_that_another_trainer_took_meanwhile(run):
    delta, digest = run.next_delta()
    # before the manifest is written
    publish_until(run, delta, digest, fail_at=3)
    foreign = run.reader().latest().to_bytes().replace(b'"seq":0', b'"seq":1')
    run.store.put(manifest_key(1), foreign)
    with pytest.raises(WriterConflictError, match=r"000000000001\.json was written by another trainer"):
        run.writer.publish(delta, digest=digest, step=1, encoding="plain")
    assert run.reader().latest().version.seq == 0 and run.store.get(manifest_key(1), 1 << 20) == foreign


def test_an_unfinished_start_of_other_weights_is_not_taken_over(run, tools):
    run.store.delete(["LATEST"])
    with pytest.raises(BaseMismatchError, match="unfinished start of run"):
        BucketWriter.start(run.store, table=run.table, digest=Digest(1, 1), reference=str(run.base))
    other = TensorTable([TensorSpec("other", (3,))])
    with pytest.raises(ModelMismatchError, match="unfinished start"):
        BucketWriter.start(run.store, table=other, digest=run.base_digest, reference=str(run.base))
    assert not run.store.exists("LATEST")
    run.writer = run.start()
    run.publish()
    assert same(replay(run), run.bits)


def test_an_unseen_manifest_of_another_branch_is_not_finished(run):
    run.publish()
    _, digest = run.next_delta()
    stray = rewrite(run, 1, version__seq=2, digest=str(digest), parent__manifest_sha256="0" * 64, parent__seq=1)
    assert stray.version.seq == 2
    raw = stray.to_bytes()
    run.store.put(manifest_key(1), run.writer.head.to_bytes())
    run.store.put(manifest_key(2), raw)
    run.store.put("LATEST", pointer_bytes(run.writer.head))
    with pytest.raises(BaseMismatchError):
        run.start()
    assert run.reader().latest().version.seq == 1


def test_a_trainer_that_died_before_the_pointer_is_continued(run):
    run.publish()
    delta, digest = run.next_delta()
    # the last call of a publication is the pointer
    publish_until(run, delta, digest, fail_at=5)
    assert run.reader().latest().version.seq == 1 and run.reader().manifest(2).digest == digest
    # a trainer with the unseen state finishes the publication
    run.writer = run.start()
    assert run.reader().latest().version.seq == 2
    run.publish()
    assert same(replay(run), run.bits)


def test_a_manifest_nobody_has_seen_is_stepped_over(run):
    published = run.publish().manifest
    saved = {name: bits.copy() for name, bits in run.bits.items()}
    delta, digest = run.next_delta()
    publish_until(run, delta, digest, fail_at=5)
    # this trainer resumes from the last version that readers know
    run.bits = saved
    run.writer = run.start()
    assert run.writer.version == published.version
    latest = run.publish().manifest
    assert latest.version.seq == 3 and latest.parent.seq == 1
    assert same(replay(run), run.bits)


def test_a_second_writer_stops_the_first(run):
    run.publish()
    first = run.writer
    run.writer = run.start()
    run.publish()
    delta, digest = run.next_delta()
    with pytest.raises(
        WriterConflictError, match=r"LATEST names \w+-2-2\. Publishing has ended for this run: stop the other trainer"
    ):
        first.publish(delta, digest=digest, step=1, encoding="plain")


def test_two_writers_on_the_same_number_have_one_winner(run):
    writers = [run.start() for _ in range(4)]
    delta, digest = run.next_delta()
    results = []
    barrier = threading.Barrier(len(writers))

    def publish(number: int, writer: BucketWriter) -> None:
        barrier.wait()
        try:
            writer.publish(delta, digest=digest, step=number, encoding="plain")
            results.append(number)
        except WriterConflictError:
            pass

    threads = [threading.Thread(target=publish, args=entry) for entry in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 1 and run.reader().latest().step == results[0]
    assert same(replay(run), run.bits)


def test_a_bucket_that_was_emptied_removed_or_replaced(run, make_run):
    run.publish()
    run.store.delete(["LATEST"])
    delta, digest = run.next_delta()
    with pytest.raises(WriterConflictError, match="LATEST was removed"):
        run.writer.publish(delta, digest=digest, step=1, encoding="plain")
    with pytest.raises(WriterConflictError, match="there are 2 versions but no LATEST"):
        run.start()
    run.store.put("LATEST", b"garbage")
    with pytest.raises(WriterConflictError, match="LATEST names something else"):
        run.writer.publish(delta, digest=digest, step=1, encoding="plain")
    run.store.root.rename(run.store.root.with_name("moved"))
    with pytest.raises(BucketNotFoundError, match="no such folder"):
        run.writer.publish(delta, digest=digest, step=1, encoding="plain")
    other = make_run()
    other.store.root.rename(run.store.root)
    with pytest.raises(WriterConflictError, match=f"LATEST names {other.writer.version}"):
        run.writer.publish(delta, digest=digest, step=1, encoding="plain")
