# SPDX-License-Identifier: Apache-2.0
"""Blobs that no writer makes, found by mutation: each once decoded to something else than docs/FORMAT.md says."""

from pathlib import Path

import numpy as np
import pytest

from delta_wire import encodings
from delta_wire.encodings import context, packed, streams
from delta_wire.encodings.blob import write
from delta_wire.errors import FormatError
from delta_wire.kernels import cpu_bits
from delta_wire.state import TensorDelta, TensorSpec, TensorTable, resolve

NOTHING = np.empty(0, dtype=np.uint64)


def blob_of(codes: list[tuple[int, int]], low: np.ndarray = NOTHING, high: np.ndarray = NOTHING) -> np.ndarray:
    """A blob whose directory holds these values, each with the order of its code."""
    words = np.zeros(2 * len(codes), dtype=np.uint64)
    values, orders = (np.array(column, dtype=np.int64) for column in zip(*codes, strict=True))
    end = cpu_bits.write_codes(values, orders, words, 0)
    return streams.Streams(words[: (end + 63) // 64], low, high, NOTHING, NOTHING).to_blob()


def entries(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Codes of the tensors of a blob: for each the numbers skipped and a count."""
    codes = [(len(pairs), cpu_bits.ORDER_TENSORS)]
    for skipped, coded in pairs:
        codes += [(skipped, cpu_bits.ORDER_SKIPPED), (coded, cpu_bits.ORDER_CHANGED)]
    return codes


@pytest.mark.parametrize("gaps", [[1, 2**63 - 2], [2**62], [0, 0, 0, 0], [2, 1]])
def test_tensor_numbers_beyond_the_table_are_refused(gaps: list[int]):
    """A sum of gaps that wraps past 2^63 must not come out as a number that Python takes for an index from the end."""
    table = TensorTable([TensorSpec(name, (4,)) for name in "abc"])
    with pytest.raises(FormatError, match="blob"):
        packed.unpack(blob_of(entries([(gap, 2) for gap in gaps])), table, "blob")


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
    # by rank; the only exponent has no change, neither in all nor in the only slab
    codes = [*entries([(0, 0)]), (0, context.ORDER_CLASS), (0, 0)]
    path = tmp_path / "delta.safetensors"
    write(path, "context", [blob_of(codes)], {}, 1)
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
