# SPDX-License-Identifier: Apache-2.0
"""A bucket inside one process, for tests and for trainer and server in one program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from delta_wire.errors import BucketNotFoundError
from delta_wire.files import staging, write_file
from delta_wire.stores.base import ObjectInfo, check_key, exists_already, no_object, too_large

_BUCKETS: dict[str, dict[str, bytes]] = {}
_LOCK = threading.Lock()


class MemoryStore:
    """Bucket `memory:NAME`; every store of that name in the process sees the same objects.

    Args:
        name (`str`): letters, digits, `._-`.
    """

    create_only = True
    least_listing_s = 0.0

    def __init__(self, name: str):
        self.name = name
        self.url = f"memory:{name}"

    def _objects(self) -> dict[str, bytes]:
        objects = _BUCKETS.get(self.name)
        if objects is None:
            raise BucketNotFoundError(
                f"{self.url}: there is no bucket of that name in this process; a trainer creates it when it starts"
            )
        return objects

    def ensure(self) -> None:
        with _LOCK:
            _BUCKETS.setdefault(self.name, {})

    def drop(self) -> None:
        """Remove the bucket with everything in it."""
        with _LOCK:
            _BUCKETS.pop(self.name, None)

    def get(self, key: str, max_bytes: int) -> bytes:
        check_key(key, self.url)
        with _LOCK:
            data = self._objects().get(key)
        if data is None:
            raise no_object(self.url, key)
        if len(data) > max_bytes:
            raise too_large(self.url, key, len(data), max_bytes)
        return data

    def get_file(self, key: str, path: Path, max_bytes: int) -> None:
        data = self.get(key, max_bytes)
        with staging(path):
            write_file(path, data)

    def put(self, key: str, data: bytes | Path, *, create_only: bool = False) -> None:
        check_key(key, self.url)
        held = data.read_bytes() if isinstance(data, Path) else bytes(data)
        with _LOCK:
            objects = self._objects()
            if create_only and key in objects:
                raise exists_already(self.url, key)
            objects[key] = held

    def list(self, prefix: str) -> list[ObjectInfo]:
        with _LOCK:
            found = [ObjectInfo(key, len(data)) for key, data in self._objects().items() if key.startswith(prefix)]
        return sorted(found, key=lambda info: info.key)

    def delete(self, keys: Iterable[str]) -> None:
        checked = [check_key(key, self.url) for key in keys]
        with _LOCK:
            objects = self._objects()
            for key in checked:
                objects.pop(key, None)

    def exists(self, key: str) -> bool:
        check_key(key, self.url)
        with _LOCK:
            return key in self._objects()

    def watch(self, prefix: str, on_change: Callable[[], None]) -> Callable[[], None] | None:
        """There is no feed of changes."""
        return None

    def close(self) -> None:
        """Nothing to give back; the objects stay for the other stores of that name."""
