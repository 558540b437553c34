# SPDX-License-Identifier: Apache-2.0
import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest

from delta_wire.digest import Digest
from delta_wire.errors import FormatError, UnsupportedFormatError
from delta_wire.manifest import (
    Ack,
    AnchorPart,
    DeltaPart,
    Manifest,
    ObjectRef,
    Parent,
    Pointer,
    VersionId,
    manifest_key,
    table_key,
)
from delta_wire.state import TensorTable

SHA = "ab" * 32
TABLE = ObjectRef(table_key(SHA), 10, SHA)
DELTA = ObjectRef("deltas/000000000007-abababababababab.safetensors", 1234, SHA)
VERSION = VersionId("run1", 2, 7)
MANIFEST = Manifest(
    version=VERSION,
    digest=Digest(1, 2),
    table=TABLE,
    num_params=1000,
    changed_params=10,
    step=70,
    created_unix_s=1.5,
    parent=Parent(5, 1, Digest(3, 4), SHA),
    delta=DeltaPart("plain", (DELTA,)),
    anchor=None,
)


def edited(**changes) -> bytes:
    """The manifest with fields replaced; `a__b` goes into an object, a value of `...` removes the field."""
    value = json.loads(MANIFEST.to_bytes())
    for path, new in changes.items():
        *parents, last = path.split("__")
        inner = value
        for name in parents:
            inner = inner[int(name)] if isinstance(inner, list) else inner[name]
        if new is ...:
            del inner[last]
        else:
            inner[last] = new
    return json.dumps(value).encode()


def test_version_ids():
    assert str(VERSION) == "run1-2-7" and VersionId.parse("run1-2-7") == VERSION
    for text in ("", "run1-2", "run1-2-x", "run1-2-7\n", "ru n-1-2", "a-b-1-2", "r-1-" + "9" * 13):
        with pytest.raises(FormatError, match="run-epoch-seq"):
            VersionId.parse(text)


def test_keys_sort_as_numbers():
    keys = [manifest_key(seq) for seq in (9, 10, 99, 100, 10**12 - 1)]
    assert keys == sorted(keys) and keys[0] == "versions/000000000009.json"


@pytest.mark.parametrize(
    "manifest",
    [
        MANIFEST,
        dataclasses.replace(MANIFEST, step=None),
        dataclasses.replace(MANIFEST, anchor=AnchorPart("org/model@main")),
        dataclasses.replace(MANIFEST, delta=None, parent=None, anchor=AnchorPart("/some/folder")),
        dataclasses.replace(
            MANIFEST, delta=None, anchor=AnchorPart(None, (ObjectRef("anchors/x/config.json", 1, SHA),))
        ),
    ],
)
def test_round_trip(manifest):
    raw = manifest.to_bytes()
    read = Manifest.from_bytes(raw, "x")
    assert read == manifest and read.to_bytes() == raw and read.sha256 == hashlib.sha256(raw).hexdigest()
    assert raw.isascii()


def test_fields_of_a_later_release_are_ignored_but_hashed():
    raw = edited(later="abc", delta__extra=1)
    manifest = Manifest.from_bytes(raw, "x")
    assert manifest == MANIFEST and manifest.to_bytes() == raw and manifest.sha256 != MANIFEST.sha256
    # an edited copy is no longer what was read
    assert b"signature" not in dataclasses.replace(manifest, step=1).to_bytes()


