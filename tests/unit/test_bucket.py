# SPDX-License-Identifier: Apache-2.0
"""Publishing and following: order, retries, other writers, hostile and damaged buckets."""

import dataclasses
import json
import threading

import numpy as np
import pytest

from delta_wire.begin import pointer_bytes
from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.errors import (
    BaseMismatchError,
    BucketNotFoundError,
    DigestMismatchError,
    FormatError,
    ModelMismatchError,
    ObjectNotFoundError,
    SetupError,
    StoreUnavailableError,
    UnsupportedFormatError,
    WriterConflictError,
)
from delta_wire.manifest import Ack, Manifest, ObjectRef, Pointer, VersionId, manifest_key
from delta_wire.state import TensorDelta, TensorSpec, TensorTable, compose, num_changed, whole
from delta_wire.stores.memory import MemoryStore


class FaultyStore:
    """A store that fails at chosen calls, before or after they took effect, and remembers the order of writes."""

    create_only = True

    def __init__(self, inner):
        self.inner = inner
        self.url = inner.url
        self.writes = []
        self.fail_at = None
        self.after = False
        self.calls = 0

    def __getattr__(self, name):
        call = getattr(self.inner, name)

        def counted(*args, **kwargs):
            self.calls += 1
            fails = self.calls == self.fail_at
            if fails and not self.after:
                raise StoreUnavailableError(f"{self.url}: injected before {name}")
            try:
                result = call(*args, **kwargs)
                if name == "put":
                    self.writes.append(args[0])
                return result
            finally:
                if fails:
                    raise StoreUnavailableError(f"{self.url}: injected after {name}")

        return counted


def write_through(run, store) -> None:
    """Let the writer's calls go through another store from now on."""
    run.writer._head.store = store


def replay(run, reader=None) -> dict[str, np.ndarray]:
    """Bits of the newest version, rebuilt from the base by deltas alone."""
    reader = reader or run.reader()
    base = Checkpoint(run.base)
    bits = {name: base.bits(name).copy() for name in run.table}
    for manifest in reader.chain(run.base_digest, reader.latest()):
        for name, part in reader.fetch_delta(manifest, run.base).items():
            bits[name].reshape(-1)[part.indices] = part.new
    return bits


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def rewrite(run, seq: int, **changes) -> Manifest:
    """Replace fields of a manifest in the bucket and let the pointer follow, as a hostile writer could."""
    value = json.loads(run.store.get(manifest_key(seq), 1 << 20))
    for path, new in changes.items():
        *parents, last = path.split("__")
        inner = value
        for name in parents:
            inner = inner[int(name)] if isinstance(inner, list) else inner[name]
        inner[last] = new
    raw = json.dumps(value).encode()
    run.store.put(manifest_key(seq), raw)
    manifest = Manifest.from_bytes(raw, "rewritten")
    run.store.put(
        "LATEST", Pointer(manifest.version, ObjectRef(manifest_key(seq), len(raw), manifest.sha256)).to_bytes()
    )
    return manifest


# --- publishing and following


def test_a_run_from_start_to_latest(run, tmp_path):
    reader = run.reader()
    first = reader.latest()
    assert first is not None and (first.version.epoch, first.version.seq) == (1, 0)
    assert first.parent is None and first.delta is None and first.anchor is not None
    assert first.anchor.reference == str(run.base) and first.digest == run.base_digest
    published = [run.publish() for _ in range(3)]
    assert [p.manifest.version.seq for p in published] == [1, 2, 3]
    assert all(p.manifest.version.run == first.version.run for p in published)
    latest = reader.latest()
    assert latest == published[-1].manifest and latest.step == run.seed and latest.changed_params == 9
    assert reader.chain(run.base_digest, latest) == [p.manifest for p in published]
    assert reader.chain(published[1].manifest.digest, latest) == [published[2].manifest]
    assert reader.chain(latest.digest, latest) == []
    assert reader.chain(Digest(1, 1), latest) is None
    assert reader.restart_point(latest) == first
    assert reader.table(latest).to_bytes() == run.table.to_bytes()
    assert same(replay(run), run.bits)
    size = next(info.size_bytes for info in run.store.list("deltas/000000000003"))
    assert published[2].delta_bytes == size and published[2].publish_s > 0


