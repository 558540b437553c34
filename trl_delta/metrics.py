# SPDX-License-Identifier: Apache-2.0
"""What a trainer logs of the versions that it has published."""

from __future__ import annotations

from delta_wire.state import TensorTable
from trl_delta.acks import AckWatcher
from trl_delta.publisher import Publisher


def version_metrics(publisher: Publisher, watcher: AckWatcher, table: TensorTable) -> dict[str, float]:
    """Of the newest durable version, and of how far the servers are behind it."""
    metrics: dict[str, float] = {"delta/version": publisher.durable_seq}
    if publisher.records:
        record = publisher.records[-1]
        metrics["delta/bytes"] = record.delta_bytes
        metrics["delta/ratio"] = record.delta_bytes / table.full_bytes
        metrics["delta/changed_frac"] = record.num_changed / table.num_params
        metrics["delta/publish_s"] = record.publish_s
    served = watcher.seq
    if served is not None:
        metrics["delta/served_version"] = served
        metrics["delta/lag_versions"] = max(0, publisher.durable_seq - served)
    return metrics
