# SPDX-License-Identifier: Apache-2.0
"""What a bucket must be able to do, whatever keeps it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from delta_wire.errors import FormatError, ObjectExistsError, ObjectNotFoundError, StoreUnavailableError

MAX_KEY_CHARS = 512
# no component begins with a dot: neither `..` nor a hidden (temporary) file is a key
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._+@=-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._+@=-]*)*")
_COMPONENT_CHARS = 200


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One line of a listing."""

    key: str
    size_bytes: int


class Store(Protocol):
    """A flat space of immutable objects under keys, and a few small ones that are overwritten whole.

    Every method raises a [`~delta_wire.errors.StoreError`] when the bucket cannot do what was asked, and
    [`~delta_wire.errors.FormatError`] for a key that is none. No method leaves a partly written object or file behind
    under its final name.

    Attributes:
        url (`str`): what errors and logs call the bucket.
        create_only (`bool`): whether `put(create_only=True)` has exactly one winner. Without it an object that exists
            is refused all the same, but of two writers at the same moment the later one wins, and neither is told.
        least_listing_s (`float`): how far apart two listings should be at least, because they count against a quota.
    """

    url: str
    create_only: bool
    least_listing_s: float

    def get(self, key: str, max_bytes: int) -> bytes:
        """The whole object; [`FormatError`] if it has more than `max_bytes`."""
        ...

    def get_file(self, key: str, path: Path, max_bytes: int) -> None:
        """As `get`, into a local file that appears complete or not at all."""
        ...

    def put(self, key: str, data: bytes | Path, *, create_only: bool = False) -> None:
        """Write an object durably; with `create_only` an existing one raises [`ObjectExistsError`]."""
        ...

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Objects whose key begins with `prefix`, in key order."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""
        ...

    def exists(self, key: str) -> bool:
        """Whether there is an object of that key."""
        ...

    def ensure(self) -> None:
        """Create the bucket unless it exists."""
        ...

    def watch(self, prefix: str, on_change: Callable[[], None]) -> Callable[[], None] | None:
        """Call `on_change`, from another thread, when an object whose key begins with `prefix` may have changed.

        A hint that may come late, twice or never: whoever follows a bucket polls it all the same.

        Returns:
            `Callable`: ends the calls; `None` if this kind of store has no feed of changes.
        """
        ...

    def close(self) -> None:
        """Give back connections; the store is not used afterwards."""
        ...


def is_key(key: object) -> bool:
    """Whether a string can be the key of an object: relative, bounded, no `..`, no hidden component."""
    return (
        isinstance(key, str)
        and len(key) <= MAX_KEY_CHARS
        and _KEY.fullmatch(key) is not None
        and all(len(part) <= _COMPONENT_CHARS for part in key.split("/"))
    )


def check_key(key: str, url: str) -> str:
    """Return the key, or raise [`FormatError`] if it could leave the bucket or name a temporary file."""
    if not is_key(key):
        raise FormatError(
            f"{url}: {key!r:.200} is no object key; expected parts of letters, digits and ._+@=- joined by '/', none "
            f"beginning with a dot, at most {MAX_KEY_CHARS} characters"
        )
    return key


def require_whole(url: str, key: str, expected_bytes: int, found_bytes: int) -> None:
    """Refuse an answer of another length than its server announced."""
    if found_bytes != expected_bytes:
        raise StoreUnavailableError(
            f"{url}/{key}: expected {expected_bytes} bytes, read {found_bytes}; the answer was cut short"
        )


def too_large(url: str, key: str, size_bytes: int, max_bytes: int) -> FormatError:
    """The error of an object that is longer than its reader allows."""
    return FormatError(
        f"{url}/{key}: expected at most {max_bytes} bytes, found {size_bytes}; the object is not what was published"
    )


def no_object(url: str, key: str) -> ObjectNotFoundError:
    """The error of an object that is not there."""
    return ObjectNotFoundError(
        f"{url}/{key}: there is no such object; it was never written, or has been removed since it was named"
    )


def exists_already(url: str, key: str) -> ObjectExistsError:
    """The error of a create-only write that came second."""
    return ObjectExistsError(f"{url}/{key}: the object exists already; somebody else wrote it, or an earlier try did")