def test_objects_then_manifest_then_pointer(run):
    run.store = FaultyStore(run.store)
    write_through(run, run.store)
    run.publish()
    assert [key.split("/")[0] for key in run.store.writes] == ["deltas", "versions", "LATEST"]
    fresh = FaultyStore(MemoryStore("order"))
    fresh.ensure()
    BucketWriter.start(fresh, table=run.table, digest=run.base_digest, reference=str(run.base))
    assert [key.split("/")[0] for key in fresh.writes] == ["tables", "versions", "LATEST"]
    fresh.inner.drop()


def test_the_delta_file_is_what_others_read(run):
    safetensors = pytest.importorskip("safetensors")
    published = run.publish()
    path = run.store.root / published.manifest.delta.objects[0].key
    with safetensors.safe_open(path, "numpy") as file:
        names = set(file.keys())
        assert names == {name + suffix for name in run.table for suffix in (".indices", ".values")}
        assert file.get_tensor("embed.weight.indices").dtype == np.int32
        metadata = file.metadata()
    assert metadata["sparse"] == "True" and metadata["model_version"] == "1" and metadata["changed_params"] == "9"
    assert metadata["delta_format"] == "1" and metadata["encoding"] == "plain"
    assert float(metadata["sparsity"]) == pytest.approx(1 - 9 / run.table.num_params, abs=1e-6)


def test_an_empty_delta_is_a_version(run):
    published = run.writer.publish({}, digest=run.writer.digest, step=1, encoding="plain")
    assert published.manifest.version.seq == 1 and published.manifest.changed_params == 0
    assert run.reader().fetch_delta(published.manifest, run.base) == {}
    run.publish()
    assert same(replay(run), run.bits)


def test_tensors_sent_whole(run, tmp_path):
    name = "layer.0.norm.weight"
    flat = run.bits[name].reshape(-1)
    indices = np.array([0, 1, 2, 3], np.int32)
    old = flat[indices].copy()
    flat[indices] += 1
    part = whole(TensorDelta(name, indices, flat[indices].copy(), old), flat)
    published = run.writer.publish(
        {name: part}, digest=run.writer.digest + _digest_of_change(part), step=1, encoding="plain"
    )
    assert published.manifest.changed_params == 4
    fetched = run.reader().fetch_delta(published.manifest, tmp_path)
    assert fetched[name].num_changed == 8 and same(replay(run), run.bits)


def _digest_of_change(part) -> Digest:
    from delta_wire.state import change_of_digest

    return change_of_digest({part.name: part})


def test_fetched_arrays_are_owned_and_the_folder_is_empty_afterwards(run, tmp_path):
    published = run.publish()
    folder = tmp_path / "stage"
    folder.mkdir()
    delta = run.reader().fetch_delta(published.manifest, folder)
    assert list(folder.iterdir()) == []
    for part in delta.values():
        assert part.old is None and part.indices.flags.owndata and part.new.flags.writeable


def test_a_restarted_trainer_continues_under_the_next_epoch(run):
    run.publish()
    run.writer = run.start()
    run.publish()
    run.writer = run.start()
    latest = run.publish().manifest
    assert (latest.version.epoch, latest.version.seq) == (3, 3)
    assert latest.parent.epoch == 2
    assert same(replay(run), run.bits)


def test_start_refuses_other_weights_and_other_models(run):
    run.publish()
    before = run.store.list("")
    with pytest.raises(
        BaseMismatchError, match=f"newest version .* has digest {run.writer.digest}.*have {run.base_digest}"
    ):
        BucketWriter.start(run.store, table=run.table, digest=run.base_digest, reference=str(run.base))
    other = TensorTable([TensorSpec("other", (3,))])
    with pytest.raises(ModelMismatchError, match="only in the trainer's model: other"):
        BucketWriter.start(run.store, table=other, digest=run.writer.digest, reference=str(run.base))
    assert run.store.list("") == before


def test_start_needs_one_restart_point(run):
    store = MemoryStore("start")
    store.ensure()
    for reference, anchor_dir in ((None, None), ("x@main", run.base)):
        with pytest.raises(SetupError, match="either a reference"):
            BucketWriter.start(
                store, table=run.table, digest=run.base_digest, reference=reference, anchor_dir=anchor_dir
            )
    with pytest.raises(FormatError, match="reference must be"):
        BucketWriter.start(store, table=run.table, digest=run.base_digest, reference="x" * 5000)
    assert BucketReader(store).latest() is None
    with pytest.raises(BucketNotFoundError):
        BucketWriter.start(MemoryStore("nobody made it"), table=run.table, digest=run.base_digest, reference="x")
    store.drop()


