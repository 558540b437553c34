# SPDX-License-Identifier: Apache-2.0
"""decode(encode(x)) = x for every encoding, over arbitrary bit patterns and densities; hostile blobs are refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delta_wire import encodings
from delta_wire.encodings import context, packed, streams
from delta_wire.errors import FormatError
from delta_wire.kernels import cpu_steps
from delta_wire.state import Delta, TensorDelta, TensorSpec, TensorTable, compose, resolve

SPECIAL = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF, 0x7FFF], np.uint16)
SETTINGS = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

State = dict[str, np.ndarray]


@st.composite
def updates(draw: st.DrawFn) -> tuple[TensorTable, State, Delta]:
    """Tensors of odd sizes, changed from not at all to altogether, by one ulp, to anything, or to special patterns."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    specs, old, delta = [], {}, {}
    for number in range(draw(st.integers(1, 5))):
        size = draw(st.sampled_from([1, 2, 63, 64, 65, 500, 4097]))
        name = f"tensor.{number}"
        specs.append(TensorSpec(name, (size,)))
        bits = rng.integers(0, 1 << 16, size).astype(np.uint16)
        if draw(st.booleans()):
            bits = ((rng.standard_normal(size) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        old[name] = bits
        density = draw(st.sampled_from([0, 0.003, 0.05, 0.3, 0.5, 0.7, 0.97, 1]))
        indices = np.nonzero(rng.random(size) < density)[0].astype(np.int32)
        kind = draw(st.sampled_from(["ulp", "any", "special"]))
        if kind == "ulp":
            new = bits[indices] ^ np.uint16(1)
        else:
            pool = SPECIAL if kind == "special" else np.arange(1 << 16, dtype=np.uint16)
            new = rng.choice(pool, indices.size).astype(np.uint16)
        changed = new != bits[indices]
        if changed.any():
            delta[name] = TensorDelta(name, indices[changed], new[changed], bits[indices[changed]])
    return TensorTable(specs), old, delta


def apply(state: State, delta: Delta) -> State:
    result = {name: bits.copy() for name, bits in state.items()}
    for name, part in delta.items():
        result[name][part.indices] = resolve(part, result[name][part.indices]).new
    return result


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["plain", "packed", "context"])
@SETTINGS
@given(update=updates())
def test_decode_is_the_inverse_of_encode(tmp_path: Path, name: str, update: tuple[TensorTable, State, Delta]):
    table, old, delta = update
    encoding, path = encodings.get(name), tmp_path / "delta.safetensors"
    encoding.encode(delta, table, path, 7, old.__getitem__)
    decoded = encoding.decode(path, table, str(path), old.__getitem__)
    assert decoded.keys() == delta.keys()
    assert same(apply(old, decoded), apply(old, delta))
    for key, part in delta.items():
        found = resolve(decoded[key], old[key][decoded[key].indices])
        assert found.indices.dtype == part.indices.dtype
        if name == "plain" and found.num_changed == old[key].size:
            # sent whole, which lists elements that keep their bits
            continue
        assert np.array_equal(found.indices, part.indices) and np.array_equal(found.new, part.new)
    assert path.stat().st_size <= encoding.max_bytes(table)


@SETTINGS
@given(update=updates())
def test_no_encoding_is_above_dense(update: tuple[TensorTable, State, Delta]):
    table, old, delta = update
    for blob in (packed.pack(delta, table), context.pack(delta, table, old.__getitem__)):
        # the blob's own sizes and a directory entry a tensor stay, however small the model is
        assert blob.size <= 1.01 * table.full_bytes + 64 + 48 * len(table)


@SETTINGS
@given(update=updates(), other=st.integers(0, 2**32), swap=st.booleans())
def test_steps_and_bits_compose(update: tuple[TensorTable, State, Delta], other: int, swap: bool):
    table, old, delta = update
    middle = apply(old, delta)
    rng = np.random.default_rng(other)
    second: Delta = {}
    for name, bits in middle.items():
        indices = np.nonzero(rng.random(bits.size) < 0.3)[0].astype(np.int32)
        new = bits[indices] + np.uint16(3)
        if indices.size:
            second[name] = TensorDelta(name, indices, new, bits[indices])
    end = apply(middle, second)
    as_steps = [packed.unpack(packed.pack(part, table), table, "blob") for part in (delta, second)]
    as_bits = [{k: TensorDelta(k, p.indices, p.new) for k, p in part.items()} for part in (delta, second)]
    assert same(apply(old, compose(*as_steps)), end)
    first, last = (as_bits[0], as_steps[1]) if swap else (as_steps[0], as_bits[1])
    assert same(apply(old, compose(first, last)), end)


@settings(deadline=None, max_examples=300)
@given(update=updates(), data=st.data())
def test_damaged_blobs_are_refused_or_decode_within_bounds(
    update: tuple[TensorTable, State, Delta], data: st.DataObject
):
    table, old, delta = update
    by_context = data.draw(st.booleans())
    blob = context.pack(delta, table, old.__getitem__) if by_context else packed.pack(delta, table)
    damaged = blob.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, damaged.size - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, damaged.size))]
    try:
        if by_context:
            decoded = context.unpack(damaged, table, "blob", old.__getitem__)
        else:
            decoded = packed.unpack(damaged, table, "blob")
    except FormatError as error:
        assert "blob" in str(error)
        return
    for name, part in decoded.items():
        assert part.num_changed <= table[name].num_elements
        assert ascending_and_inside(part, table[name].num_elements)


