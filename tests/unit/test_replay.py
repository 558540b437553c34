# SPDX-License-Identifier: Apache-2.0
import errno
import json
import os
import shutil

import numpy as np
import pytest

from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.checkpoint import Checkpoint
from delta_wire.errors import (
    BaseMismatchError,
    BucketNotFoundError,
    DeltaError,
    DigestMismatchError,
    ModelMismatchError,
    SetupError,
)
from delta_wire.manifest import Manifest, ObjectRef, Pointer, manifest_key
from delta_wire.replay import checkout, materialise, verify


def same_bits(checkpoint: Checkpoint, bits) -> bool:
    return set(checkpoint.layout) == set(bits) and all(np.array_equal(checkpoint.bits(n), b) for n, b in bits.items())


def results(run, **options):
    return [(check.seq, check.ok, check.checks) for check in verify(run.reader(), **options)]


def flip(store, key: str) -> None:
    raw = bytearray(store.get(key, 1 << 20))
    raw[-1] ^= 1
    store.put(key, bytes(raw))


def relink(run, seq: int, **changes) -> None:
    """Change a manifest and everything that names its hash, so that only the content is wrong."""
    latest = run.reader().latest().version.seq
    sha = digest = ""
    for at in range(seq, latest + 1):
        value = json.loads(run.store.get(manifest_key(at), 1 << 20))
        if at == seq:
            value.update(changes)
        elif sha:
            value["parent"]["manifest_sha256"] = sha
            value["parent"]["digest"] = digest
        raw = json.dumps(value).encode()
        run.store.put(manifest_key(at), raw)
        manifest = Manifest.from_bytes(raw, "relinked")
        sha, digest = manifest.sha256, str(manifest.digest)
    run.store.put("LATEST", Pointer(manifest.version, ObjectRef(manifest_key(at), len(raw), sha)).to_bytes())


@pytest.mark.parametrize("shards", [1, 2])
def test_materialise_any_version(make_run, shards):
    run = make_run(shards=shards)
    seen = [{name: bits.copy() for name, bits in run.bits.items()}]
    for _ in range(3):
        run.publish()
        seen.append({name: bits.copy() for name, bits in run.bits.items()})
    reader = run.reader()
    for seq, expected in enumerate(seen):
        with materialise(reader, reader.manifest(seq)) as state:
            assert all(np.array_equal(state.bits(name), bits) for name, bits in expected.items())
            assert state.recompute() == state.digest == reader.manifest(seq).digest
    # the base itself is not written to
    assert same_bits(Checkpoint(run.base), seen[0])