def test_an_uploaded_anchor_comes_back(run, tmp_path):
    store = MemoryStore("anchor")
    store.ensure()
    with pytest.raises(DigestMismatchError, match="the checkpoint to upload"):
        BucketWriter.start(store, table=run.table, digest=Digest(1, 1), reference=None, anchor_dir=run.base)
    BucketWriter.start(store, table=run.table, digest=run.base_digest, reference=None, anchor_dir=run.base)
    reader = BucketReader(store)
    manifest = reader.latest()
    assert manifest.anchor.reference is None and len(manifest.anchor.objects) == 6
    folder = reader.fetch_anchor(manifest, tmp_path / "anchor")
    assert Checkpoint(folder).digest() == run.base_digest and (folder / "chat_template.jinja").is_file()
    store.put(manifest.anchor.objects[0].key, b"swapped")
    with pytest.raises(FormatError, match=r"anchors/.*expected \d+ bytes|expected at most"):
        reader.fetch_anchor(manifest, tmp_path / "again")
    store.drop()


# --- what a trainer may not publish


def test_publish_refuses_what_is_not_of_the_run(run):
    delta, digest = run.next_delta()
    name, part = next(iter(delta.items()))
    before = run.store.list("")
    cases = [
        ({"lm_head.weight": dataclasses.replace(part, name="lm_head.weight")}, ModelMismatchError, "lm_head.weight"),
        ({name: dataclasses.replace(part, name="other")}, ModelMismatchError, "other"),
        ({name: dataclasses.replace(part, indices=part.indices[::-1])}, FormatError, "ascending"),
        ({name: dataclasses.replace(part, indices=part.indices + 10_000)}, FormatError, "out of range"),
        ({name: dataclasses.replace(part, new=part.new[:1])}, FormatError, "one value per index"),
        ({name: part}, DigestMismatchError, "does not begin at that version"),
        ({}, DigestMismatchError, "does not begin at that version"),
    ]
    for wrong, kind, message in cases:
        with pytest.raises(kind, match=message):
            run.writer.publish(wrong, digest=digest, step=1, encoding="plain")
    with pytest.raises(FormatError, match="step must be an integer"):
        run.writer.publish(delta, digest=digest, step=-1, encoding="plain")
    run.store.delete([info.key for info in run.store.list("deltas/")])
    with pytest.raises(UnsupportedFormatError, match="encoding 'secret' is not known"):
        run.writer.publish(delta, digest=digest, step=1, encoding="secret")
    assert run.store.list("") == before
    run.writer.publish(delta, digest=digest, step=1, encoding="plain")
    assert same(replay(run), run.bits)


def test_names_that_clash_with_the_encoding_are_refused_at_the_start():
    store = MemoryStore("clash")
    store.ensure()
    table = TensorTable([TensorSpec("x", (2,)), TensorSpec("x.indices", (2,))])
    with pytest.raises(ModelMismatchError, match=r"'x' and 'x\.indices'"):
        BucketWriter.start(store, table=table, digest=Digest(), reference="org/m@main")
    BucketWriter.start(
        store, table=TensorTable([TensorSpec("x.indices", (2,))]), digest=Digest(), reference="o/m@main"
    )
    store.drop()


# --- failures and retries


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


def test_a_number_that_another_trainer_took_meanwhile(run):
    delta, digest = run.next_delta()
    store = FaultyStore(run.store)
    # before the manifest is written
    store.fail_at = 3
    write_through(run, store)
    with pytest.raises(StoreUnavailableError):
        run.writer.publish(delta, digest=digest, step=1, encoding="plain")
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
    store = FaultyStore(run.store)
    # the last call of a publication is the pointer
    store.fail_at = 5
    write_through(run, store)
    with pytest.raises(StoreUnavailableError):
        run.writer.publish(delta, digest=digest, step=1, encoding="plain")
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
    store = FaultyStore(run.store)
    store.fail_at = 5
    write_through(run, store)
    with pytest.raises(StoreUnavailableError):
        run.writer.publish(delta, digest=digest, step=1, encoding="plain")
    # this trainer resumes from the last version that readers know
    run.bits = saved
    run.writer = run.start()
    assert run.writer.version == published.version
    latest = run.publish().manifest
    assert latest.version.seq == 3 and latest.parent.seq == 1
    assert same(replay(run), run.bits)


# --- other writers


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


# --- damaged and hostile buckets


