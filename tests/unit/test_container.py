# SPDX-License-Identifier: Apache-2.0
import json
import struct

import numpy as np
import pytest
import safetensors

from delta_wire.container import MAX_HEADER_BYTES, TensorFile, write_tensors
from delta_wire.errors import FormatError


def raw_file(header, data=b"", header_bytes=None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + data


def entry(begin=0, end=4, dtype="BF16", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_round_trip_and_the_library_opens_it(tmp_path):
    path = tmp_path / "x.safetensors"
    bits = np.array([[0x8000, 0x7FC1], [0xFFFF, 0x0001], [0, 0x7F80]], np.uint16)
    tensors = {
        "z": ("BF16", (3, 2), bits),
        "odd": ("U8", (3,), np.array([1, 2, 3], np.uint8)),
        "i": ("I64", (1,), np.array([-5])),
        "scalar": ("F32", (), np.array(1.5, np.float32)),
        "empty": ("I32", (0,), np.empty(0, np.int32)),
        "late": ("BF16", (6,), lambda: bits.reshape(-1)),
    }
    write_tensors(path, tensors, {"k": "v", "ü": "☃"})
    file = TensorFile(path)
    assert set(file.names()) == set(tensors) and file.metadata == {"k": "v", "ü": "☃"}
    assert file.spec("z") == ("BF16", (3, 2)) and file.spec("scalar") == ("F32", ())
    np.testing.assert_array_equal(file.array("z"), bits)
    np.testing.assert_array_equal(file.array("late"), bits.reshape(-1))
    assert file.array("i").tolist() == [-5] and file.array("scalar") == 1.5 and file.array("empty").size == 0
    # widest first, so that nothing is unaligned
    assert all(file.array(name).flags.aligned for name in tensors)
    with safetensors.safe_open(path, "numpy") as opened:
        assert set(opened.keys()) == set(tensors) and opened.metadata() == file.metadata
        assert opened.get_tensor("i").tolist() == [-5]


def test_no_tensors_is_a_file_too(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {}, {"sparse": "True"})
    assert TensorFile(path).names() == []
    with safetensors.safe_open(path, "numpy") as opened:
        assert list(opened.keys()) == []


def test_not_contiguous_arrays_are_written_in_order(tmp_path):
    path = tmp_path / "x.safetensors"
    bits = np.arange(12, dtype=np.uint16).reshape(3, 4)
    write_tensors(path, {"t": ("BF16", (4, 3), bits.T)})
    np.testing.assert_array_equal(TensorFile(path).array("t"), bits.T)


def test_arrays_outlive_file_and_object(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"t": ("BF16", (1000,), np.arange(1000, dtype=np.uint16))})
    array = TensorFile(path).array("t")
    path.unlink()
    assert array.sum() == 999 * 500


def test_arrays_are_read_only_unless_private(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"t": ("BF16", (4,), np.zeros(4, np.uint16))})
    with pytest.raises(ValueError, match="read-only"):
        TensorFile(path).array("t")[0] = 1
    private = TensorFile(path, private=True)
    private.array("t")[0] = 7
    assert private.array("t").tolist() == [7, 0, 0, 0] and TensorFile(path).array("t").tolist() == [0, 0, 0, 0]


def test_writer_refuses_what_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="t: expected BF16"):
        write_tensors(tmp_path / "x", {"t": ("BF16", (3,), np.zeros(4, np.uint16))})
    with pytest.raises(ValueError, match="t: expected BF16"):
        write_tensors(tmp_path / "x", {"t": ("BF16", (4,), np.zeros(4, np.float32))})
    with pytest.raises(FormatError, match="dtype 'bf16'"):
        write_tensors(tmp_path / "x", {"t": ("bf16", (4,), np.zeros(4, np.uint16))})


