# SPDX-License-Identifier: Apache-2.0
"""What can go wrong inside one process: a store that fails on command, and death at a chosen line."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from delta_wire.errors import ObjectNotFoundError, StoreUnavailableError
from delta_wire.stores import ObjectInfo, Store

# modules that carry the protocol: a kill may strike at any of their lines
_PROTOCOL = ("delta_wire/", "trl_delta/publisher.py", "trl_delta/retention.py", "vllm_delta/")
_NOT_PROTOCOL = ("delta_wire/kernels/", "delta_wire/encodings/", "delta_wire/strict.py", "delta_wire/state.py")
_HANG_S = 0.3


class Killer:
    """Ends this process by SIGKILL after a number of lines of the protocol's modules, in whatever thread they run."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._watched: dict[str, bool] = {}

    def install(self) -> None:
        """Watch this thread and those that are started later."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def arm(self, lines: int) -> None:
        self._left = lines

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        watched = self._watched.get(name)
        if watched is None:
            path = name.replace("triton_kernels/", "delta_wire/kernels/")
            watched = any(part in path for part in _PROTOCOL) and not any(part in path for part in _NOT_PROTOCOL)
            self._watched[name] = watched
        return self._line if watched else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line" and self._left is not None:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line


class ChaosStore:
    """A store whose next calls fail in a chosen way; everything else is the real one's.

    Args:
        inner ([`~delta_wire.stores.Store`]): the real store.
        seed (`int`): of what is damaged how.
        on_put (callable, *optional*): told key and bytes of every small object before it is written.
    """

    def __init__(self, inner: Store, seed: int, on_put: Callable[[str, bytes], None] | None = None):
        self.inner = inner
        self.url = inner.url
        self.create_only = inner.create_only
        self._random = random.Random(seed)
        self._on_put = on_put
        self._plan: list[str] = []
        self._old: dict[str, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        # capabilities that a store may have beyond the least
        return getattr(self.inner, name)

    def arm(self, kind: str, count: int) -> None:
        """Let the next `count` calls that the kind fits fail."""
        self._plan += [kind] * count

    def _next(self, *kinds: str) -> str | None:
        if self._plan and self._plan[0] in kinds:
            return self._plan.pop(0)
        return None

    def _before(self) -> str | None:
        kind = self._next("refuse", "hang", "lose")
        if kind == "hang":
            time.sleep(_HANG_S)
        if kind in ("refuse", "hang"):
            raise StoreUnavailableError(f"{self.url}: injected: {kind}")
        return kind

    def _after(self, kind: str | None) -> None:
        if kind == "lose":
            raise StoreUnavailableError(f"{self.url}: injected: the answer was lost")

    def get(self, key: str, max_bytes: int) -> bytes:
        kind = self._before()
        data = self.inner.get(key, max_bytes)
        self._after(kind)
        return self._damage(key, data)

    def get_file(self, key: str, path: Path, max_bytes: int) -> None:
        kind = self._before()
        self.inner.get_file(key, path, max_bytes)
        self._after(kind)
        data = path.read_bytes()
        damaged = self._damage(key, data)
        if damaged != data:
            path.write_bytes(damaged)

    def _damage(self, key: str, data: bytes) -> bytes:
        kind = self._next("truncate", "flip", "swap", "stale", "missing")
        before = self._old.get(key, data)
        if len(self._old) < 10_000:
            self._old[key] = data
        if kind == "missing":
            raise ObjectNotFoundError(f"{self.url}/{key}: injected: there is no such object")
        if kind == "truncate":
            return data[: self._random.randrange(len(data) + 1)]
        if kind == "flip" and data:
            at = self._random.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]
        if kind == "swap":
            return self._old[self._random.choice(sorted(self._old))]
        if kind == "stale":
            return before
        return data

    def put(self, key: str, data: bytes | Path, *, create_only: bool = False) -> None:
        if self._on_put is not None and isinstance(data, bytes):
            self._on_put(key, data)
        kind = self._before()
        self.inner.put(key, data, create_only=create_only)
        self._after(kind)

    def list(self, prefix: str) -> list[ObjectInfo]:
        kind = self._before()
        found = self.inner.list(prefix)
        self._after(kind)
        return found

    def delete(self, keys: Iterable[str]) -> None:
        kind = self._before()
        self.inner.delete(keys)
        self._after(kind)

    def exists(self, key: str) -> bool:
        kind = self._before()
        found = self.inner.exists(key)
        self._after(kind)
        return found

    def ensure(self) -> None:
        self.inner.ensure()

    def close(self) -> None:
        self.inner.close()