def test_nothing_published_yet(tmp_path):
    from delta_wire.stores import open_store

    reader = BucketReader(open_store(tmp_path / "b", create=True))
    assert reader.latest() is None
    (tmp_path / "b").rmdir()
    with pytest.raises(BucketNotFoundError):
        reader.latest()


@pytest.mark.parametrize("raw", [b"", b"{", b'{"format":1}', b"\0" * 200, b"x" * (65 << 10)])
def test_torn_pointers_are_named(run, raw):
    run.store.put("LATEST", raw)
    with pytest.raises(FormatError, match="LATEST"):
        run.reader().latest()


def test_a_pointer_that_lies_about_its_manifest(run):
    manifest = run.publish().manifest
    ref = ObjectRef(manifest_key(1), len(manifest.to_bytes()), manifest.sha256)
    reader = run.reader()
    assert reader.latest() == manifest
    run.store.put("LATEST", Pointer(dataclasses.replace(manifest.version, epoch=7), ref).to_bytes())
    for asked in (reader, run.reader()):
        with pytest.raises(FormatError, match=r"LATEST: names version \w+-7-1, its manifest is of \w+-1-1"):
            asked.latest()
    run.store.put("LATEST", Pointer(manifest.version, dataclasses.replace(ref, size_bytes=5)).to_bytes())
    with pytest.raises(FormatError, match=r"LATEST: the size of versions/000000000001\.json is not 5"):
        reader.latest()
    # another number with the hash of a manifest that is known already
    run.store.put(manifest_key(2), manifest.to_bytes())
    version = dataclasses.replace(manifest.version, seq=2)
    run.store.put("LATEST", Pointer(version, dataclasses.replace(ref, key=manifest_key(2))).to_bytes())
    with pytest.raises(FormatError, match=r"000000000002\.json: expected version 2, found"):
        reader.latest()


def test_a_manifest_that_is_missing_late_or_swapped(run):
    reader = run.reader()
    latest = run.publish().manifest
    raw = run.store.get(manifest_key(1), 1 << 20)
    run.store.delete([manifest_key(1)])
    with pytest.raises(ObjectNotFoundError, match=manifest_key(1)):
        reader.latest()
    run.store.put(manifest_key(1), raw.replace(b'"plain"', b'"PLAIN"'))
    with pytest.raises(FormatError, match=f"{manifest_key(1)}: expected SHA-256 {latest.sha256}"):
        reader.latest()
    run.store.put(manifest_key(1), raw)
    assert reader.latest() == latest
    run.store.put(manifest_key(1), run.store.get(manifest_key(0), 1 << 20))
    with pytest.raises(FormatError, match="expected version 1, found"):
        run.reader().manifest(1)


def test_a_newer_format_is_refused(run):
    run.publish()
    raw = run.store.get(manifest_key(1), 1 << 20).replace(b'"format":1', b'"format":2')
    run.store.put(manifest_key(1), raw)
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        run.reader().manifest(1)


def test_a_parent_that_is_not_what_the_child_says(run):
    for _ in range(3):
        run.publish()
    reader = run.reader()
    raw = run.store.get(manifest_key(2), 1 << 20)
    run.store.put(manifest_key(2), raw + b" ")
    with pytest.raises(FormatError, match=f"{manifest_key(2)}: expected SHA-256"):
        reader.chain(run.base_digest, reader.latest())
    run.store.delete([manifest_key(2)])
    # removed by retention: only an anchor can help
    assert reader.chain(run.base_digest, reader.latest()) is None
    with pytest.raises(ObjectNotFoundError, match=manifest_key(2)):
        reader.restart_point(reader.latest())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent__digest": "0" * 32}, "names the parent"),
        ({"parent__epoch": 1, "version__epoch": 9, "version__run": "other"}, "names the parent"),
        ({"table__sha256": "0" * 64, "table__key": f"tables/{'0' * 64}.json"}, "tensor table differs"),
    ],
)
def test_forks_and_lies_about_the_parent(run, changes, message):
    run.publish()
    run.publish()
    rewrite(run, 2, **changes)
    reader = run.reader()
    with pytest.raises(FormatError, match=message):
        reader.chain(run.base_digest, reader.latest())


def test_tables_are_proven(run):
    latest = run.publish().manifest
    raw = run.store.get(latest.table.key, 1 << 20)
    for wrong in (raw + b" ", raw[:-1], b"", raw.replace(b"norm", b"nurm")):
        run.store.put(latest.table.key, wrong)
        with pytest.raises(FormatError, match="tables/"):
            run.reader().table(latest)
    run.store.delete([latest.table.key])
    with pytest.raises(ObjectNotFoundError, match="tables/"):
        run.reader().table(latest)
    run.store.put(latest.table.key, raw)
    with pytest.raises(FormatError, match="num_params is 9999"):
        run.reader().table(rewrite(run, 1, num_params=9999))


