# SPDX-License-Identifier: Apache-2.0
"""What the servers of a run serve: from their acknowledgements in the bucket, or from their own status."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any

from delta_wire.acks import read_acks
from delta_wire.bucket import BucketReader
from delta_wire.errors import ObjectNotFoundError

# what becomes of versions after an object that is gone for good
LOST = (
    "servers that miss it stay on the version before and ask for an anchor, which a trainer that goes on uploads "
    "within minutes; if training has ended, resume it from its own last checkpoint"
)
_ANSWER_TIMEOUT_S = 5.0
_MAX_STATUS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Replica:
    """One server at one moment.

    Args:
        server (`str`): its id, or its address if it does not answer.
        state (`str`): `"serving"`, `"degraded"`, `"waiting"` or `"unreachable"`.
        version (`str`, *optional*), seq (`int`, *optional*): what it serves.
        lag_versions (`int`, *optional*): how far that is behind the newest version it could know; `None` if it cannot
            be compared.
        latency_s (`float`, *optional*): from the publication of its version to its serving it; two machines' clocks.
        pause_ms (`float`, *optional*): how long its last commit held generation up.
        served_unix_s (`float`, *optional*): since when it serves its version.
        reason (`str`, *optional*): why it is not serving the newest.
        needs_anchor (`str`, *optional*): newest version that nothing leads to from its own but a later anchor.
    """

    server: str
    state: str
    version: str | None = None
    seq: int | None = None
    lag_versions: int | None = None
    latency_s: float | None = None
    pause_ms: float | None = None
    served_unix_s: float | None = None
    reason: str | None = None
    needs_anchor: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_bucket(reader: BucketReader) -> list[Replica]:
    """Every server that has acknowledged anything, by its last word."""
    latest = reader.latest()
    found = []
    for ack in read_acks(reader.store):
        lag = latency_s = None
        if latest is not None and ack.version is not None and ack.version.run == latest.version.run:
            lag = max(0, latest.version.seq - ack.version.seq)
            try:
                # most servers are on the newest version, which is at hand
                served = latest if ack.version == latest.version else reader.manifest(ack.version.seq)
                latency_s = max(0.0, round(ack.served_unix_s - served.created_unix_s, 3))
            except ObjectNotFoundError:
                # removed by retention
                latency_s = None
        version = ack.version
        found.append(
            Replica(
                server=ack.server,
                state=ack.state,
                version=version and str(version),
                seq=version and version.seq,
                lag_versions=lag,
                latency_s=latency_s,
                pause_ms=ack.pause_ms,
                served_unix_s=ack.served_unix_s,
                reason=ack.reason,
                needs_anchor=ack.needs_anchor and str(ack.needs_anchor),
            )
        )
    return found


def from_server(url: str) -> Replica:
    """A server by its own `GET /delta/status`; `"unreachable"` with the reason if there is no such answer."""
    address = url.rstrip("/") + "/delta/status"
    try:
        with urllib.request.urlopen(address, timeout=_ANSWER_TIMEOUT_S) as answer:
            status = json.loads(answer.read(_MAX_STATUS_BYTES))
        if not isinstance(status, dict) or "state" not in status:
            raise ValueError("it is no status of this project")
    except urllib.error.HTTPError as error:
        what = "not started with --worker-extension-cls vllm_delta.DeltaWorkerExtension" if error.code == 404 else ""
        return Replica(url, "unreachable", reason=f"{address} answers {error.code}; {what or error.reason}")
    except (OSError, ValueError) as error:
        return Replica(url, "unreachable", reason=f"{address}: {getattr(error, 'reason', None) or error}")
    pauses = status.get("pauses_ms") or [None]
    return Replica(
        server=str(status.get("server", url)),
        state=str(status["state"]),
        version=status.get("version"),
        seq=status.get("seq"),
        lag_versions=status.get("lag_versions"),
        pause_ms=pauses[-1],
        reason=status.get("reason"),
        needs_anchor=status.get("needs_anchor"),
    )


def healthy(replica: Replica, max_lag_versions: int) -> bool:
    """Whether a server serves a version that is known and not too old."""
    return replica.state == "serving" and replica.lag_versions is not None and replica.lag_versions <= max_lag_versions


def now_unix_s() -> float:
    """The time that records of a fleet carry."""
    return round(time.time(), 3)