def test_a_newer_format_is_refused_whatever_else_it_says():
    with pytest.raises(UnsupportedFormatError, match="format 2, this release reads up to 1; upgrade"):
        Manifest.from_bytes(b'{"format":2,"everything":"else"}', "x")
    with pytest.raises(UnsupportedFormatError):
        Pointer.from_bytes(b'{"format":99}', "x")
    with pytest.raises(UnsupportedFormatError):
        Ack.from_bytes(b'{"format":99}', "x")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "expected a JSON object"),
        (MANIFEST.to_bytes()[:-1], "torn or foreign"),
        (MANIFEST.to_bytes() + b"{}", "torn or foreign"),
        (b"\x00" * 100, "torn or foreign"),
        (b" " * (5 << 20), "at most 4194304 bytes"),
        (b'{"format":NaN}', "NaN is not JSON"),
        (edited(format=...), "'format' is missing"),
        (edited(format=True), "format must be an integer"),
        (edited(format="1"), "format must be an integer"),
        (edited(format=0), "format must be an integer"),
        (edited(version__run="a-b"), "run must be"),
        (edited(version__run="x" * 65), "run must be"),
        (edited(version__epoch=0), "epoch must be an integer"),
        (edited(version__seq=-1), "seq must be an integer"),
        (edited(version__seq=10**12), "seq must be an integer"),
        (edited(version__seq=7.0), "seq must be an integer"),
        (edited(version=[]), "version must be an object"),
        (edited(digest="xyz"), "digest: a digest is 32"),
        (edited(digest=None), "digest: a digest is 32"),
        (edited(table__key="tables/../x"), "key 'tables/../x' is not allowed"),
        (edited(table__key="/etc/passwd"), "is not allowed here, expected tables/"),
        (edited(table__key=f"deltas/{SHA}.json"), "is not allowed here"),
        (edited(table__sha256="cd" * 32), "does not carry the hash"),
        (edited(table__sha256="AB" * 32), "64 lower-case"),
        (edited(table__size_bytes=-1), "size_bytes must be an integer"),
        (edited(num_params=2**61), "num_params must be an integer"),
        (edited(changed_params=1001), "changed_params must be an integer from 0 to 1000"),
        (edited(changed_params=0), "changed_params is 0, but the digest is not that of the parent"),
        (edited(digest=str(MANIFEST.parent.digest)), "changed_params is 10, but the digest is that of the parent"),
        (edited(step=-1), "step must be"),
        (edited(step="70"), "step must be"),
        (edited(step=...), "'step' is missing"),
        (edited(created_unix_s=-1), "created_unix_s must be a finite"),
        (edited(created_unix_s=True), "created_unix_s must be a finite"),
        (edited().replace(b'"created_unix_s": 1.5', b'"created_unix_s": 1e999'), "created_unix_s must be a finite"),
        (edited(parent=7), "parent: expected an object"),
        (edited(parent__seq=7), "a parent comes before its child"),
        (edited(parent__epoch=3), "a parent comes before its child"),
        (edited(parent__manifest_sha256="x"), "manifest_sha256 must be"),
        (edited(parent=None), "a delta needs a parent"),
        (edited(delta=None), "needs a delta or an anchor"),
        (edited(delta="plain"), "delta: expected an object"),
        (edited(delta__encoding="../../x"), "name of an encoding"),
        (edited(delta__encoding=""), "encoding must be"),
        (edited(delta__objects=[]), "at least one object"),
        (edited(delta__objects={}), "objects must be a list"),
        (edited(delta__objects=[DELTA.to_json()] * 2), "listed twice"),
        (edited(delta__objects=[5]), r"objects\[0\]: expected a reference"),
        (edited(delta__objects=[{"key": "deltas/x"}] * 10_001), "at most 10000"),
        (edited(delta__objects__0__key="versions/1.json"), "is not allowed here, expected deltas/"),
        (edited(delta__objects__0__key="deltas/.tmp-1"), "is not allowed here"),
        (edited(delta__objects__0__key="deltas/a\u0000b"), "key must be"),
        (edited(anchor={"reference": None, "objects": []}), "either a reference or a list"),
        (
            edited(anchor={"reference": "x", "objects": [{"key": "anchors/x", "size_bytes": 1, "sha256": SHA}]}),
            "either",
        ),
        (edited(anchor={"reference": "x" * 5000, "objects": []}), "reference must be"),
        (edited(anchor={"reference": "a\nb", "objects": []}), "reference must be"),
        (edited(anchor={"reference": 5, "objects": []}), "reference must be"),
    ],
)
def test_bad_manifests_are_refused_by_name(raw, message):
    with pytest.raises(FormatError, match=message) as caught:
        Manifest.from_bytes(raw, "bucket/versions/x.json")
    assert str(caught.value).startswith("bucket/versions/x.json") and len(str(caught.value)) < 1000


def test_pointer():
    pointer = Pointer(VERSION, ObjectRef(manifest_key(7), 500, SHA))
    assert Pointer.from_bytes(pointer.to_bytes(), "x") == pointer
    for wrong in (
        Pointer(VERSION, ObjectRef(manifest_key(8), 500, SHA)),
        Pointer(VERSION, ObjectRef(manifest_key(7), 5 << 20, SHA)),
        Pointer(VERSION, ObjectRef("deltas/x", 500, SHA)),
    ):
        with pytest.raises(FormatError, match="LATEST"):
            Pointer.from_bytes(wrong.to_bytes(), "bucket/LATEST")
    raw = pointer.to_bytes()
    for size in range(len(raw)):
        with pytest.raises(FormatError, match="bucket/LATEST"):
            Pointer.from_bytes(raw[:size], "bucket/LATEST")


def test_acks():
    ack = Ack("host-1", VERSION, Digest(1, 2), "serving", None, 3.5, 10.0)
    assert Ack.from_bytes(ack.to_bytes(), "x") == ack and ack.key == "acks/host-1.json"
    bare = Ack("host-1", None, None, "degraded", "two\nlines\0", None, 0.0)
    assert Ack.from_bytes(bare.to_bytes(), "x").reason == "two lines "
    long = dataclasses.replace(bare, reason="x" * 100_000)
    assert Ack.from_bytes(long.to_bytes(), "x").reason == "x" * 2000
    assert Ack.from_bytes(dataclasses.replace(bare, reason="").to_bytes(), "x").reason is None
    for server in ("", ".", "../x", "a/b", "x" * 129, "a b"):
        with pytest.raises(FormatError, match="server id"):
            _ = dataclasses.replace(ack, server=server).key
    for wrong in ({"state": "fine"}, {"server": "../x"}, {"pause_ms": -1}, {"version": 5}, {"digest": "x"}):
        raw = json.dumps({**json.loads(ack.to_bytes()), **wrong}).encode()
        with pytest.raises(FormatError, match="bucket/acks/x"):
            Ack.from_bytes(raw, "bucket/acks/x")


def test_the_examples_of_the_document():
    text = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()
    blocks = [block.encode() for block in re.findall(r"```json\n(.*?)\n```", text, re.DOTALL)]
    pointer, manifest, table, adapter, ack = blocks
    assert Pointer.from_bytes(pointer, "x").version == Manifest.from_bytes(manifest, "x").version
    assert Ack.from_bytes(ack, "x").version == Pointer.from_bytes(pointer, "x").version
    read = TensorTable.from_bytes(table, "x")
    assert read.to_bytes() == table and f"has {len(table)} bytes and SHA-256 `{read.sha256}`" in text
    # one line and compact, as it is written
    assert Manifest.from_bytes(manifest, "x").to_bytes() == manifest
    assert dataclasses.replace(Manifest.from_bytes(manifest, "x")).to_bytes() == manifest.replace(b"\n ", b"")
    of_adapter = Manifest.from_bytes(manifest[:-1] + b",\n " + adapter + b"}", "x").adapter
    assert of_adapter is not None and (of_adapter.name, of_adapter.rank) == ("policy", 16)
