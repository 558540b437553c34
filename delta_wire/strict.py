# SPDX-License-Identifier: Apache-2.0
"""Reading JSON that somebody else wrote: bounded, and nothing is guessed.

A bucket may be written by anybody, so every value is checked for its type and range before it is used, and every
complaint names the object it came from.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from delta_wire.errors import FormatError

# the largest integer that every JSON reader holds exactly
MAX_INT = (1 << 53) - 1
# what can be done about an object that says something impossible
_REMEDY = "the object is damaged or foreign: restore it, or use another bucket"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def load_object(raw: bytes, source: str, max_bytes: int) -> dict[str, Any]:
    """Parse one JSON object.

    Args:
        raw (`bytes`): UTF-8.
        source (`str`): what errors call it.
        max_bytes (`int`): refuse anything longer before it is parsed.
    """
    if len(raw) > max_bytes:
        raise FormatError(f"{source}: expected at most {max_bytes} bytes of JSON, found {len(raw)}; it is not ours")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{source}: expected a JSON object, found {_show(raw)} ({error}); the object is torn or foreign"
        ) from error
    if not isinstance(value, dict):
        raise FormatError(f"{source}: expected a JSON object, found {_show(raw)}; the object is torn or foreign")
    return value


def dump(value: dict[str, Any]) -> bytes:
    """Compact ASCII JSON; keys stay in the order given."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def take(value: dict[str, Any], key: str, source: str) -> Any:
    """A field that must be there."""
    if key not in value:
        raise FormatError(f"{source}: the field {key!r} is missing; {_REMEDY}")
    return value[key]


def take_int(value: dict[str, Any], key: str, source: str, low: int = 0, high: int = MAX_INT) -> int:
    """An integer in `[low, high]`; booleans and floats are none."""
    found = take(value, key, source)
    if type(found) is not int or not low <= found <= high:
        raise FormatError(f"{source}: {key} must be an integer from {low} to {high}, found {found!r:.80}; {_REMEDY}")
    return found


def take_float(value: dict[str, Any], key: str, source: str) -> float:
    """A finite number that is not negative."""
    found = take(value, key, source)
    if type(found) not in (int, float) or not math.isfinite(found) or found < 0 or found > MAX_INT:
        raise FormatError(f"{source}: {key} must be a finite number, not negative, found {found!r:.80}; {_REMEDY}")
    return float(found)


def take_text(value: dict[str, Any], key: str, source: str, max_chars: int) -> str:
    """A printable string of 1 to `max_chars` characters."""
    found = take(value, key, source)
    if not isinstance(found, str) or not 0 < len(found) <= max_chars or not found.isprintable():
        raise FormatError(
            f"{source}: {key} must be 1 to {max_chars} printable characters, found {found!r:.80}; {_REMEDY}"
        )
    return found


def take_sha256(value: dict[str, Any], key: str, source: str) -> str:
    """64 lower-case hexadecimal digits."""
    found = take(value, key, source)
    if not isinstance(found, str) or not _SHA256.fullmatch(found):
        raise FormatError(f"{source}: {key} must be 64 lower-case hexadecimal digits, found {found!r:.80}; {_REMEDY}")
    return found


def take_object(value: dict[str, Any], key: str, source: str) -> dict[str, Any]:
    """A nested JSON object."""
    found = take(value, key, source)
    if not isinstance(found, dict):
        raise FormatError(f"{source}: {key} must be an object, found {found!r:.80}; {_REMEDY}")
    return found


def _show(raw: bytes) -> str:
    return f"{len(raw)} bytes beginning with {raw[:40]!r}"


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is given twice")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
