# SPDX-License-Identifier: Apache-2.0
"""How the fuzzer breaks bytes: blindly, and knowing what they mean."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import numpy as np

_ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**46, 2**46 + 1, 2**53, 2**53 + 1, 2**63,
    2**64, -(2**63), 10**40, 0.0, 1.0, 1.5, -0.0, 1e308, "", " ", "a", "../../etc/passwd", "/abs", "a" * 5000, "é",
    "\u202e", "\ud800", "\n", "BF16", "U8", "I64", "F64", "plain", "packed", "context",
    "0" * 64, "f" * 32, "deltas/../LATEST",
    [], [0], [[]], {}, {"": 0}, [2**40, 2**40], [-1, 8], [0, 2**63], [1] * 9,
]  # fmt: skip
_WORDS = [0, 1, 2, 3, 2**31, 2**32 - 1, 2**46, 2**53, 2**62, 2**63, 2**64 - 1]


def bytewise(data: bytes, rng: random.Random) -> bytes:
    """Some blind change of a byte string."""
    raw = bytearray(data)
    size = len(raw)
    at = rng.randrange(size + 1)
    length = min(int(2 ** (rng.random() * 8)), size)
    kind = rng.randrange(10)
    if kind <= 2 and size:
        for _ in range(rng.choice((1, 1, 2, 8))):
            raw[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == 3 and size:
        raw[rng.randrange(size)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == 4:
        return data[:at]
    elif kind == 5:
        return data + rng.randbytes(length + 1)
    elif kind == 6:
        del raw[at : at + length]
    elif kind == 7:
        raw[at:at] = raw[at : at + length]
    elif kind == 8:
        raw[at : at + length] = bytes(len(raw[at : at + length]))
    else:
        other = rng.randrange(size + 1)
        raw[at : at + length] = raw[other : other + length]
    return bytes(raw)


def json_text(data: bytes, rng: random.Random) -> bytes:
    """A change of a JSON document that leaves it one, mostly."""
    value = json.loads(data)
    kind = rng.randrange(12)
    if kind == 0:
        return data.replace(b"{", b'{"format":1,', 1)
    if kind == 1:
        return data.replace(b":", rng.choice((b":NaN,", b": ", b":[" * 3000, b":-")), 1)
    if kind == 2:
        return rng.choice((b"[", b'{"a":', b"[[" * 50_000, b"nul", b"\xff\xfe", b"[1]", b'"x"', b"1e999"))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(value, rng)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")


def _changed(value: Any, rng: random.Random) -> Any:
    places = list(_places(value))
    if not places:
        return rng.choice(_ODD)
    parent, key = rng.choice(places)
    kind = rng.randrange(8)
    found = parent[key]
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice(("x", "", "format", f"{key}.indices", str(key) + " "))] = found
    elif kind == 2 and isinstance(found, int):
        parent[key] = found + rng.choice((-1, 1, 2, -2, 100))
    elif kind == 3 and isinstance(found, str) and found:
        at = rng.randrange(len(found))
        parent[key] = found[:at] + rng.choice("0af./-Z") + found[at + 1 :]
    elif kind == 4:
        other_parent, other_key = rng.choice(places)
        parent[key] = other_parent[other_key]
    elif kind == 5 and isinstance(found, list):
        parent[key] = found * rng.choice((2, 3, 5000 if len(found) < 4 else 2))
    else:
        parent[key] = rng.choice(_ODD)
    return value


def _places(value: Any) -> Any:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(children):
        yield value, key
        yield from _places(child)


def tensor_file(data: bytes, rng: random.Random) -> bytes:
    """A change of a safetensors file that knows where its header and its words are."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + size], bytearray(data[8 + size :])
    kind = rng.randrange(8)
    if kind <= 2:
        header = json_text(header, rng)
        header += b" " * (-len(header) % 8) if rng.random() < 0.8 else b""
        return struct.pack("<Q", len(header)) + header + bytes(body)
    if kind == 3:
        length = rng.choice((0, size - 1, size + 1, len(data), 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", length) + header + bytes(body)
    if not body:
        return bytewise(data, rng)
    # words of eight bytes are sizes, codes, indices or values, those in front the ones that others depend on
    for _ in range(rng.choice((1, 1, 2, 4))):
        words = max(1, len(body) // 8)
        at = 8 * min(int(words * rng.random() ** rng.choice((1, 3))), words - 1)
        if rng.random() < 0.5:
            body[at : at + 8] = struct.pack("<Q", rng.choice((*_WORDS, rng.getrandbits(64))))[: len(body) - at]
        elif rng.random() < 0.5:
            half = rng.choice((0, 4))
            number = rng.choice((-1, 0, 2**31 - 1, -(2**31), rng.randrange(4000)))
            body[at + half : at + half + 4] = struct.pack("<i", number)[: max(0, len(body) - at - half)]
        else:
            old = int.from_bytes(body[at : at + 8], "little")
            body[at : at + 8] = ((old + rng.choice((-1, 1, 64, -64))) % 2**64).to_bytes(8, "little")[: len(body) - at]
    return data[: 8 + size] + bytes(body)


def reordered(data: bytes, rng: random.Random) -> bytes:
    """The tensors' data in another order than the header says."""
    (size,) = struct.unpack("<Q", data[:8])
    words = np.frombuffer(data[8 + size :], np.uint8).copy()
    cut = rng.randrange(len(words) + 1)
    return data[: 8 + size] + np.concatenate([words[cut:], words[:cut]]).tobytes()