@pytest.mark.parametrize("shards", [1, 3])
def test_checkout_is_a_complete_checkpoint(make_run, tmp_path, shards):
    run = make_run(shards=shards)
    run.publish()
    run.publish()
    reader = run.reader()
    folder = checkout(reader, reader.latest(), tmp_path / "new" / "out")
    written = Checkpoint(folder)
    assert same_bits(written, run.bits) and written.layout == Checkpoint(run.base).layout
    kept = {path.name for path in run.base.iterdir()} - {"optimizer.pt", "pytorch_model.bin", ".hidden"}
    assert {path.name for path in folder.iterdir()} == kept
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    safetensors = pytest.importorskip("safetensors")
    for file in set(written.layout.values()):
        with safetensors.safe_open(folder / file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["out"]
    # readable by others, as any folder a user makes
    umask = os.umask(0)
    os.umask(umask)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask


def test_checkout_refuses_a_destination_that_holds_something(run, tmp_path):
    manifest = run.publish().manifest
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(SetupError, match=f"{name}: exists and is not an empty folder"):
            checkout(run.reader(), manifest, tmp_path / name)
    (tmp_path / "empty").mkdir()
    checkout(run.reader(), manifest, tmp_path / "empty")
    assert (tmp_path / "full" / "x").read_text() == (tmp_path / "file").read_text() == "mine"


def test_checkout_leaves_nothing_behind_when_it_fails(run, tmp_path, monkeypatch):
    first, second = run.publish().manifest, run.publish().manifest
    (tmp_path / "parent").mkdir()
    key = second.delta.objects[0].key
    flip(run.store, key)
    with pytest.raises(DeltaError, match=key):
        checkout(run.reader(), second, tmp_path / "parent" / "out")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(SetupError, match="out: cannot write the checkpoint: No space left"):
        checkout(run.reader(), first, tmp_path / "parent" / "out")
    assert list((tmp_path / "parent").iterdir()) == []


def test_checkout_proves_what_it_has_written(run, tmp_path, monkeypatch):
    from delta_wire import replay

    manifest = run.publish().manifest
    real = replay.write_tensors

    def damaged(path, tensors, metadata):
        real(path, tensors, metadata)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)

    monkeypatch.setattr(replay, "write_tensors", damaged)
    with pytest.raises(DigestMismatchError, match="after writing"):
        checkout(run.reader(), manifest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_copy_of_the_base(run, tmp_path, tools):
    manifest = run.publish().manifest
    shutil.move(run.base, tmp_path / "moved")
    with pytest.raises(SetupError, match="no folder on this machine"):
        checkout(run.reader(), manifest, tmp_path / "out")
    checkout(run.reader(), manifest, tmp_path / "out", tmp_path / "moved")
    assert same_bits(Checkpoint(tmp_path / "out"), run.bits)
    assert results(run, base_folder=tmp_path / "moved")[-1] == (1, True, ("delta", "state"))
    other = tools.write_checkpoint(tmp_path / "wrong", tools.random_bits(5))
    with pytest.raises(BaseMismatchError, match="wrong: expected the checkpoint of version"):
        checkout(run.reader(), manifest, tmp_path / "out2", other)
    fewer = {name: bits for name, bits in tools.random_bits().items() if "norm" not in name}
    other = tools.write_checkpoint(tmp_path / "fewer", fewer)
    with pytest.raises(ModelMismatchError, match=r"missing in .*fewer: layer\.0\.norm\.weight"):
        checkout(run.reader(), manifest, tmp_path / "out2", other)


def test_apply_refuses_another_base_and_changes_nothing(run, tmp_path):
    run.publish()
    second = run.publish().manifest
    reader = run.reader()
    with materialise(reader, reader.manifest(0)) as state:
        with pytest.raises(BaseMismatchError, match="expected a delta for digest"):
            state.apply(second)
        assert state.recompute() == run.base_digest


def test_verify_a_good_run(run):
    assert results(run) == [(0, True, ("anchor", "state"))]
    for _ in range(3):
        run.publish()
    assert results(run) == [
        (0, True, ("anchor",)),
        (1, True, ("delta",)),
        (2, True, ("delta",)),
        (3, True, ("delta", "state")),
    ]


def test_verify_names_the_damaged_object_and_what_hangs_on_it(run):
    for _ in range(3):
        run.publish()
    key = run.reader().manifest(2).delta.objects[0].key
    flip(run.store, key)
    checks = list(verify(run.reader()))
    assert [check.ok for check in checks] == [True, True, False, False]
    assert key in checks[2].reason and "follows a version that failed" in checks[3].reason
    run.store.delete([key])
    assert key in list(verify(run.reader()))[2].reason


def test_verify_finds_a_delta_that_is_not_the_announced_one(run):
    for _ in range(2):
        run.publish()
    relink(run, 1, digest="0" * 32)
    checks = list(verify(run.reader()))
    assert [check.ok for check in checks] == [True, False, False]
    assert "after its delta" in checks[1].reason and "deltas/" in checks[1].reason


def test_verify_a_base_that_has_changed(run):
    run.publish()
    flip_path = run.base / "model.safetensors"
    raw = bytearray(flip_path.read_bytes())
    raw[-1] ^= 1
    flip_path.write_bytes(raw)
    checks = list(verify(run.reader()))
    assert [check.ok for check in checks] == [False, False] and str(run.base) in checks[0].reason


def test_verify_with_a_damaged_or_missing_manifest(run):
    for _ in range(3):
        run.publish()
    raw = run.store.get(manifest_key(1), 1 << 20)
    run.store.put(manifest_key(1), raw + b" ")
    checks = list(verify(run.reader()))
    assert [(check.seq, check.ok) for check in checks] == [(1, False), (2, False), (3, False)]
    assert manifest_key(1) in checks[0].reason
    run.store.delete([manifest_key(1)])
    checks = list(verify(run.reader()))
    assert not any(check.ok for check in checks) and manifest_key(1) in checks[0].reason


def test_verify_goes_on_from_a_later_anchor(run, tmp_path):
    """Neither what retention has removed before an anchor nor a failed delta there spoils what follows."""
    for _ in range(2):
        run.publish()
    middle = {name: bits.copy() for name, bits in run.bits.items()}
    run.publish()
    reader = run.reader()
    anchor = checkout(reader, reader.manifest(2), tmp_path / "anchor-2")
    assert same_bits(Checkpoint(anchor), middle)
    relink(run, 2, anchor={"reference": str(anchor), "objects": []})
    assert results(run) == [
        (0, True, ("anchor",)),
        (1, True, ("delta",)),
        (2, True, ("delta", "anchor")),
        (3, True, ("delta", "state")),
    ]
    # an anchor that is not what it says is a fault of its version, not of those the deltas prove
    (anchor / "model.safetensors").rename(anchor / "away")
    checks = list(verify(run.reader()))
    assert [check.ok for check in checks] == [True, True, False, True] and str(anchor) in checks[2].reason
    (anchor / "away").rename(anchor / "model.safetensors")
    key = run.reader().manifest(2).delta.objects[0].key
    raw = run.store.get(key, 1 << 20)
    flip(run.store, key)
    checks = list(verify(run.reader()))
    assert [check.ok for check in checks] == [True, True, False, True] and key in checks[2].reason
    run.store.put(key, raw)
    key = run.reader().manifest(1).delta.objects[0].key
    flip(run.store, key)
    assert [check.ok for check in verify(run.reader())] == [True, False, True, True]
    run.store.delete([manifest_key(0), manifest_key(1), key])
    assert [(seq, ok) for seq, ok, _ in results(run)] == [(2, True), (3, True)]


def test_verify_recomputes_the_last_state_in_full(run, monkeypatch):
    """What the digest updates cannot see: bits that changed in memory beside the delta."""
    from delta_wire.replay import State

    run.publish()
    apply = State.apply

    def careless(self, manifest):
        delta = apply(self, manifest)
        self.bits("embed.weight")[0, 0] ^= 1
        return delta

    monkeypatch.setattr(State, "apply", careless)
    checks = list(verify(run.reader()))
    assert [check.ok for check in checks] == [True, False] and "recomputed in full" in checks[1].reason


def test_verify_uploaded_anchors(run, tmp_path):
    from delta_wire.stores import open_store

    store = open_store(tmp_path / "uploaded", create=True)
    BucketWriter.start(store, table=run.table, digest=run.base_digest, reference=None, anchor_dir=run.base)
    shutil.rmtree(run.base)
    assert [check.ok for check in verify(BucketReader(store))] == [True]
    checkout(BucketReader(store), BucketReader(store).latest(), tmp_path / "out")
    assert same_bits(Checkpoint(tmp_path / "out"), run.bits)
    key = store.list("anchors/")[-1].key
    flip(store, key)
    (check,) = verify(BucketReader(store))
    assert not check.ok and key in check.reason


def test_verify_needs_a_bucket_with_something_in_it(tmp_path):
    from delta_wire.stores import open_store

    with pytest.raises(BucketNotFoundError):
        list(verify(BucketReader(open_store(tmp_path / "none"))))
    with pytest.raises(SetupError, match="nothing has been published yet"):
        list(verify(BucketReader(open_store(tmp_path / "empty", create=True))))


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_opens_a_checkout(tmp_path, tools, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from delta_wire.stores import open_store

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="4KB")
    run = tools.Run(open_store(tmp_path / "bucket"), tmp_path / "base")
    assert ("lm_head.weight" in run.table) is not tied and len(set(Checkpoint(run.base).layout.values())) > 1
    run.publish()
    run.publish()
    folder = checkout(run.reader(), run.reader().latest(), tmp_path / "out")
    opened = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert opened.dtype == torch.bfloat16
    loaded = opened.state_dict()
    for name, bits in run.bits.items():
        np.testing.assert_array_equal(loaded[name].view(torch.int16).numpy().view(np.uint16), bits)
    if tied:
        assert loaded["lm_head.weight"].data_ptr() == loaded["model.embed_tokens.weight"].data_ptr()
