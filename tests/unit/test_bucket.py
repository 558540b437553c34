# SPDX-License-Identifier: Apache-2.0
"""Publishing and following: order, anchors, acks, what a trainer may not publish."""

import dataclasses

import numpy as np
import pytest
from bucket_run import FaultyStore, replay, same, write_through

from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.errors import (
    BaseMismatchError,
    BucketNotFoundError,
    DigestMismatchError,
    FormatError,
    ModelMismatchError,
    SetupError,
    UnsupportedFormatError,
)
from delta_wire.manifest import Ack, VersionId
from delta_wire.state import TensorDelta, TensorSpec, TensorTable, whole
from delta_wire.stores.memory import MemoryStore


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
