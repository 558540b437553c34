# SPDX-License-Identifier: Apache-2.0
"""What the command line says about runs and versions, as plain values."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from delta_wire.acks import read_acks
from delta_wire.bucket import BucketReader
from delta_wire.manifest import AnchorPart, Manifest
from delta_wire.replay import materialise


def summary(reader: BucketReader, manifest: Manifest) -> dict[str, Any]:
    """One version: what changed, how large it is, how old."""
    table = reader.table(manifest)
    parent = manifest.parent
    return {
        "version": str(manifest.version),
        "seq": manifest.version.seq,
        "step": manifest.step,
        "digest": str(manifest.digest),
        "parent": parent and f"{manifest.version.run}-{parent.epoch}-{parent.seq}",
        "created_unix_s": manifest.created_unix_s,
        # clocks of two machines differ
        "age_s": max(0.0, round(time.time() - manifest.created_unix_s, 3)),
        "num_params": manifest.num_params,
        "changed_params": manifest.changed_params,
        "changed_frac": manifest.changed_params / manifest.num_params if manifest.num_params else 0.0,
        "encoding": manifest.delta and manifest.delta.encoding,
        "delta_bytes": manifest.delta and manifest.delta.size_bytes,
        "full_bytes": table.full_bytes,
        "anchor": manifest.anchor and _describe_anchor(manifest.anchor),
    }


def describe_run(reader: BucketReader, latest: Manifest) -> dict[str, Any]:
    """The run of a bucket: its model, where it can be restarted, its newest version, its servers."""
    table = reader.table(latest)
    return {
        "bucket": reader.store.url,
        "run": latest.version.run,
        "model": {
            "tensors": len(table),
            "num_params": table.num_params,
            "full_bytes": table.full_bytes,
            "table_sha256": table.sha256,
        },
        "restart_point": summary(reader, reader.restart_point(latest)),
        "latest": summary(reader, latest),
        "servers": [
            {
                "server": ack.server,
                "state": ack.state,
                "version": ack.version and str(ack.version),
                "digest": ack.digest and str(ack.digest),
                "reason": ack.reason,
                "pause_ms": ack.pause_ms,
                "served_unix_s": ack.served_unix_s,
            }
            for ack in read_acks(reader.store)
        ],
    }


def describe_tensors(reader: BucketReader, manifest: Manifest) -> list[dict[str, Any]]:
    """Per tensor how many elements the delta of a version lists, largest share of the delta first."""
    if manifest.delta is None:
        return []
    table = reader.table(manifest)
    with tempfile.TemporaryDirectory(prefix="delta-wire-") as folder:
        if reader.needs_old_weights(manifest) and manifest.parent is not None:
            parent = reader.manifest(manifest.parent.seq, manifest.parent.manifest_sha256)
            with materialise(reader, parent) as state:
                delta = reader.fetch_delta(manifest, Path(folder), state.bits)
        else:
            delta = reader.fetch_delta(manifest, Path(folder))
    listed = [
        {"name": name, "elements": table[name].num_elements, "listed": part.num_changed}
        for name, part in delta.items()
    ]
    return sorted(listed, key=lambda entry: (-entry["listed"], entry["name"]))


def format_bytes(size_bytes: int | None) -> str:
    """For people, with three digits."""
    if size_bytes is None:
        return "-"
    if size_bytes < 1000:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.3g} TB"


def format_age(age_s: float) -> str:
    """For people, in the largest unit that fits."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= unit_s:
            return f"{age_s / unit_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def _describe_anchor(anchor: AnchorPart) -> str:
    return anchor.reference or f"uploaded, {len(anchor.objects)} files"
