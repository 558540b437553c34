# SPDX-License-Identifier: Apache-2.0
"""`delta-wire gc`."""

from __future__ import annotations

import sys
from typing import Any

import click

from delta_wire.commands.common import (
    EXIT_REFUSED,
    Seconds,
    is_terminal,
    json_option,
    open_reader,
    print_json,
    print_table,
    progress,
    say,
)

_SHOWN = 20


@click.command()
@click.argument("bucket")
@click.option("--dry-run", is_flag=True, help="Remove nothing, say what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--restart-points",
    type=click.IntRange(min=2),
    default=2,
    show_default=True,
    help="Newest checkpoints that stay, with every version after the oldest of them.",
)
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(min=0),
    default=3600.0,
    show_default=True,
    help="Seconds that something stays after it has become useless.",
)
@click.option(
    "--lease",
    "lease_s",
    type=Seconds(min=0),
    default=3600.0,
    show_default=True,
    help="What a server still needs stays, unless it has said nothing new for so many seconds.",
)
@json_option
def gc(
    bucket: str, dry_run: bool, yes: bool, restart_points: int, grace_s: float, lease_s: float, as_json: bool
) -> None:
    """Remove versions that no server can need any more.

    A run whose trainer does so by itself needs no gc. Servers restart from checkpoints in the bucket, so what lies
    before the oldest of those that stay goes, after a grace period.

    \b
    Examples: delta-wire gc runs/demo/bucket --dry-run
              delta-wire gc runs/demo/bucket --grace 86400 --yes
    """
    from delta_wire.describe import format_bytes
    from delta_wire.retention import Policy, plan, sweep

    if not (dry_run or yes or is_terminal(sys.stdin)):
        raise click.UsageError("say --dry-run or --yes; there is nobody to ask")
    reader = open_reader(bucket)
    with progress("looking for what nobody needs"):
        found = plan(reader, Policy(restart_points=restart_points, grace_s=grace_s, lease_s=lease_s))
    result: dict[str, Any] = {
        "bucket": reader.store.url,
        "dry_run": dry_run,
        "newest": found.head and str(found.head),
        "oldest_kept": found.oldest and str(found.oldest),
        "delete": [{"key": info.key, "size_bytes": info.size_bytes} for info in found.delete],
        "deleted": 0,
        "freed_bytes": found.freed_bytes,
        "kept_bytes": found.kept_bytes,
        "waiting": len(found.waiting),
    }
    if not as_json:
        _show(result)
    what = f"{len(found.delete)} objects, {format_bytes(found.freed_bytes)}"
    agreed = dry_run or yes or not found.delete or click.confirm(f"Remove {what}?", err=True)
    if agreed and not dry_run:
        with progress("removing"):
            result["deleted"] = sweep(reader.store, found)
    if as_json:
        print_json(result)
    elif agreed:
        say(f"{'would remove' if dry_run else 'removed'} {what}")
    if not agreed:
        raise click.exceptions.Exit(EXIT_REFUSED)


def _show(result: dict[str, Any]) -> None:
    from delta_wire.describe import format_bytes

    click.echo(f"newest    {result['newest']}")
    click.echo(f"keeps     {format_bytes(result['kept_bytes'])}, every version from {result['oldest_kept']} on")
    click.echo(f"waiting   {result['waiting']} objects whose grace period is not over")
    rows = [[entry["key"], format_bytes(entry["size_bytes"])] for entry in result["delete"]]
    print_table(["to be removed", "size"], rows[:_SHOWN])
    if len(rows) > _SHOWN:
        click.echo(f"… and {len(rows) - _SHOWN} more")
