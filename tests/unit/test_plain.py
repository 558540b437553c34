# SPDX-License-Identifier: Apache-2.0
"""Files of encoding `plain`: of other writers, damaged, hostile."""

import numpy as np
import pytest

from delta_wire.container import write_tensors
from delta_wire.encodings import get
from delta_wire.errors import FormatError, ModelMismatchError, UnsupportedFormatError
from delta_wire.state import TensorDelta, TensorSpec, TensorTable

TABLE = TensorTable([TensorSpec("w", (2, 3)), TensorSpec("v", (4,)), TensorSpec("big", (1 << 16, 1 << 16))])
PLAIN = get("plain")


def i32(*values):
    return ("I32", (len(values),), np.array(values, np.int32))


def i64(*values):
    return ("I64", (len(values),), np.array(values, np.int64))


def bf16(*values, shape=None):
    return ("BF16", shape or (len(values),), np.array(values, np.uint16))


def decode(tmp_path, tensors, metadata=None):
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors, metadata)
    return PLAIN.decode(path, TABLE, "bucket/deltas/x")


def test_a_file_of_another_writer(tmp_path):
    """As torch and safetensors write it: int32 indices, bf16 values, only the published metadata keys."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    tensors = {
        "w.indices": torch.tensor([0, 5], dtype=torch.int32),
        "w.values": torch.tensor([1.0, -0.0], dtype=torch.bfloat16),
        "v": torch.zeros(4, dtype=torch.bfloat16),
    }
    save_file(tensors, path, {"sparse": "True", "model_version": "12", "sparsity": "0.99", "changed_params": "6"})
    delta = PLAIN.decode(path, TABLE, "x")
    assert delta["w"].indices.tolist() == [0, 5] and delta["w"].new.tolist() == [0x3F80, 0x8000]
    assert delta["v"].indices.tolist() == [0, 1, 2, 3]
    save_file({name: tensors[name] for name in ("w.indices", "w.values")}, path)
    assert list(PLAIN.decode(path, TABLE, "x")) == ["w"]


def test_another_reader_reads_ours(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors import safe_open

    path = tmp_path / "x.safetensors"
    part = TensorDelta("w", np.array([1, 4], np.int32), np.array([0x7FC1, 0x8000], np.uint16))
    whole = TensorDelta("v", np.arange(4, dtype=np.int32), np.array([1, 2, 3, 4], np.uint16))
    PLAIN.encode({"w": part, "v": whole}, TABLE, path, 3)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"w.indices", "w.values", "v"}
        weights = torch.zeros(6, dtype=torch.bfloat16)
        weights[file.get_tensor("w.indices").long()] = file.get_tensor("w.values")
        assert weights.view(torch.int16)[[1, 4]].tolist() == [0x7FC1, -0x8000]
        assert file.get_tensor("v").shape == (4,) and file.metadata()["model_version"] == "3"


def test_indices_of_either_width(tmp_path):
    delta = decode(tmp_path, {"w.indices": i64(0, 5), "w.values": bf16(1, 2)})
    assert delta["w"].indices.dtype == np.int32 and delta["w"].indices.tolist() == [0, 5]
    delta = decode(tmp_path, {"big.indices": i64(7, (1 << 32) - 1), "big.values": bf16(1, 2)})
    assert delta["big"].indices.dtype == np.int64 and delta["big"].indices.tolist() == [7, (1 << 32) - 1]
    delta = decode(tmp_path, {"big.indices": i32(7, 8), "big.values": bf16(1, 2)})
    assert delta["big"].indices.dtype == np.int64
    path = tmp_path / "x.safetensors"
    part = TensorDelta("big", np.array([(1 << 32) - 1], np.int64), np.array([9], np.uint16))
    PLAIN.encode({"big": part}, TABLE, path, 1)
    assert PLAIN.decode(path, TABLE, "x")["big"].indices.tolist() == [(1 << 32) - 1]


def test_tensors_without_changes_are_dropped(tmp_path):
    assert decode(tmp_path, {"w.indices": i32(), "w.values": bf16()}) == {}


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        ({"x.indices": i32(0), "x.values": bf16(0)}, ModelMismatchError, r"'x\.\w+' belongs to none of the 3 tensors"),
        ({"lm_head.weight": bf16(0)}, ModelMismatchError, r"'lm_head\.weight' belongs to none"),
        ({".indices": i32(0)}, ModelMismatchError, "belongs to none"),
        ({"w.indices": i32(0)}, FormatError, r"w\.indices comes without w\.values"),
        ({"w.values": bf16(0)}, FormatError, r"w\.values comes without w\.indices"),
        ({"v": bf16(1, 2, 3, 4), "v.indices": i32(0), "v.values": bf16(1)}, FormatError, "both whole and sparse"),
        ({"w": bf16(*range(6))}, ModelMismatchError, r"w: expected BF16 \[2, 3\], found BF16 \[6\]"),
        ({"v": ("F32", (4,), np.zeros(4, np.float32))}, ModelMismatchError, r"expected BF16 \[4\], found F32"),
        ({"w.indices": i32(0, 6), "w.values": bf16(1, 2)}, FormatError, "positions from 0 to 6 are outside"),
        ({"w.indices": i32(-1, 2), "w.values": bf16(1, 2)}, FormatError, "positions from -1 to 2 are outside"),
        # would be 1 and 2 after narrowing
        ({"w.indices": i64((1 << 32) + 1, (1 << 32) + 2), "w.values": bf16(1, 2)}, FormatError, "are outside"),
        ({"w.indices": i32(2, 1), "w.values": bf16(1, 2)}, FormatError, "index 1 after 2 at position 1"),
        ({"w.indices": i32(1, 1), "w.values": bf16(1, 2)}, FormatError, "index 1 after 1 at position 1"),
        ({"w.indices": i32(1, 2), "w.values": bf16(1)}, FormatError, r"w\.values: expected BF16 \[2\]"),
        ({"w.indices": i32(*range(7)), "w.values": bf16(*range(7))}, FormatError, "at most 6 entries"),
        (
            {"w.indices": ("I32", (1, 2), np.zeros((1, 2), np.int32)), "w.values": bf16(1, 2)},
            FormatError,
            "I32 or I64",
        ),
        ({"w.indices": ("I16", (1,), np.zeros(1, np.int16)), "w.values": bf16(1)}, FormatError, "I32 or I64"),
        ({"w.indices": ("F32", (1,), np.zeros(1, np.float32)), "w.values": bf16(1)}, FormatError, "I32 or I64"),
        ({"w.indices": i32(1), "w.values": ("F16", (1,), np.zeros(1, np.float16))}, FormatError, "expected BF16"),
        ({"w.indices": i32(1), "w.values": ("U16", (1,), np.zeros(1, np.uint16))}, FormatError, "expected BF16"),
    ],
)
def test_hostile_files_are_refused_by_name(tmp_path, tensors, kind, message):
    with pytest.raises(kind, match=message) as caught:
        decode(tmp_path, tensors)
    assert str(caught.value).startswith("bucket/deltas/x")


def test_other_formats_and_encodings(tmp_path):
    with pytest.raises(UnsupportedFormatError, match="delta_format is '2'"):
        decode(tmp_path, {}, {"delta_format": "2"})
    with pytest.raises(FormatError, match="expected encoding 'plain', found 'packed'"):
        decode(tmp_path, {}, {"encoding": "packed"})
    with pytest.raises(UnsupportedFormatError, match="encoding 'zip' is not known"):
        get("zip")


def test_ambiguous_tables_are_refused_on_both_sides(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x.values": bf16(1)})
    for names in (("x", "x.values"), ("x", "x.indices"), ("n" * 1017,)):
        table = TensorTable(TensorSpec(name, (1,)) for name in names)
        with pytest.raises(ModelMismatchError, match="encoding plain"):
            PLAIN.decode(path, table, "x")
        with pytest.raises(ModelMismatchError, match="encoding plain"):
            PLAIN.encode({}, table, path, 1)


def test_a_header_larger_than_the_model_needs_is_not_parsed(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {}, {"padding": "x" * 200_000})
    with pytest.raises(FormatError, match="the header claims"):
        PLAIN.decode(path, TABLE, "x")


def test_steps_are_not_written_as_bits(tmp_path):
    part = TensorDelta("w", np.array([1], np.int32), np.array([1], np.uint16), relative=np.array([True]))
    with pytest.raises(ValueError, match="w has steps"):
        PLAIN.encode({"w": part}, TABLE, tmp_path / "x", 1)


def test_names_of_any_script_stay_within_the_bound(tmp_path):
    name = "層." * 100
    table = TensorTable([TensorSpec(name, (4,))])
    path = tmp_path / "x.safetensors"
    PLAIN.encode(
        {name: TensorDelta(name, np.arange(3, dtype=np.int32), np.arange(3, dtype=np.uint16))}, table, path, 1
    )
    assert path.stat().st_size <= PLAIN.max_bytes(table)
    assert list(PLAIN.decode(path, table, "x")) == [name]
