# SPDX-License-Identifier: Apache-2.0
"""What trackers have stored of a run, read from their own files."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# where and how each keeps a run on this machine, without a service
ENVIRONMENT = {
    "tensorboard": {"TENSORBOARD_LOGGING_DIR": "{folder}"},
    "trackio": {"TRACKIO_DIR": "{folder}"},
    "wandb": {"WANDB_MODE": "offline", "WANDB_DIR": "{folder}", "WANDB_SILENT": "true"},
}


def environment(tracker: str, folder: Path) -> dict[str, str]:
    """Variables that make a tracker keep its runs in a folder."""
    return {name: value.format(folder=folder) for name, value in ENVIRONMENT[tracker].items()}


def stored(tracker: str, folder: Path) -> dict[str, list[int]]:
    """Optimizer steps at which a tracker has stored each of the training's metrics, in its order.

    The summary at the end of a training is left out.
    """
    read = {"tensorboard": _tensorboard, "trackio": _trackio, "wandb": _wandb}[tracker]
    steps: dict[str, list[int]] = {}
    for step, line in read(folder):
        if "train/loss" in line:
            for name in line:
                steps.setdefault(name, []).append(step)
    return steps


def _tensorboard(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = folder.glob("events.*")
    # it knows no lines, only values one after the other
    lines: dict[int, dict[str, Any]] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            line = lines.setdefault(event.step, {})
            # the summary at the end has the epoch again
            assert value.tag not in line or value.tag == "train/epoch", f"{value.tag} twice at step {event.step}"
            line[value.tag] = value
    yield from lines.items()


def _trackio(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    (file,) = folder.glob("*.db")
    with sqlite3.connect(file) as database:
        for (text,) in database.execute("SELECT metrics FROM metrics ORDER BY id"):
            line = json.loads(text)
            yield line["train/global_step"], line


def _wandb(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for raw in _records(file.read_bytes()):
        record: Any = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
        record.ParseFromString(raw)
        items = record.history.item if record.HasField("history") else ()
        line = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
        if "train/global_step" in line:
            yield line["train/global_step"], line


def _records(raw: bytes) -> Iterator[bytes]:
    """Records of a log of blocks of 32 KiB, each chunk with checksum (4 bytes), length (2) and kind (1), behind a
    header of 7 bytes."""
    block, at, parts = 32768, 7, []
    while at + 7 <= len(raw):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        parts.append(raw[at + 7 : at + 7 + length])
        at += 7 + length
        # whole, or the last of several
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []
