# SPDX-License-Identifier: Apache-2.0
"""What a report says, as plain values: from the bucket, from the trainer's log, from records of the fleet."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from delta_wire.bucket import BucketReader
from delta_wire.describe import summary
from delta_wire.entropy import floor_bytes
from delta_wire.errors import DeltaError, FormatError, ObjectNotFoundError, SetupError
from delta_wire.fleet import from_bucket, now_unix_s
from delta_wire.manifest import Manifest
from delta_wire.replay import State, materialise
from delta_wire.state import Delta, TensorTable, num_changed

# the first that matches the name of a tensor
GROUPS = (
    ("norms", re.compile(r"norm|layernorm|ln_")),
    ("embeddings", re.compile(r"embed|wte|wpe")),
    ("output head", re.compile(r"lm_head|output\.weight")),
    ("experts", re.compile(r"experts?\.")),
    ("attention", re.compile(r"attn|attention|[qkvo]_proj|qkv")),
    ("MLP", re.compile(r"mlp|ffn|feed_forward|gate|up_proj|down_proj|fc")),
    ("others", re.compile(r"")),
)
# the names in a trainer's log, and what a report calls them
LOGGED = {
    "reward": "reward",
    "delta/publish_s": "publish_s",
    "delta/extract_s": "extract_s",
    "delta/lag_versions": "lag_versions",
}


def group_of(name: str) -> str:
    """Which part of a model a tensor belongs to, by its name."""
    return next(group for group, pattern in GROUPS if pattern.search(name))


def collect(
    reader: BucketReader,
    latest: Manifest,
    *,
    limit: int,
    base: Path | None = None,
    logs: Path | None = None,
    fleet: Path | None = None,
    each: Callable[[int], None] = lambda total: None,
) -> dict[str, Any]:
    """Everything a page shows.

    Args:
        reader ([`~delta_wire.bucket.BucketReader`]): the run.
        latest ([`~delta_wire.manifest.Manifest`]): its newest version.
        limit (`int`): newest versions to look at.
        base (`Path`, *optional*): a copy of the restart point's checkpoint.
        logs, fleet (`Path`, *optional*): see [`read_log`] and [`read_fleet`].
        each (`Callable`, *optional*): called after each version with the number of them.
    """
    manifests = list(_newest(reader, latest, limit))[::-1]
    table = reader.table(latest)
    sizes: dict[str, int] = {}
    for name, spec in table.items():
        sizes[group_of(name)] = sizes.get(group_of(name), 0) + spec.num_elements
    versions = []
    for manifest, delta in _deltas(reader, manifests, base):
        version = summary(reader, manifest)
        if delta is not None:
            version["floor_bytes"] = floor_bytes(delta, table)
            version["groups"] = _shares(delta, table, sizes)
        versions.append(version)
        each(len(manifests))
    return {
        "bucket": reader.store.url,
        "run": latest.version.run,
        "made_unix_s": now_unix_s(),
        "model": {"tensors": len(table), "num_params": table.num_params, "full_bytes": table.full_bytes},
        "groups": {group: sizes[group] for group, _ in GROUPS if group in sizes},
        "versions": versions,
        "fleet": read_fleet(fleet) if fleet else [_fleet_now(reader)],
        "log": read_log(logs) if logs else [],
    }


def read_log(path: Path) -> list[dict[str, float]]:
    """Rows of a trainer's log with a `step` and whatever of [`LOGGED`] they have.

    Args:
        path (`Path`): `trainer_state.json` of a trainer's checkpoint, or JSON lines with the same rows.
    """
    text = _read(path)
    try:
        whole = json.loads(text)
        rows = whole["log_history"] if isinstance(whole, dict) and "log_history" in whole else [whole]
    except json.JSONDecodeError:
        rows = list(_lines(path, text))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise FormatError(f"{path}: expected trainer_state.json, or JSON lines that each have a step")
    found = []
    for row in rows:
        values = {short: row[name] for name, short in LOGGED.items() if isinstance(row.get(name), int | float)}
        if isinstance(row.get("step"), int) and values:
            found.append({"step": row["step"], **values})
    if not found:
        raise FormatError(f"{path}: no row has a step and one of {', '.join(LOGGED)}; is it a trainer's log?")
    return found


def read_fleet(path: Path) -> list[dict[str, Any]]:
    """Records that `delta-wire watch --json` has written, oldest first."""
    records = list(_lines(path, _read(path)))
    for record in records:
        if not isinstance(record.get("unix_s"), int | float) or not isinstance(record.get("servers"), list):
            raise FormatError(f"{path}: expected the lines of `delta-wire watch --json`, found {record!r:.120}")
    return sorted(records, key=lambda record: record["unix_s"])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SetupError(f"{path}: cannot read: {error.strerror}; name another file") from error


def _lines(path: Path, text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise FormatError(f"{path}:{number}: expected a JSON object, found {line[:80]!r} ({error})") from None
        if not isinstance(value, dict):
            raise FormatError(f"{path}:{number}: expected a JSON object, found {line[:80]!r}")
        yield value


def _fleet_now(reader: BucketReader) -> dict[str, Any]:
    return {"unix_s": now_unix_s(), "servers": [replica.to_json() for replica in from_bucket(reader)]}


def _newest(reader: BucketReader, latest: Manifest, limit: int) -> Iterator[Manifest]:
    """Versions with a delta, from the newest back; those that retention has removed are not missed."""
    walk = takewhile(lambda manifest: manifest.delta is not None, reader.walk(latest))
    try:
        yield from islice(walk, min(limit, sys.maxsize))
    except ObjectNotFoundError:
        return


def _deltas(
    reader: BucketReader, manifests: list[Manifest], base: Path | None
) -> Iterator[tuple[Manifest, Delta | None]]:
    """Each version with its delta, which has old bits or steps where these can be had."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="delta-wire-")))
        state = _state_before(reader, manifests, base, stack)
        for manifest in manifests:
            if state is not None:
                yield manifest, state.apply(manifest)
            elif reader.needs_old_weights(manifest):
                yield manifest, None
            else:
                yield manifest, reader.fetch_delta(manifest, folder)


def _state_before(
    reader: BucketReader, manifests: list[Manifest], base: Path | None, stack: ExitStack
) -> State | None:
    """The weights before the first version, if they are needed and the run's checkpoint is at hand."""
    # steps of the packed encoding are read without them
    if not manifests or all(manifest.delta and manifest.delta.encoding == "packed" for manifest in manifests):
        return None
    parent = manifests[0].parent
    if parent is None:
        return None
    try:
        before = reader.manifest(parent.seq, parent.manifest_sha256)
        return stack.enter_context(materialise(reader, before, base))
    except DeltaError:
        return None


def _shares(delta: Delta, table: TensorTable, sizes: dict[str, int]) -> dict[str, float]:
    """Changed share of every group."""
    changed: dict[str, int] = dict.fromkeys(sizes, 0)
    for name, part in delta.items():
        changed[group_of(name)] += num_changed({name: part})
    return {group: count / sizes[group] for group, count in changed.items() if sizes[group]}
