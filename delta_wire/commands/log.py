# SPDX-License-Identifier: Apache-2.0
"""`delta-wire log`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from delta_wire.commands.common import (
    Seconds,
    format_row,
    lines_option,
    nothing_published,
    open_reader,
    print_json,
    print_table,
    progress,
    say,
)
from delta_wire.errors import BucketNotFoundError, ObjectNotFoundError, StoreUnavailableError

if TYPE_CHECKING:
    from delta_wire.bucket import BucketReader
    from delta_wire.manifest import Manifest

_HEADER = ["version", "step", "changed", "delta", "of full", "age", "anchor"]


@click.command()
@click.argument("bucket")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Newest versions; 0 for all.")
@click.option("-f", "--follow", is_flag=True, help="Go on with every new version as it comes, until Ctrl-C.")
@click.option(
    "--interval",
    "interval_s",
    type=Seconds(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two looks while following.",
)
@lines_option
def log(bucket: str, limit: int, follow: bool, interval_s: float, as_json: bool) -> None:
    """List versions, newest first: step, changed share, size, age, restart points.

    With --follow the newest come last, and every version is a JSON object of its own.

    \b
    Examples: delta-wire log runs/demo/bucket
              delta-wire log runs/demo/bucket --follow --json | jq .changed_frac
    """
    reader = open_reader(bucket)
    with progress("reading version") as shown:
        latest = reader.latest()
        versions = _collect(reader, latest, limit, each=shown.step)
    if follow:
        _follow(reader, latest, versions, interval_s, as_json)
    elif as_json:
        print_json({"bucket": reader.store.url, "run": latest and latest.version.run, "versions": versions})
    elif latest is None:
        say(nothing_published(reader))
    else:
        click.echo(f"{reader.store.url}: run {latest.version.run}")
        print_table(_HEADER, [_row(version) for version in versions])


def _collect(
    reader: BucketReader,
    latest: Manifest | None,
    limit: int,
    after_seq: int = -1,
    each: Callable[[int], None] = lambda total: None,
) -> list[dict[str, Any]]:
    """Versions from the newest back, at most `limit` (0: all), none up to `after_seq`; `each` as in `report`."""
    from delta_wire.describe import summary

    versions: list[dict[str, Any]] = []
    if latest is None:
        return versions
    for manifest in _until_removed(reader.walk(latest)):
        if manifest.version.seq <= after_seq:
            break
        versions.append(summary(reader, manifest))
        each(min(limit or latest.version.seq + 1, latest.version.seq + 1))
        if len(versions) == limit:
            break
    return versions


def _until_removed(walk: Iterator[Manifest]) -> Iterator[Manifest]:
    """What retention has removed ends a list of versions; any other object that is missing is an error."""
    try:
        yield from walk
    except ObjectNotFoundError as error:
        say(f"older versions have been removed: {error}")


def _follow(
    reader: BucketReader, latest: Manifest | None, versions: list[dict[str, Any]], interval_s: float, as_json: bool
) -> None:
    # wide enough for what comes later
    widths = [max(len(cell), width) for cell, width in zip(_HEADER, (28, 6, 9, 8, 8, 6, 6), strict=True)]
    if not as_json:
        click.echo(format_row(_HEADER, widths))
    outage = None
    while True:
        for version in reversed(versions):
            if as_json:
                print_json(version)
            else:
                click.echo(format_row(_row(version), widths))
        seen = -1 if latest is None else latest.version.seq
        time.sleep(interval_s)
        try:
            latest = reader.latest() or latest
            versions = _collect(reader, latest, 0, after_seq=seen)
            outage = None
        except (StoreUnavailableError, BucketNotFoundError) as error:
            # it may come back; said once
            versions = []
            if str(error) != outage:
                outage = str(error)
                say(f"waiting: {error}")


def _row(version: dict[str, Any]) -> list[str]:
    from delta_wire.describe import format_age, format_bytes

    return [
        version["version"],
        "-" if version["step"] is None else str(version["step"]),
        f"{version['changed_frac']:.4%}",
        format_bytes(version["delta_bytes"]),
        "-" if not version["delta_bytes"] else f"1/{version['full_bytes'] / version['delta_bytes']:.0f}",
        format_age(version["age_s"]),
        version["anchor"] or "",
    ]
