# SPDX-License-Identifier: Apache-2.0
"""A bucket in memory whose writes fail or wait on command."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from delta_wire.stores.memory import MemoryStore


class FaultyStore(MemoryStore):
    """`fault(key)` is called before each write and may raise or wait; `puts` lists the keys written.

    `num_tries` counts the writes that were tried, with or without success.
    """

    def __init__(self) -> None:
        super().__init__(f"faulty-{secrets.token_hex(4)}")
        self.fault: Callable[[str], None] | None = None
        self.puts: list[str] = []
        self.num_tries = 0
        self.ensure()

    def put(self, key: str, data: bytes | Path, *, create_only: bool = False) -> None:
        self.num_tries += 1
        if self.fault is not None:
            self.fault(key)
        super().put(key, data, create_only=create_only)
        self.puts.append(key)


class Gate:
    """A fault that holds every write until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, key: str) -> None:
        self.reached.set()
        assert self._open.wait(30), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()
