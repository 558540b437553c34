# SPDX-License-Identifier: Apache-2.0
"""What the demo shows while it runs and at its end."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from delta_wire.bucket import BucketReader
from delta_wire.errors import DeltaError
from delta_wire.fleet import Replica, from_bucket, now_unix_s
from delta_wire.machine import measured
from delta_wire.stores import open_store
from trl_delta import DeltaSyncSession

# how long a line waits for the server to acknowledge its step before it tells what is known
PATIENCE_S = 5.0
_POLL_S = 0.1
_RECORD_S = 0.2


def say(text: str) -> None:
    """One line on stdout, at once."""
    print(text, flush=True)


class Progress:
    """One line that counts seconds: overwritten on a terminal, every 10 s elsewhere.

    Args:
        what (`str`): what is being waited for.
    """

    def __init__(self, what: str):
        self._what = what
        self._said_s = -10.0

    def __call__(self, elapsed_s: float) -> None:
        if sys.stdout.isatty():
            print(f"\r{self._what} … {elapsed_s:.0f} s ", end="", flush=True)
        elif elapsed_s - self._said_s >= 10:
            self._said_s = elapsed_s
            say(f"{self._what} … {elapsed_s:.0f} s")

    def done(self, result: str) -> None:
        say(f"\r{result}" if sys.stdout.isatty() else result)


class LiveLines(TrainerCallback):
    """Prints one line per optimizer step as soon as the server serves it, without holding training up.

    Args:
        session ([`DeltaSyncSession`]): of the attached callback.
        server_status (callable): what `GET /delta/status` answers.
        log (`Path`): gets the trainer's log rows as JSON lines, for `delta-wire report --logs`.
    """

    def __init__(self, session: DeltaSyncSession, server_status: Callable[[], dict[str, Any]], log: Path):
        self.session = session
        self._server_status = server_status
        self._log = log
        log.write_text("")
        self.rewards: list[float] = []
        self.staleness: list[float] = []
        self._rows: queue.Queue[dict[str, float] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._print_rows, name="demo-lines", daemon=True)

    def on_train_begin(self, args, state, control, **kwargs):
        say("one line a step. Training does not wait: what is 'not published' goes with a later step's version.")
        say("staleness: optimizer steps between the weights that generated the samples and those that learn from them")
        say("step  reward  changed     delta / full weights   published  served  staleness  pause")
        self._thread.start()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.rewards.append(logs.get("reward", float("nan")))
            self.staleness.append(logs.get("sample/staleness_mean", float("nan")))
            row = {**logs, "step": state.global_step}
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self._rows.put(row)

    def close(self) -> None:
        """Print what is left."""
        self._rows.put(None)
        if self._thread.is_alive():
            self._thread.join(2 * PATIENCE_S)

    def _print_rows(self) -> None:
        while (row := self._rows.get()) is not None:
            step = int(row["step"])
            say(self._line(step, row, self._await_served(step)))

    def _await_served(self, step: int) -> dict[str, Any]:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                status = self._server_status()
            except OSError:
                status = {}
            seq = status.get("seq")
            served = None if seq is None else self.session.publisher.step_of(seq)
            # a line that does not come holds the next one up
            late = time.monotonic() > deadline_s or not self._rows.empty()
            if late or (served is not None and served >= step):
                return status
            time.sleep(_POLL_S)

    def _line(self, step: int, row: dict[str, float], status: dict[str, Any]) -> str:
        publisher = self.session.publisher
        record = next((record for record in list(publisher.records) if record.step == step), None)
        delta = "not published" if record is None else f"{record.delta_bytes / 1e6:.3f} MB"
        pauses = status.get("pauses_ms") or []
        served = "-" if status.get("seq") is None else f"v{status['seq']}"
        return (
            f"{step:4d}  {row.get('reward', float('nan')):6.3f}  {row['delta/changed_frac']:7.3%}  "
            f"{delta:>13} / {self.session.table.full_bytes / 1e6:8.2f} MB  {'v' + str(publisher.durable_seq):>9}  "
            f"{served:>6}  {row.get('sample/staleness_mean', float('nan')):9.2f}  "
            + (f"{pauses[-1]:.1f} ms" if pauses else "-")
        )


class FleetRecorder:
    """Writes down what the servers acknowledge while the demo runs, as `delta-wire watch --json` does.

    Args:
        bucket (`str` or `Path`): the bucket.
        path (`Path`): JSON lines, for `delta-wire report --fleet`.
    """

    def __init__(self, bucket: str | Path, path: Path):
        self._reader = BucketReader(open_store(bucket))
        self._path = path
        path.write_text("")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._record, name="demo-fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End with a last record."""
        self._closed.set()
        self._thread.join(PATIENCE_S)

    def _record(self) -> None:
        seen: list[Replica] = []
        over = False
        while not over:
            over = self._closed.wait(_RECORD_S)
            try:
                replicas = from_bucket(self._reader)
            except DeltaError:
                # a bucket that is lost is told by trainer and server
                continue
            if replicas != seen or over:
                record = {"unix_s": now_unix_s(), "servers": [replica.to_json() for replica in replicas]}
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            seen = replicas


def summarise(
    lines: LiveLines, status: dict[str, Any], unequal: list[str] | None, wall_s: float, run_dir: Path
) -> dict[str, Any]:
    """Print the closing table and write `summary.json`.

    Args:
        lines ([`LiveLines`]): what was seen.
        status (`dict`): the server's last status; empty if it did not answer.
        unequal (`list[str]`, *optional*): tensors whose digests differ, `None` if they could not be compared.
        wall_s (`float`): duration of the whole demo.
        run_dir (`Path`): folder of the summary.
    """
    session = lines.session
    records = session.publisher.records
    num_params = session.table.num_params
    summary = {
        "versions_published": session.publisher.durable_seq,
        "version_served": status.get("seq"),
        "bit_exact": unequal == [],
        "full_bytes": session.table.full_bytes,
        "delta_bytes": [record.delta_bytes for record in records],
        "changed_frac": [record.num_changed / num_params for record in records],
        "pause_ms": status.get("pauses_ms", []),
        "reward": lines.rewards,
        "staleness": lines.staleness,
        "wall_s": round(wall_s, 1),
        "num_params": num_params,
        "publish_s": [round(record.publish_s, 4) for record in records],
        "server_state": status.get("state"),
        "measured": measured(),
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    mean_bytes = sum(summary["delta_bytes"]) / max(1, len(records))
    mean_frac = sum(summary["changed_frac"]) / max(1, len(records))
    pauses = summary["pause_ms"]
    for name, value in (
        ("full weights", f"{summary['full_bytes'] / 1e6:.2f} MB, {num_params:,} parameters"),
        ("mean delta", f"{mean_bytes / 1e6:.3f} MB, {mean_bytes / summary['full_bytes']:.3%} of the full weights"),
        ("mean change", f"{mean_frac:.3%} of the parameters per version"),
        ("pause", f"{sum(pauses) / len(pauses):.1f} ms mean, {max(pauses):.1f} ms longest" if pauses else "none"),
        ("versions", f"{summary['versions_published']} published, {summary['version_served']} served"),
        ("tensors equal", f"{len(session.table) - len(unequal or [])} of {len(session.table)}"
         if unequal is not None else "not compared"),
        ("bit exact", "yes" if summary["bit_exact"] else "NO"),
    ):  # fmt: skip
        say(f"  {name:14} {value}")
    return summary
