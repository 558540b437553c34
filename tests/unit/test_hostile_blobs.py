# SPDX-License-Identifier: Apache-2.0
"""Blobs that no writer makes, found by mutation: each once decoded to something else than docs/FORMAT.md says."""

from pathlib import Path

import numpy as np
import pytest

from delta_wire import encodings
from delta_wire.encodings import packed, streams
from delta_wire.encodings.blob import write
from delta_wire.errors import FormatError
from delta_wire.state import TensorDelta, TensorSpec, TensorTable, resolve

NOTHING = np.empty(0, dtype=np.uint64)


def blob_of(directory: streams.DirectoryWriter, low: np.ndarray = NOTHING, high: np.ndarray = NOTHING) -> np.ndarray:
    words = directory.finish(np.empty(0, dtype=np.int64), np.zeros((0, 16), dtype=np.int64))
    return streams.Streams(words, low, high, NOTHING, NOTHING).to_blob()


@pytest.mark.parametrize("gaps", [[1, 2**63 - 2], [2**62], [0, 0, 0, 0], [2, 1]])
def test_tensor_numbers_beyond_the_table_are_refused(gaps: list[int]):
    """A sum of gaps that wraps past 2^63 must not come out as a number that Python takes for an index from the end."""
    table = TensorTable([TensorSpec(name, (4,)) for name in "abc"])
    directory = streams.DirectoryWriter()
    directory.add([len(gaps)], packed.ORDER_TENSORS)
    for gap in gaps:
        directory.add([gap], packed.ORDER_ORDINAL)
        directory.add([2], packed.ORDER_CHANGED)
    with pytest.raises(FormatError, match="blob"):
        packed.unpack(blob_of(directory), table, "blob")


def test_gaps_do_not_wrap():
    """A quotient whose gap is a multiple of 2^64 lies beyond the universe, not at its beginning."""
    universe = np.array([1 << 46])
    low = np.zeros(1, dtype=np.uint64)
    high = np.zeros((1 << 20) // 64, dtype=np.uint64)
    quotient = 1 << 19
    high[quotient // 64] = 1
    words = streams.Streams(NOTHING, low, high[: quotient // 64 + 1], NOTHING, NOTHING)
    with pytest.raises(FormatError, match="positions"):
        streams.decode_segments(words, universe, np.array([1]), "blob")


def test_a_tensor_that_is_listed_without_changes_is_left_out(tmp_path: Path):
    table = TensorTable([TensorSpec("a", (3,))])
    directory = streams.DirectoryWriter()
    directory.add([1], packed.ORDER_TENSORS)
    # by rank; the only exponent has no change, neither in all nor in the only slab
    directory.add([0], packed.ORDER_ORDINAL)
    directory.add([0, 0], packed.ORDER_CHANGED)
    directory.add([0], 0)
    path = tmp_path / "delta.safetensors"
    write(path, "context", [blob_of(directory)], {}, 1)
    zeros = np.zeros(3, dtype=np.uint16)
    assert encodings.get("context").decode(path, table, "delta", {"a": zeros}.__getitem__) == {}


@pytest.mark.parametrize("encoding", ["packed", "context"])
@pytest.mark.parametrize("kept", [1, 99, 100])
def test_elements_that_keep_their_bits_are_not_coded(encoding: str, kept: int, tmp_path: Path):
    """There is no code for a step of zero."""
    table = TensorTable([TensorSpec("a", (100,))])
    old = np.arange(100, dtype=np.uint16)
    new = np.where(np.arange(100) < kept, old, old + 5).astype(np.uint16)
    path = tmp_path / "delta.safetensors"
    part = TensorDelta("a", np.arange(100, dtype=np.int32), new, old)
    encodings.get(encoding).encode({"a": part}, table, path, 1, {"a": old}.__getitem__)
    found = encodings.get(encoding).decode(path, table, "delta", {"a": old}.__getitem__)
    assert len(found) == (kept < 100)
    for decoded in found.values():
        assert decoded.indices.tolist() == list(range(kept, 100))
        assert np.array_equal(resolve(decoded, old[decoded.indices]).new, new[kept:])
