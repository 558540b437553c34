# SPDX-License-Identifier: Apache-2.0
"""The wire over arbitrary models, bit patterns and damage."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.container import TensorFile, write_tensors
from delta_wire.digest import Digest, digest_change, digest_tensor
from delta_wire.encodings import get
from delta_wire.errors import DeltaError, FormatError, MismatchError
from delta_wire.manifest import Manifest, Pointer
from delta_wire.state import (
    Delta,
    TensorDelta,
    TensorSpec,
    TensorTable,
    change_of_digest,
    compose,
    num_changed,
    whole,
)
from delta_wire.stores.memory import MemoryStore

settings.register_profile("wire", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("wire")

# patterns that value comparison or a float round trip would lose
EXTREMES = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0x7FFF, 0xFFC1, 0xFFFF, 0x3F80, 0xBF80]
patterns = st.one_of(st.sampled_from(EXTREMES), st.integers(0, 0xFFFF))
names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12).filter(
    str.isprintable
)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
State = dict[str, np.ndarray]


@st.composite
def states(draw) -> State:
    chosen = draw(st.dictionaries(names, shapes, min_size=1, max_size=4))
    # a clash with the encoding's own names is another test's matter
    suffixes = (".indices", ".values")
    chosen = {
        n: s for n, s in chosen.items() if not any(n.endswith(x) and n.removesuffix(x) in chosen for x in suffixes)
    }
    return {
        name: np.array(draw(st.lists(patterns, min_size=size, max_size=size)), np.uint16).reshape(shape)
        for name, shape in chosen.items()
        for size in [int(np.prod(shape, dtype=np.int64))]
    }


@st.composite
def steps(draw, state: State) -> Delta:
    """A delta of real changes to some elements of some tensors."""
    delta: Delta = {}
    for name, bits in state.items():
        chosen = sorted(draw(st.sets(st.integers(0, bits.size - 1)))) if bits.size else []
        indices = np.array(chosen, np.int32)
        old = bits.reshape(-1)[indices]
        flips = np.array(draw(st.lists(st.integers(1, 0xFFFF), min_size=len(chosen), max_size=len(chosen))), np.uint16)
        if chosen:
            delta[name] = TensorDelta(name, indices, old ^ flips, old)
    return delta


def table_of(state: State) -> TensorTable:
    return TensorTable(TensorSpec(name, bits.shape) for name, bits in state.items())


def digest_of(state: State) -> Digest:
    return sum((digest_tensor(name, bits) for name, bits in state.items()), Digest())


def apply(state: State, delta: Delta) -> State:
    after = {name: bits.copy() for name, bits in state.items()}
    for name, part in delta.items():
        after[name].reshape(-1)[part.indices] = part.new
    return after


def same(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def folder():
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


@given(data=st.data(), state=states(), sent_whole=st.booleans())
def test_decode_gives_back_what_was_encoded(folder, data, state, sent_whole):
    delta = data.draw(steps(state))
    after = apply(state, delta)
    if sent_whole:
        delta = {name: whole(part, after[name]) for name, part in delta.items()}
    table, path = table_of(state), folder / "x.safetensors"
    plain = get("plain")
    plain.encode(delta, table, path, 7)
    assert path.stat().st_size <= plain.max_bytes(table)
    found = plain.decode(path, table, "x")
    assert found.keys() == delta.keys()
    for name, part in delta.items():
        np.testing.assert_array_equal(found[name].indices, part.indices)
        np.testing.assert_array_equal(found[name].new, part.new)
        assert found[name].indices.dtype == np.int32 and found[name].new.dtype == np.uint16
    assert same(apply(state, found), after)
    assert digest_of(state) + change_of_digest(delta) == digest_of(after)


@given(data=st.data(), state=states())
def test_composed_deltas_are_one_delta(data, state):
    first = data.draw(steps(state))
    between = apply(state, first)
    second = data.draw(steps(between))
    after = apply(between, second)
    both = compose(first, second)
    assert same(apply(state, both), after)
    assert digest_of(state) + change_of_digest(both) == digest_of(after)
    # minimal: every element listed has changed
    assert num_changed(both) == sum(part.num_changed for part in both.values())
    bare = {name: TensorDelta(name, part.indices, part.new) for name, part in first.items()}
    assert same(apply(state, compose(bare, second)), after)
    back = {n: TensorDelta(n, p.indices, p.old, p.new) for n, p in both.items() if p.old is not None}
    assert compose(both, back) == {}


@given(data=st.data(), bits=st.lists(patterns, min_size=1, max_size=40))
def test_digest_does_not_care_for_order_or_parts(data, bits):
    array = np.array(bits, np.uint16)
    zeros = np.zeros_like(array)
    order = data.draw(st.permutations(range(len(bits))))
    cut = data.draw(st.integers(0, len(bits)))
    total = Digest()
    for part in (order[:cut], order[cut:]):
        indices = np.array(part, np.int64)
        total = total + digest_change("w", indices, zeros[indices], array[indices])
    assert digest_tensor("w", zeros) + total == digest_tensor("w", array)


@given(data=st.data(), state=states())
def test_damage_is_refused_or_harmless(folder, data, state):
    """Whatever happens to a file's bytes, decoding either raises an error of ours or gives a delta within bounds."""
    delta = data.draw(steps(state))
    table, path = table_of(state), folder / "x.safetensors"
    get("plain").encode(delta, table, path, 7)
    raw = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "header"]))
    if kind == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif kind == "flip":
        for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "insert":
        raw.insert(data.draw(st.integers(0, len(raw))), data.draw(st.integers(0, 255)))
    else:
        at = data.draw(st.integers(0, 7))
        raw[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[at]))
    path.write_bytes(raw)
    try:
        found = get("plain").decode(path, table, "bucket/deltas/x")
    except (FormatError, MismatchError) as error:
        assert "bucket/deltas/x" in str(error)
        return
    assert kind == "flip"
    for name, part in found.items():
        assert part.indices[0] >= 0 and part.indices[-1] < table[name].num_elements
        assert (np.diff(part.indices) > 0).all() and part.new.shape == part.indices.shape


