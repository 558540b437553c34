# SPDX-License-Identifier: Apache-2.0
"""vLLM's `GET /health`, not before the server has gone to the newest version.

Whoever sends requests to it only then gets none from the weights it was started on.
"""

from __future__ import annotations

import json
from typing import Any


class HealthMiddleware:
    """Answers 503 until the first look at the bucket is over, whatever came out of it; from then on vLLM answers."""

    def __init__(self, app: Any):
        self._app = app
        self._looked = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        asked = scope["type"] == "http" and scope["path"].rstrip("/").endswith("/health")
        # what a dead engine answers is vLLM's business
        if asked and not self._looked and client is not None and not client.errored:
            status = await client.engine_core.call_utility_async("delta_status")
            self._looked = status["looked"]
            if not self._looked:
                raw = json.dumps({"error": f"following {status['bucket']} has not begun yet"}).encode()
                headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
                await send({"type": "http.response.start", "status": 503, "headers": headers})
                await send({"type": "http.response.body", "body": raw})
                return
        await self._app(scope, receive, send)
