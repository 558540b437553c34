# SPDX-License-Identifier: Apache-2.0
"""What the commands share: options, exit codes, how addresses are read and results printed."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from delta_wire.errors import FormatError, SetupError

if TYPE_CHECKING:
    from delta_wire.bucket import BucketReader
    from delta_wire.manifest import Manifest

PUBLIC_KEY = "DELTA_SYNC_PUBLIC_KEY"
EXIT_REFUSED = 1
EXIT_INTERRUPTED = 130
# what takes longer than this shows how far it is
PATIENCE_S = 2.0
_SHOW_S = 0.5
_VERSION = re.compile(r"latest|[0-9]{1,12}|[A-Za-z0-9]{1,64}-[0-9]{1,15}-[0-9]{1,12}")

# more than anybody waits; what is longer cannot be slept by the system
_MAX_S = 1e8


class Seconds(click.FloatRange):
    """A number of seconds of at least `min`."""

    name = "seconds"

    def __init__(self, min: float):
        super().__init__(min=min, max=_MAX_S)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            # which no bound excludes
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


json_option = click.option("--json", "as_json", is_flag=True, help="Write one JSON object to standard output.")
lines_option = click.option("--json", "as_json", is_flag=True, help="Write JSON; one object a line while following.")
base_option = click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A copy of the checkpoint that the run started from, if the place the bucket names is not on this machine.",
)


def open_reader(address: str) -> BucketReader:
    """A reader of the bucket at an address; where [`PUBLIC_KEY`] is set it believes nothing that is not signed."""
    from delta_wire.bucket import BucketReader
    from delta_wire.signing import Verifier
    from delta_wire.stores import open_store

    if split(address)[1] is not None:
        raise click.UsageError(f"{address}: expected a BUCKET without @VERSION")
    keys = os.environ.get(PUBLIC_KEY, "").strip()
    return BucketReader(open_store(address), Verifier(keys) if keys else None)


def split(bucket: str) -> tuple[str, str | None]:
    """Cut `BUCKET@VERSION` into both; the version is `None` if there is none."""
    address, at, version = bucket.rpartition("@")
    # a folder's own name may contain an @
    if not at or not address or not _VERSION.fullmatch(version) or os.path.isdir(bucket):
        return bucket, None
    return address, version


def newest(reader: BucketReader) -> Manifest:
    """Manifest of the newest version; [`SetupError`] if nothing has been published yet."""
    with progress("looking for the newest version"):
        latest = reader.latest()
    if latest is None:
        raise SetupError(nothing_published(reader))
    return latest


def nothing_published(reader: BucketReader) -> str:
    """What is said of a bucket without a run; a folder that lies beside one is the usual mistake."""
    from delta_wire.manifest import POINTER_KEY

    text = f"{reader.store.url}: nothing has been published yet"
    root = getattr(reader.store, "root", None)
    if not isinstance(root, Path):
        return text
    pointers = [root.parent / POINTER_KEY, *sorted(root.glob(f"*/{POINTER_KEY}"))]
    beside = [str(pointer.parent) for pointer in pointers if pointer.is_file()]
    return f"{text}, but {beside[0]} holds a run: was that meant?" if beside else text


def find(reader: BucketReader, version: str) -> Manifest:
    """A version on the chain that ends at the newest; manifests that no reader would follow are not found."""
    latest = newest(reader)
    if version == "latest":
        return latest
    seq = int(version.rpartition("-")[2])
    with progress(f"looking for version {version}") as shown:
        for manifest in reader.walk(latest):
            shown.step(latest.version.seq - seq + 1)
            if manifest.version.seq == seq and (version.isdecimal() or version == str(manifest.version)):
                return manifest
            if manifest.version.seq <= seq:
                break
    raise FormatError(
        f"{reader.store.url}: there is no version {version} in the run; the newest is {latest.version} "
        f"(delta-wire log {reader.store.url})"
    )


def print_json(value: dict[str, Any]) -> None:
    """One line, written at once."""
    click.echo(json.dumps(value))


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        click.echo(format_row(row, widths))


def format_row(row: list[str], widths: list[int]) -> str:
    """One line of a table."""
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def say(text: str) -> None:
    """A message; never part of the data."""
    click.echo(text, err=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody sees it; a stream that was closed by the caller is `None`."""
    return stream is not None and stream.isatty()


class Progress:
    """How far something is, in one line on a terminal's standard error, once it has taken [`PATIENCE_S`].

    Args:
        label (`str`): what is being done.
    """

    def __init__(self, label: str):
        self._label = label
        self._total: int | None = None
        self._done = 0
        self._began_s = time.monotonic()
        self._shown = 0
        self._lock = threading.Lock()

    def step(self, total: int | None = None) -> None:
        """One step more is done, of `total` if that is known."""
        self._total = total
        self._done += 1

    def show(self) -> None:
        """Write the line anew, if it is time for one."""
        elapsed_s = time.monotonic() - self._began_s
        if elapsed_s < PATIENCE_S:
            return
        text = f"{self._label} {self._done or ''}".rstrip() + f" … {elapsed_s:.0f} s"
        if self._total and self._done:
            filled = min(24, 24 * self._done // self._total)
            left_s = elapsed_s * max(0, self._total - self._done) / self._done
            text = f"{self._label} [{'#' * filled:<24}] {self._done}/{self._total}, {left_s:.0f} s left"
        with self._lock:
            click.echo("\r" + text.ljust(self._shown), nl=False, err=True)
            self._shown = len(text)

    def clear(self) -> None:
        """Take the line away, for a line of output or for good."""
        with self._lock:
            if self._shown:
                click.echo("\r" + " " * self._shown + "\r", nl=False, err=True)
                self._shown = 0


@contextmanager
def progress(label: str) -> Iterator[Progress]:
    """A [`Progress`] that shows itself twice a second, and is gone at the end, however that comes."""
    shown = Progress(label)
    if not is_terminal(sys.stderr):
        yield shown
        return
    over = threading.Event()

    def keep_showing() -> None:
        while not over.wait(_SHOW_S):
            shown.show()

    thread = threading.Thread(target=keep_showing, name="delta-wire-progress", daemon=True)
    thread.start()
    try:
        yield shown
    finally:
        over.set()
        thread.join()
        shown.clear()
