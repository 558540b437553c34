# SPDX-License-Identifier: Apache-2.0
"""The hub's feed of changes to a bucket, as a hint when to look."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)
# the hub pings twice a minute
_SILENCE_S = 90.0
_CONNECT_S = 10.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# not served here, or not to this token: asking again would change nothing
_HOPELESS = (400, 401, 403, 404, 501)
_MAX_LINE_CHARS = 1 << 20


class Feed(threading.Thread):
    """A thread that calls back when a path has changed, and when it may have missed something.

    Args:
        bucket (`str`): `namespace/name`.
        prefix (`str`): of the paths that matter.
        on_change (`Callable`): called from this thread.
    """

    def __init__(self, bucket: str, prefix: str, on_change: Callable[[], None]):
        super().__init__(name="delta-hub-feed", daemon=True)
        self._bucket = bucket
        self._prefix = prefix
        self._on_change = on_change
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Call back no more; the thread ends at the next sign of life from the hub."""
        self._stopped.set()

    def run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopped.is_set():
            try:
                status = self._follow()
            except Exception as error:
                # whatever it is, the poll goes on without the feed
                logger.debug("hf://buckets/%s: the feed of changes broke off: %s", self._bucket, type(error).__name__)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                if status in _HOPELESS:
                    logger.debug("hf://buckets/%s: no feed of changes, the hub answered %d", self._bucket, status)
                    return
                pause_s = _FIRST_PAUSE_S
            self._stopped.wait(pause_s)

    def _follow(self) -> int:
        """Read the feed until it ends; returns the status of the answer."""
        import httpx2
        from huggingface_hub import HfApi
        from huggingface_hub.utils import build_hf_headers, get_session

        with get_session().stream(
            "GET",
            f"{HfApi().endpoint}/api/buckets/{self._bucket}/events",
            headers={**build_hf_headers(), "Accept": "text/event-stream"},
            timeout=httpx2.Timeout(_CONNECT_S, read=_SILENCE_S),
        ) as response:
            if response.status_code == 200:
                for line in response.iter_lines():
                    if self._stopped.is_set():
                        break
                    if self._matters(line):
                        self._on_change()
            return response.status_code

    def _matters(self, line: str) -> bool:
        if line.startswith("event:"):
            # after a break there may be more to see than is told
            return line.removeprefix("event:").strip() in ("ready", "reset")
        if not line.startswith("data:") or len(line) > _MAX_LINE_CHARS:
            return False
        try:
            changes = json.loads(line.removeprefix("data:")).get("changes", [])
            return any(str(change["path"]).startswith(self._prefix) for change in changes)
        except (ValueError, AttributeError, TypeError, KeyError):
            return False
