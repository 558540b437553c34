# SPDX-License-Identifier: Apache-2.0
"""What a server says about itself; written by the driver thread, read by anyone."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import Any, Literal

from delta_wire.adapter import Adapter
from delta_wire.digest import Digest
from delta_wire.manifest import VersionId

logger = logging.getLogger("vllm.vllm_delta.status")
State = Literal["waiting", "serving", "degraded"]
_RECENT = 64
_REFUSED = 16
# upper bounds of the histogram of pauses
_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Status:
    """State, version and recent commits.

    Args:
        server_id (`str`): name of the server in the bucket.
        bucket (`str`): address of the bucket.
    """

    def __init__(self, server_id: str, bucket: str):
        self._lock = threading.Lock()
        self._server_id = server_id
        self._bucket = bucket
        self.state: State = "waiting"
        self.reason: str | None = "the live weights have not been checked yet"
        self.version: VersionId | None = None
        self.digest: Digest | None = None
        self.target: VersionId | None = None
        self._adapter: Adapter | None = None
        self._remark: str | None = None
        self.served_unix_s = time.time()
        # whether the newest version is served, or it is told why not
        self.looked = False
        self.needs_anchor: VersionId | None = None
        self._staged_seq: int | None = None
        self._num_ranks = 0
        self._commits = 0
        self._last_commit_ms: float | None = None
        self._scatter_ms: list[float] = []
        self._pauses_ms: deque[float] = deque(maxlen=_RECENT)
        self._refused: deque[dict[str, Any]] = deque(maxlen=_REFUSED)
        self._refused_total = 0
        self._staged_bytes = 0
        self._buckets = [0] * (len(_BUCKETS_S) + 1)
        self._pause_sum_s = 0.0

    def attached(self, digest: Digest, num_ranks: int) -> None:
        with self._lock:
            self.digest, self._num_ranks = digest, num_ranks

    def waiting(self, reason: str) -> None:
        self._enter("waiting", reason)

    def serving(self, version: VersionId, digest: Digest, remark: str | None = None) -> None:
        """The live weights are proven to be this version, and nothing is wrong; a remark says what was ignored."""
        with self._lock:
            self.version, self.digest, self._remark = version, digest, remark
        self._enter("serving", None)

    def degraded(self, about: str, reason: str, rank: int | None = None) -> None:
        """Something keeps the server from following; it stays on what it last proved. A rank, if one refused it."""
        with self._lock:
            entry = {"object": about, "reason": reason, "rank": rank}
            if entry not in self._refused:
                self._refused.append(entry)
                self._refused_total += 1
        self._enter("degraded", reason)

    def _enter(self, state: State, reason: str | None) -> None:
        with self._lock:
            before, self.state = (self.state, self.reason), state
            self.reason = reason
        # one line when it begins and one when it is over, however often it is tried in between
        if (state, reason) == before:
            return
        if state == "degraded":
            logger.warning("degraded, serving %s: %s", self.version or "the loaded checkpoint", reason)
        elif state == "waiting":
            logger.info("waiting: %s", reason)
        elif before[0] != "serving":
            logger.info("following %s as server %s, serving %s", self._bucket, self._server_id, self.version)

    def aims_at(self, target: VersionId | None) -> None:
        with self._lock:
            self.target = target

    def needs(self, version: VersionId | None) -> None:
        """Nothing leads to this version, and only an anchor after it will lead on; `None` when that is over."""
        with self._lock:
            self.needs_anchor = version

    def staged(self, seq: int, num_bytes: int) -> None:
        with self._lock:
            self._staged_seq = seq
            self._staged_bytes += num_bytes

    def committed(
        self, version: VersionId, digest: Digest, pause_ms: float, commit_ms: float, scatter_ms: list[float]
    ) -> None:
        """A commit is done: how long no step ran, the same with waiting for the step before, each rank's share."""
        self.moved(version, digest)
        with self._lock:
            self._commits += 1
            self._last_commit_ms = round(commit_ms, 3)
            self._scatter_ms = [round(value, 3) for value in scatter_ms]
            self._pauses_ms.append(round(pause_ms, 3))
            self._buckets[bisect_left(_BUCKETS_S, pause_ms / 1000)] += 1
            self._pause_sum_s += pause_ms / 1000

    def carries(self, adapter: Adapter) -> None:
        """Versions are those of an adapter, which is in its place."""
        with self._lock:
            self._adapter = adapter

    def moved(self, version: VersionId | None, digest: Digest) -> None:
        """The live weights are another version than before."""
        with self._lock:
            self.version, self.digest = version, digest
            self.served_unix_s = time.time()

    @property
    def pause_ms(self) -> float | None:
        """How long the last commit held generation up."""
        with self._lock:
            return self._pauses_ms[-1] if self._pauses_ms else None

    def to_json(self) -> dict[str, Any]:
        """The answer of `GET /delta/status`."""
        with self._lock:
            version, target = self.version, self.target
            lag = None
            if version is not None and target is not None and version.run == target.run:
                lag = max(0, target.seq - version.seq)
            return {
                "state": self.state,
                "reason": self._remark if self.state == "serving" else self.reason,
                "looked": self.looked,
                "server": self._server_id,
                "bucket": self._bucket,
                "version": None if version is None else str(version),
                "seq": None if version is None else version.seq,
                "digest": None if self.digest is None else str(self.digest),
                "adapter": None if self._adapter is None else self._adapter.to_json(),
                "target_seq": None if target is None else target.seq,
                "lag_versions": lag,
                "needs_anchor": None if self.needs_anchor is None else str(self.needs_anchor),
                "staged_seq": self._staged_seq,
                "commits": self._commits,
                "last_commit_ms": self._last_commit_ms,
                "pauses_ms": list(self._pauses_ms),
                "refused": list(self._refused),
                "refused_total": self._refused_total,
                "staged_bytes": self._staged_bytes,
                # as Prometheus wants it: bounds in seconds, each with the number of pauses up to it
                "pause_buckets": [
                    [bound, count]
                    for bound, count in zip([*map(str, _BUCKETS_S), "+Inf"], accumulate(self._buckets), strict=True)
                ],
                "pause_sum_s": self._pause_sum_s,
                "ranks": [
                    {
                        "rank": rank,
                        "scatter_ms": self._scatter_ms[rank] if self._scatter_ms else None,
                        "refused": [entry for entry in self._refused if entry["rank"] == rank],
                    }
                    for rank in range(self._num_ranks)
                ],
            }
