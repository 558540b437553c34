# SPDX-License-Identifier: Apache-2.0
"""What the command line says about runs and versions, as plain values."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from delta_wire import encodings
from delta_wire.acks import read_acks
from delta_wire.bucket import BucketReader
from delta_wire.encodings import Encoding
from delta_wire.entropy import histogram, on_line, steps_of
from delta_wire.errors import DeltaError
from delta_wire.manifest import AnchorPart, Manifest
from delta_wire.replay import materialise
from delta_wire.state import Delta, OldBits, TensorDelta, TensorTable

logger = logging.getLogger(__name__)


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
        "adapter": latest.adapter and latest.adapter.to_json(),
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


def read_delta(
    reader: BucketReader, manifest: Manifest, folder: Path, base: Path | None = None
) -> tuple[Delta, OldBits | None]:
    """The delta of a version with what is needed to know its steps, and the old weights if they had to be rebuilt.

    Args:
        reader ([`~delta_wire.bucket.BucketReader`]): the run.
        manifest ([`~delta_wire.manifest.Manifest`]): a version with a delta.
        folder (`Path`): for downloads.
        base (`Path`, *optional*): a copy of the restart point's checkpoint.

    Parts have old bits or steps, unless the encoding carries neither and the run's checkpoint is not at hand.
    """
    parent = manifest.parent and reader.manifest(manifest.parent.seq, manifest.parent.manifest_sha256)
    if reader.needs_old_weights(manifest):
        assert parent is not None
        return _with_old_weights(reader, manifest, parent, base)
    delta = reader.fetch_delta(manifest, folder)
    if parent is None or all(steps_of(part) is not None for part in delta.values()):
        return delta, None
    try:
        return _with_old_weights(reader, manifest, parent, base)
    except DeltaError as error:
        logger.warning("sizes of steps are not known: %s", error)
        return delta, None


def _with_old_weights(
    reader: BucketReader, manifest: Manifest, parent: Manifest, base: Path | None
) -> tuple[Delta, OldBits]:
    with materialise(reader, parent, base) as state:
        # a copy of the few elements that change; the rest is mapped from the checkpoint
        delta = state.apply(manifest)
        for part in delta.values():
            assert part.old is not None
            state.bits(part.name).reshape(-1)[part.indices] = part.old
        return delta, state.bits


def describe_tensors(
    reader: BucketReader,
    manifest: Manifest,
    base: Path | None = None,
    each: Callable[[int], None] = lambda total: None,
) -> list[dict[str, Any]]:
    """Per tensor what the delta of a version lists, largest part of the delta first.

    Args:
        reader ([`~delta_wire.bucket.BucketReader`]): the run.
        manifest ([`~delta_wire.manifest.Manifest`]): the version.
        base (`Path`, *optional*): a copy of the restart point's checkpoint.
        each (`Callable`, *optional*): called after each tensor with the number of them.

    Returns:
        `list[dict]`: `name`, `elements`, `listed`, `form` (`"steps"`, `"values"` or `"whole"`), `bits_per_change` (of
        the tensor coded alone, without the file's header) and `steps` (a histogram, `None` where not known).
    """
    if manifest.delta is None:
        return []
    table = reader.table(manifest)
    encoding = encodings.get(manifest.delta.encoding)
    entries = []
    with tempfile.TemporaryDirectory(prefix="delta-wire-") as folder:
        delta, old_bits = read_delta(reader, manifest, Path(folder), base)
        for name, part in delta.items():
            steps = steps_of(part)
            coded_bytes = _coded_bytes(encoding, part, steps, table, Path(folder) / "alone.safetensors", old_bits)
            entries.append(
                {
                    "name": name,
                    "elements": table[name].num_elements,
                    "listed": part.num_changed,
                    "form": _form(encoding.name, part, table),
                    "bits_per_change": coded_bytes and 8 * coded_bytes / max(1, part.num_changed),
                    "steps": None if steps is None else histogram(steps),
                }
            )
            each(len(delta))
    return sorted(entries, key=lambda entry: (-entry["listed"], entry["name"]))


def _form(encoding: str, part: TensorDelta, table: TensorTable) -> str:
    if part.num_changed == table[part.name].num_elements:
        return "whole"
    return "values" if encoding == "plain" or (part.relative is not None and not part.relative.any()) else "steps"


def _coded_bytes(
    encoding: Encoding,
    part: TensorDelta,
    steps: np.ndarray | None,
    table: TensorTable,
    path: Path,
    old_bits: OldBits | None,
) -> int | None:
    """Bytes of a tensor in a file of its own, less the header; `None` where its old bits would be needed."""
    if part.old is None and encoding.name != "plain":
        if steps is None:
            return None
        # only the difference of both is coded
        old = np.zeros_like(part.new)
        part = TensorDelta(part.name, part.indices, on_line(steps.view(np.uint16)), old)
    # with all old bits at hand a sparse tensor might be coded whole, as its publisher did not
    whole = _form(encoding.name, part, table) == "whole"
    encoding.encode({part.name: part}, table, path, 0, old_bits if whole or encoding.needs_old_weights else None)
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header_bytes


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
