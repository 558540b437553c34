# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile buckets are refused by name."""

import dataclasses
import json

import pytest
from bucket_run import rewrite

from delta_wire.bucket import BucketReader
from delta_wire.errors import (
    BucketNotFoundError,
    FormatError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from delta_wire.manifest import ObjectRef, Pointer, manifest_key
from delta_wire.state import num_changed


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