def test_library_files_open_here(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "x.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 2), np.int8)}, path, {"m": "1"})
    file = TensorFile(path)
    assert file.array("a").tolist() == [[0, 1, 2], [3, 4, 5]] and file.spec("b") == ("I8", (0, 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are no safetensors file"),
        (b"\x01\x02\x03", "3 bytes are no safetensors file"),
        (raw_file(b"{}", header_bytes=1 << 63), "claims 9223372036854775808 bytes"),
        (raw_file(b"{}", header_bytes=MAX_HEADER_BYTES + 1), "claims"),
        (raw_file(b"{}", header_bytes=3), "claims 3 bytes, the file has 10"),
        (raw_file(b"{"), "expected a JSON object"),
        (raw_file(b"[]"), "expected a JSON object"),
        (raw_file(b'{"a":{}, "a":{}}'), "a key is given twice"),
        (raw_file(b'{"__metadata__":{},"__metadata__":{}}'), "a key is given twice"),
        (raw_file({"__metadata__": {"a": 1}}), "strings to strings"),
        (raw_file({"__metadata__": []}), "strings to strings"),
        (raw_file({"": entry()}, b"0000"), "no tensor name"),
        (raw_file(b'{"\\udfff":{}}'), "no tensor name"),
        (raw_file({"t": 5}), "tensor t: expected dtype, shape and data_offsets"),
        (raw_file({"t": {**entry(), "extra": 1}}, b"0000"), "tensor t: expected dtype, shape and data_offsets"),
        (raw_file({"t": entry(dtype="bfloat16")}, b"0000"), "tensor t: the dtype 'bfloat16'"),
        (raw_file({"t": entry(dtype=["BF16"])}, b"0000"), "tensor t: the dtype must be a string"),
        (raw_file({"t": entry(shape=(-2,))}, b"0000"), "no shape"),
        (raw_file({"t": entry(shape=(2.0,))}, b"0000"), "no shape"),
        (raw_file({"t": entry(shape=(1,) * 9)}, b"0000"), "no shape"),
        (raw_file({"t": entry(shape=(1 << 40, 1 << 40), end=4)}, b"0000"), "more than"),
        (raw_file({"t": entry(shape=(0, 1 << 60), end=0)}), "more than"),
        (raw_file({"t": {**entry(), "data_offsets": [0]}}, b"0000"), "two integers"),
        (raw_file({"t": {**entry(), "data_offsets": [0, 4, 4]}}, b"0000"), "two integers"),
        (raw_file({"t": {**entry(), "data_offsets": [-4, 0]}}, b"0000"), "two integers"),
        (raw_file({"t": {**entry(), "data_offsets": [False, 4]}}, b"0000"), "two integers"),
        (raw_file({"t": entry(end=6)}, b"000000"), "needs 4 bytes, data_offsets span 6"),
        (raw_file({"t": entry(4, 0)}, b"0000"), "needs 4 bytes, data_offsets span -4"),
        (raw_file({"t": entry(0, 4), "u": entry(2, 6)}, b"000000"), "tensor u begins at byte 2, expected 4"),
        (raw_file({"t": entry(0, 4), "u": entry(0, 4)}, b"0000"), "neither overlap"),
        (raw_file({"t": entry(0, 4), "u": entry(6, 10)}, b"0" * 10), "nor leave gaps"),
        (raw_file({"t": entry(2, 6)}, b"0" * 6), "begins at byte 2, expected 0"),
        (raw_file({"t": entry(0, 4)}, b"000"), "need 4 bytes of data, the file has 3"),
        (raw_file({"t": entry(0, 4)}, b"00000"), "need 4 bytes of data, the file has 5"),
        (raw_file({"t": entry(1 << 62, (1 << 62) + 4)}, b"0000"), "begins at byte"),
    ],
)
def test_hostile_files_are_refused_before_anything_is_read(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message) as caught:
        TensorFile(path, "bucket/deltas/x")
    assert str(caught.value).startswith("bucket/deltas/x")


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"t": ("BF16", (5,), np.arange(5, dtype=np.uint16))}, {"a": "b"})
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(FormatError):
            TensorFile(path)