def ascending_and_inside(part: TensorDelta, num_elements: int) -> bool:
    indices = part.indices.astype(np.int64)
    return bool(indices.size and indices[0] >= 0 and indices[-1] < num_elements and (np.diff(indices) > 0).all())


def test_every_pair_of_patterns_has_a_step_that_leads_there():
    rng = np.random.default_rng(0)
    old = np.concatenate([rng.integers(0, 1 << 16, 1 << 18).astype(np.uint16), np.repeat(SPECIAL, SPECIAL.size)])
    new = np.concatenate([rng.integers(0, 1 << 16, 1 << 18).astype(np.uint16), np.tile(SPECIAL, SPECIAL.size)])
    line = lambda bits: bits ^ np.where(bits & 0x8000, 0x7FFF, 0).astype(np.uint16)  # noqa: E731
    moved = np.empty_like(old)
    cpu_steps.apply_steps(old, line(new) - line(old), moved)
    assert np.array_equal(moved, new)


@pytest.mark.parametrize("n", [1, 64, 65, 1000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.51, 0.9, 0.999, 1.0])
def test_segments_of_every_density(n: int, share: float):
    rng = np.random.default_rng(n)
    sizes = np.array([round(n * share)] * 3, dtype=np.int64)
    universes = np.full(3, n, dtype=np.int64)
    positions = np.concatenate([np.sort(rng.choice(n, size, replace=False)) for size in sizes]).astype(np.int64)
    low, high = streams.encode_segments(positions, universes, sizes)
    empty = np.empty(0, dtype=np.uint64)
    found = streams.decode_segments(streams.Streams(empty, low, high, empty, empty), universes, sizes, "blob")
    assert np.array_equal(found, positions)


def test_a_small_blob_cannot_ask_for_much_memory():
    """A directory that claims huge counts is refused before memory is taken for them."""
    table = TensorTable([TensorSpec("huge", (1 << 40,))])
    directory = streams.DirectoryWriter(np.array([0]), np.array([2 << 40]))
    words = directory.finish(np.empty(0, dtype=np.int64), np.zeros((0, 16), dtype=np.int64))
    empty = np.empty(0, dtype=np.uint64)
    blob = streams.Streams(words, empty, empty, empty, empty).to_blob()
    with pytest.raises(FormatError, match="blob"):
        packed.unpack(blob, table, "blob")
