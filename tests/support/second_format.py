# SPDX-License-Identifier: Apache-2.0
"""The second reader's JSON, names, digests, tensor tables and safetensors files: sections 0, 1, 5 and 6.

See second_reader.py, whose rules hold here.
"""

import hashlib
import json
import math
import unicodedata
from typing import Any

State = dict[str, list[int]]
Table = dict[str, list[int]]  # name -> shape, in the order of the names
Changes = dict[str, dict[int, int]]  # name -> flat index -> new bits

M64 = 2**64 - 1
ITEM_BYTES = {"U8": 1, "BF16": 2, "I32": 4, "I64": 8}


class Refused(Exception):
    """The bucket does not follow the document."""


def need(condition: object, what: str) -> None:
    if not condition:
        raise Refused(what)


# Section 0 and 1: JSON, names, digests


def parse(raw: bytes) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(items)) == len(items), "a key is given twice")
        return dict(items)

    def constant(text: str) -> None:
        raise Refused(f"JSON has {text}")

    try:
        value = json.loads(raw.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"no JSON: {error}") from error
    need(isinstance(value, dict), "JSON is not an object")
    return value


def integer(value: Any, low: int, high: int) -> int:
    need(type(value) is int and low <= value <= high, f"{value!r} is no integer from {low} to {high}")
    return value


def check_name(name: str) -> None:
    need(1 <= len(name.encode("utf-8", "surrogatepass")) <= 1024, "length of a name")
    need(all(c == " " or unicodedata.category(c)[0] not in "CZ" for c in name), f"characters of {name!r}")


def check_shape(shape: Any) -> list[int]:
    need(isinstance(shape, list) and len(shape) <= 8, "shape")
    need(math.prod(integer(size, 0, 2**46) for size in shape) <= 2**46, "number of elements")
    return shape


def mix(x: int) -> int:
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & M64
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & M64
    return x ^ x >> 33


class Digest:
    def __init__(self) -> None:
        self.lanes = [0, 0]

    def add(self, name: str, elements: Any, sign: int = 1) -> None:
        h = hashlib.blake2b(name.encode(), digest_size=16).digest()
        key_0, key_1 = int.from_bytes(h[:8], "little"), int.from_bytes(h[8:], "little")
        for index, bits in elements:
            word = (index << 16) + bits
            self.lanes[0] += sign * mix(word ^ key_0)
            self.lanes[1] += sign * mix(word + key_1 & M64)

    def __str__(self) -> str:
        return "".join(f"{lane & M64:016x}" for lane in self.lanes)


def digest_state(state: State) -> Digest:
    digest = Digest()
    for name, bits in state.items():
        digest.add(name, enumerate(bits))
    return digest


# Sections 5 and 6: tensor tables and safetensors files


def parse_table(raw: bytes) -> Table:
    need(len(raw) <= 64 * 2**20, "size of the table")
    table = {}
    for name, entry in parse(raw).items():
        check_name(name)
        need(
            isinstance(entry, dict) and list(entry) == ["dtype", "shape"] and entry["dtype"] == "BF16", f"entry {name}"
        )
        table[name] = check_shape(entry["shape"])
    need(list(table) == sorted(table) and len(table) <= 2**19, "order or number of tensors")
    form = {name: {"dtype": "BF16", "shape": shape} for name, shape in table.items()}
    need(json.dumps(form, separators=(",", ":")).encode() == raw, "the table is not in canonical form")
    return table


class Safetensors:
    def __init__(self, raw: bytes) -> None:
        size_bytes = int.from_bytes(raw[:8], "little")
        need(len(raw) >= 8 and size_bytes <= min(100_000_000, len(raw) - 8), "length of the header")
        header = parse(raw[8 : 8 + size_bytes].rstrip(b" "))
        self.data = raw[8 + size_bytes :]
        self.metadata = header.pop("__metadata__", {})
        need(isinstance(self.metadata, dict) and all(type(v) is str for v in self.metadata.values()), "metadata")
        self.entries = header
        spans = []
        for name, entry in header.items():
            check_name(name)
            need(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}, f"entry {name}")
            need(entry["dtype"] in ITEM_BYTES, f"dtype of {name}")
            need(isinstance(entry["data_offsets"], list) and len(entry["data_offsets"]) == 2, f"offsets of {name}")
            begin, end = (integer(offset, 0, len(self.data)) for offset in entry["data_offsets"])
            bytes_expected = math.prod(check_shape(entry["shape"])) * ITEM_BYTES[entry["dtype"]]
            need(end - begin == bytes_expected, f"span of {name}")
            spans.append((begin, end))
        at = 0
        for begin, end in sorted(spans):
            need(begin == at, "tensors overlap or leave a gap")
            at = end
        need(at == len(self.data), "tensors do not end with the file")

    def bytes(self, name: str, dtypes: tuple[str, ...], shape: list[int] | None) -> bytes:
        entry = self.entries[name]
        need(entry["dtype"] in dtypes and shape in (None, entry["shape"]), f"dtype or shape of {name}")
        begin, end = entry["data_offsets"]
        return self.data[begin:end]

    def numbers(self, name: str, dtypes: tuple[str, ...], shape: list[int] | None) -> list[int]:
        raw, item_bytes = self.bytes(name, dtypes, shape), ITEM_BYTES[self.entries[name]["dtype"]]
        signed = self.entries[name]["dtype"] in ("I32", "I64")
        if item_bytes == 2:
            return [low | high << 8 for low, high in zip(raw[::2], raw[1::2], strict=True)]
        return [
            int.from_bytes(raw[i : i + item_bytes], "little", signed=signed) for i in range(0, len(raw), item_bytes)
        ]
