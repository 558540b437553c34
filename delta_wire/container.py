# SPDX-License-Identifier: Apache-2.0
"""safetensors files by their raw bits.

The library of that name is not used for reading: it copies, knows no bf16 without torch and trusts more than a bucket
deserves. Every file that is written here opens with `safetensors.safe_open`.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import numpy as np

from delta_wire.errors import FormatError
from delta_wire.state import MAX_DIMS, MAX_ELEMENTS, MAX_NAME_BYTES
from delta_wire.strict import load_object

# the limit of the safetensors library itself
MAX_HEADER_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
# bf16 and fp8 have no numpy type: their bits are held in unsigned integers
_NUMPY: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": np.uint16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "C64": np.complex64,
}
# an array, or a function that makes it when its turn to be written comes
Source = np.ndarray | Callable[[], np.ndarray]


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], Source]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file.

    Args:
        path (`Path`): overwritten; not synced.
        tensors: per name the safetensors dtype, the shape and the array, whose elements have the size of the dtype and
            are written in C order. A function in place of the array is called when its turn comes, so that a
            checkpoint larger than memory can be written.
        metadata: string keys and values for the header's `__metadata__`.
    """
    # widest elements first keeps every tensor aligned to its own size
    order = sorted(tensors, key=lambda name: (-_item_bytes(tensors[name][0], name), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        size_bytes = prod(shape) * _item_bytes(dtype, name)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size_bytes]}
        at += size_bytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    if len(raw) > MAX_HEADER_BYTES:
        raise FormatError(
            f"{path.name}: a header of {len(raw)} bytes is longer than {MAX_HEADER_BYTES}; split the file"
        )
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(raw)))
        file.write(raw)
        for name in order:
            dtype, shape, source = tensors[name]
            array = np.ascontiguousarray(source() if callable(source) else source)
            if array.size != prod(shape) or array.itemsize != _item_bytes(dtype, name):
                raise ValueError(
                    f"{name}: expected {dtype} {list(shape)}, found {array.size} elements of {array.itemsize} bytes"
                )
            # an empty array has no buffer to view
            if array.size:
                file.write(array.reshape(-1).view(np.uint8).data)


class TensorFile:
    """A safetensors file, mapped into memory and checked in full before anything is returned.

    Args:
        path (`Path`): the file.
        source (`str`, *optional*): what errors call it; defaults to the path.
        max_header_bytes (`int`, *optional*): refuse a longer header; parsing takes ten times its size.
        private (`bool`, *optional*, defaults to `False`): arrays can be written to; the file never changes, touched
            pages become private copies.
        in_place (`bool`, *optional*, defaults to `False`): arrays can be written to, which changes the file; touched
            pages take no memory for good.
    """

    def __init__(
        self,
        path: Path,
        source: str | None = None,
        *,
        max_header_bytes: int = MAX_HEADER_BYTES,
        private: bool = False,
        in_place: bool = False,
    ):
        self.path = Path(path)
        self.source = source or str(path)
        with open(path, "r+b" if in_place else "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes < _LENGTH.size:
                raise FormatError(
                    f"{self.source}: {size_bytes} bytes are no safetensors file; it is truncated or foreign"
                )
            access = mmap.ACCESS_WRITE if in_place else mmap.ACCESS_COPY if private else mmap.ACCESS_READ
            # kept alive by the arrays over it, also when the file has been deleted
            self._map = mmap.mmap(file.fileno(), 0, access=access)
        (header_bytes,) = _LENGTH.unpack(self._map[: _LENGTH.size])
        most = min(max_header_bytes, MAX_HEADER_BYTES)
        if header_bytes > min(most, size_bytes - _LENGTH.size):
            raise FormatError(
                f"{self.source}: the header claims {header_bytes} bytes, the file has {size_bytes} (and headers at "
                f"most {most}); it is truncated or foreign"
            )
        self._start = _LENGTH.size + header_bytes
        raw = self._map[_LENGTH.size : self._start]
        header = load_object(raw, f"{self.source} (header)", most)
        self.metadata = _parse_metadata(header.pop("__metadata__", {}), self.source)
        self._specs: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._begins: dict[str, int] = {}
        spans = []
        for name, entry in header.items():
            dtype, shape, begin, end = _parse_entry(name, entry, self.source)
            self._specs[name] = (dtype, shape)
            self._begins[name] = begin
            spans.append((begin, end, name))
        _check_spans(spans, size_bytes - self._start, self.source)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def names(self) -> list[str]:
        """Names of the tensors, as the header orders them."""
        return list(self._specs)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """safetensors dtype and shape of a tensor."""
        return self._specs[name]

    def array(self, name: str) -> np.ndarray:
        """The tensor without a copy; bf16 as uint16 bits. It keeps the mapping alive."""
        dtype, shape = self._specs[name]
        flat = np.frombuffer(self._map, _NUMPY[dtype], prod(shape), self._start + self._begins[name])
        return flat.reshape(shape)


def _item_bytes(dtype: str, name: str) -> int:
    if dtype not in _NUMPY:
        raise FormatError(f"{name}: the dtype {dtype!r:.40} is none of {', '.join(_NUMPY)}")
    return np.dtype(_NUMPY[dtype]).itemsize


def _parse_metadata(value: object, source: str) -> dict[str, str]:
    if not isinstance(value, dict) or any(not isinstance(entry, str) for entry in value.values()):
        raise FormatError(f"{source}: __metadata__ must map strings to strings, found {value!r:.200}")
    return value


def _parse_entry(name: str, entry: object, source: str) -> tuple[str, tuple[int, ...], int, int]:
    if not name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise FormatError(f"{source}: {name[:80]!r} is no tensor name (printable, 1 to {MAX_NAME_BYTES} bytes)")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{source}: tensor {name}: expected dtype, shape and data_offsets, found {entry!r:.200}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise FormatError(f"{source}: tensor {name}: the dtype must be a string, found {dtype!r:.80}")
    item_bytes = _item_bytes(dtype, f"{source}: tensor {name}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or any(type(d) is not int or d < 0 for d in shape):
        raise FormatError(f"{source}: tensor {name}: {shape!r:.200} is no shape of at most {MAX_DIMS} dimensions")
    if any(dim > MAX_ELEMENTS for dim in shape) or prod(shape) > MAX_ELEMENTS:
        raise FormatError(f"{source}: tensor {name}: {shape!r:.200} has more than {MAX_ELEMENTS} elements")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(at) is not int or at < 0 for at in offsets):
        raise FormatError(f"{source}: tensor {name}: data_offsets must be two integers, found {offsets!r:.200}")
    begin, end = offsets
    if end - begin != prod(shape) * item_bytes:
        raise FormatError(
            f"{source}: tensor {name}: {dtype} {shape} needs {prod(shape) * item_bytes} bytes, data_offsets span "
            f"{end - begin}"
        )
    return dtype, tuple(shape), begin, end


def _check_spans(spans: list[tuple[int, int, str]], data_bytes: int, source: str) -> None:
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise FormatError(
                f"{source}: tensor {name} begins at byte {begin}, expected {at}: tensors must neither overlap nor "
                "leave gaps"
            )
        at = end
    if at != data_bytes:
        raise FormatError(
            f"{source}: tensors need {at} bytes of data, the file has {data_bytes}; it is truncated or foreign"
        )