@given(data=st.data(), state=states())
def test_reordered_indices_are_refused(folder, data, state):
    delta = data.draw(steps(state))
    shuffled = {}
    for name, part in delta.items():
        order = data.draw(st.permutations(range(part.num_changed)))
        if order != sorted(order):
            shuffled[name] = TensorDelta(name, part.indices[list(order)], part.new[list(order)])
    table, path = table_of(state), folder / "x.safetensors"
    tensors = {}
    for name, part in shuffled.items():
        tensors[name + ".indices"] = ("I32", part.indices.shape, part.indices)
        tensors[name + ".values"] = ("BF16", part.new.shape, part.new)
    write_tensors(path, tensors)
    if not shuffled:
        assert get("plain").decode(path, table, "x") == {}
        return
    with pytest.raises(FormatError, match="not ascending"):
        get("plain").decode(path, table, "x")


@given(
    tensors=st.dictionaries(names, st.tuples(shapes, st.sampled_from(["U8", "I32", "I64", "BF16", "F32"])), max_size=5)
)
def test_containers_agree_with_the_library(folder, tensors):
    import safetensors

    path = folder / "x.safetensors"
    item_bytes = {"U8": 1, "I32": 4, "I64": 8, "BF16": 2, "F32": 4}
    arrays = {
        name: (dtype, shape, np.arange(int(np.prod(shape, dtype=np.int64)), dtype=f"u{item_bytes[dtype]}"))
        for name, (shape, dtype) in tensors.items()
    }
    write_tensors(path, arrays, {"a": "b"})
    with safetensors.safe_open(path, "numpy") as opened:
        assert set(opened.keys()) == set(tensors)
        for name, (shape, dtype) in tensors.items():
            assert opened.get_slice(name).get_dtype() == dtype and opened.get_slice(name).get_shape() == list(shape)
    file = TensorFile(path)
    for name, (_, shape, array) in arrays.items():
        np.testing.assert_array_equal(file.array(name).view(array.dtype).reshape(-1), array)
        assert file.spec(name)[1] == shape


@given(data=st.data(), state=states(), count=st.integers(1, 5))
def test_a_run_leads_to_the_newest_state_from_anywhere(folder, data, state, count):
    store = MemoryStore("property")
    store.drop()
    store.ensure()
    writer = BucketWriter.start(store, table=table_of(state), digest=digest_of(state), reference="org/model@main")
    seen = [state]
    for number in range(count):
        if data.draw(st.booleans()):
            writer = BucketWriter.start(store, table=table_of(state), digest=writer.digest, reference="org/model@main")
        delta = data.draw(steps(seen[-1]))
        seen.append(apply(seen[-1], delta))
        writer.publish(delta, digest=digest_of(seen[-1]), step=number, encoding="plain")
    reader = BucketReader(store)
    latest = reader.latest()
    assert latest is not None and latest.digest == digest_of(seen[-1])
    for start in seen:
        chain = reader.chain(digest_of(start), latest)
        assert chain is not None
        at = start
        for manifest in chain:
            at = apply(at, reader.fetch_delta(manifest, folder))
            assert digest_of(at) == manifest.digest
        assert same(at, seen[-1])
    stranger = {name: bits ^ np.uint16(1) for name, bits in state.items()}
    if digest_of(stranger) not in [digest_of(one) for one in seen]:
        assert reader.chain(digest_of(stranger), latest) is None


@given(raw=st.binary(max_size=300))
def test_parsers_raise_nothing_but_our_errors(folder, raw):
    path = folder / "x.safetensors"
    path.write_bytes(raw)
    for parse in (
        lambda: Manifest.from_bytes(raw, "x"),
        lambda: Pointer.from_bytes(raw, "x"),
        lambda: TensorTable.from_bytes(raw, "x"),
        lambda: TensorFile(path, "x"),
    ):
        try:
            parse()
        except DeltaError as error:
            assert str(error).startswith("x")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data())
def test_edited_manifests_raise_nothing_but_our_errors(data):
    import json

    ref = {"key": "deltas/x", "size_bytes": 1, "sha256": "0" * 64}
    value = {
        "format": 1,
        "version": {"run": "r", "epoch": 1, "seq": 1},
        "digest": "1" * 32,
        "table": {"key": f"tables/{'0' * 64}.json", "size_bytes": 1, "sha256": "0" * 64},
        "num_params": 5,
        "changed_params": 1,
        "step": None,
        "created_unix_s": 1.0,
        "parent": {"seq": 0, "epoch": 1, "digest": "0" * 32, "manifest_sha256": "0" * 64},
        "delta": {"encoding": "plain", "objects": [ref]},
        "anchor": None,
    }
    assert Manifest.from_bytes(json.dumps(value).encode(), "x").version.seq == 1
    at = value
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(json_values)
        break
    try:
        read = Manifest.from_bytes(json.dumps(value).encode(), "x")
    except DeltaError as error:
        assert str(error).startswith("x")
        return
    assert Manifest.from_bytes(read.to_bytes(), "x") == read
