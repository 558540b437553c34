# SPDX-License-Identifier: Apache-2.0
"""Small objects that were read lately, with what tells whether they have changed since."""

from __future__ import annotations

import threading
from collections import OrderedDict

MAX_RECENT_BYTES = 64 << 10
_MAX_RECENT = 256


class Recent:
    """Bounded memory of (tag, content) by key; a poll that finds the same tag need not fetch the content again."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: str) -> tuple[str, bytes] | None:
        """Tag and content of an object as it was read last."""
        with self._lock:
            return self._known.get(key)

    def keep(self, key: str, tag: str | None, data: bytes) -> None:
        """Remember an object if it is small and has a tag."""
        with self._lock:
            self._known.pop(key, None)
            if tag and len(data) <= MAX_RECENT_BYTES:
                self._known[key] = (tag, data)
                if len(self._known) > _MAX_RECENT:
                    self._known.popitem(last=False)
