# SPDX-License-Identifier: Apache-2.0
"""`vllm_delta:*` on vLLM's own `/metrics`, made from the status of the engine core at the time of the scrape.

Appended to what vLLM answers, and not registered with its registry: with several API server processes each would
count everything once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric


class _Collector:
    def __init__(self, status: dict[str, Any]):
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status
        yield CounterMetricFamily("vllm_delta:commits", "Commits of new weights.", status["commits"])
        yield CounterMetricFamily(
            "vllm_delta:refused", "Objects and versions that were refused.", status["refused_total"]
        )
        yield CounterMetricFamily(
            "vllm_delta:staged_bytes", "Bytes that were staged for the ranks.", status["staged_bytes"]
        )
        state = GaugeMetricFamily("vllm_delta:state", "1 for the state that the server is in.", labels=["state"])
        for name in ("waiting", "serving", "degraded"):
            state.add_metric([name], float(status["state"] == name))
        yield state
        for name, text, key in (
            ("served_seq", "Sequence number of the served version.", "seq"),
            ("target_seq", "Sequence number of the newest version.", "target_seq"),
            ("lag_versions", "Versions between the two.", "lag_versions"),
        ):
            # nothing to say before there is a version
            if status[key] is not None:
                yield GaugeMetricFamily(f"vllm_delta:{name}", text, status[key])
        pauses = HistogramMetricFamily("vllm_delta:commit_seconds", "How long a commit kept steps from running.")
        pauses.add_metric([], [(bound, count) for bound, count in status["pause_buckets"]], status["pause_sum_s"])
        yield pauses


def exposition(status: dict[str, Any]) -> bytes:
    """Prometheus text of a status."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))  # type: ignore[arg-type]
    return generate_latest(registry)


class MetricsMiddleware:
    """Appends ours to the answer of `GET /metrics`."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        if scope["type"] != "http" or not scope["path"].rstrip("/").endswith("/metrics") or client is None:
            await self._app(scope, receive, send)
            return
        # plain text, which can be appended to; every scraper reads it
        headers = [(k, v) for k, v in scope["headers"] if k.lower() not in (b"accept", b"accept-encoding")]
        start: dict[str, Any] = {}
        chunks: list[bytes] = []

        async def keep(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                chunks.append(message.get("body", b""))

        await self._app({**scope, "headers": headers}, receive, keep)
        if start["status"] == 200:
            chunks.append(exposition(await client.engine_core.call_utility_async("delta_status")))
        raw = b"".join(chunks)
        kept = [(k, v) for k, v in start.get("headers", ()) if k.lower() != b"content-length"]
        await send({**start, "headers": [*kept, (b"content-length", str(len(raw)).encode())]})
        await send({"type": "http.response.body", "body": raw})