def test_tables_that_are_not_canonical_are_refused(run):
    import hashlib

    table = json.loads(run.table.to_bytes())
    raw = json.dumps(dict(reversed(table.items()))).encode()
    sha = hashlib.sha256(raw).hexdigest()
    run.store.put(f"tables/{sha}.json", raw)
    run.publish()
    manifest = rewrite(run, 1, table={"key": f"tables/{sha}.json", "size_bytes": len(raw), "sha256": sha})
    with pytest.raises(FormatError, match="canonical"):
        run.reader().table(manifest)


def test_delta_objects_are_proven(run, tmp_path):
    first, second = run.publish().manifest, run.publish().manifest
    reader = run.reader()
    key = second.delta.objects[0].key
    raw = run.store.get(key, 1 << 20)
    swapped = run.store.get(first.delta.objects[0].key, 1 << 20)
    flipped = raw[:-1] + bytes([raw[-1] ^ 1])
    for wrong in (swapped, flipped, raw[:-1], raw + b"\0", b""):
        run.store.put(key, wrong)
        with pytest.raises(FormatError, match=key):
            reader.fetch_delta(second, tmp_path)
    run.store.delete([key])
    with pytest.raises(ObjectNotFoundError, match=key):
        reader.fetch_delta(second, tmp_path)
    run.store.put(key, raw)
    assert num_changed(reader.fetch_delta(second, tmp_path)) == 9
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"delta__objects__0__size_bytes": 1 << 50}, FormatError, "the delta has 1125899906842624 bytes"),
        ({"delta__objects__0__size_bytes": 5}, FormatError, "expected at most 5 bytes"),
        ({"delta__objects__0__sha256": "0" * 64}, FormatError, "with SHA-256 000"),
        ({"delta__encoding": "context9"}, UnsupportedFormatError, "encoding 'context9' is not known"),
        ({"changed_params": 10}, FormatError, "changed_params is 10, the delta has only 9"),
        ({"delta": None, "anchor": {"reference": "x", "objects": []}}, FormatError, "has no delta"),
    ],
)
def test_lies_about_the_delta(run, tmp_path, changes, kind, message):
    run.publish()
    with pytest.raises(kind, match=message):
        run.reader().fetch_delta(rewrite(run, 1, **changes), tmp_path)


def test_an_anchor_cannot_escape_its_folder(run, tmp_path):
    run.publish()
    sha = "0" * 64
    run.store.put("anchors/elsewhere/config.json", b"")
    objects = [{"key": "anchors/elsewhere/config.json", "size_bytes": 0, "sha256": sha}]
    manifest = rewrite(run, 1, anchor={"reference": None, "objects": objects})
    with pytest.raises(FormatError, match="not in the folder of this anchor"):
        run.reader().fetch_anchor(manifest, tmp_path / "a")
    objects[0]["size_bytes"] = 1 << 52
    manifest = rewrite(run, 1, anchor={"reference": None, "objects": objects})
    with pytest.raises(FormatError, match="expected at most"):
        run.reader().fetch_anchor(manifest, tmp_path / "a")


# --- acks


def test_acks(run, caplog):
    reader = run.reader()
    ack = Ack("server-1", run.writer.version, run.writer.digest, "serving", None, 1.5, 100.0)
    reader.write_ack(ack)
    cut_off = dataclasses.replace(
        ack, server="server-2", state="degraded", reason="disk full", needs_anchor=VersionId("abc", 2, 7)
    )
    reader.write_ack(cut_off)
    # a field that is not said is not there, and one that is none is refused
    assert b"needs_anchor" not in ack.to_bytes()
    run.store.put("acks/wrong.json", cut_off.to_bytes().replace(b'{"run":"abc"', b'{"run":"not one"'))
    run.store.put("acks/torn.json", b"{")
    run.store.put("acks/liar.json", ack.to_bytes())
    run.store.put("acks/huge.json", b"x" * 100_000)
    with caplog.at_level("WARNING"):
        acks = run.writer.acks()
    assert [(a.server, a.state) for a in acks] == [("server-1", "serving"), ("server-2", "degraded")]
    assert acks == [ack, cut_off]
    assert sum("ignoring an ack" in record.message for record in caplog.records) == 4
