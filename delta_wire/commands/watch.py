# SPDX-License-Identifier: Apache-2.0
"""`delta-wire watch`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from delta_wire.commands.common import (
    EXIT_REFUSED,
    Seconds,
    is_terminal,
    lines_option,
    nothing_published,
    open_reader,
    print_json,
    print_table,
    progress,
    say,
)
from delta_wire.errors import BucketNotFoundError, StoreUnavailableError

if TYPE_CHECKING:
    from delta_wire.fleet import Replica


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="BUCKET | URL…")
@click.option("--once", is_flag=True, help="Look once; exit code 1 unless every server is well.")
@click.option(
    "--max-lag",
    "max_lag_versions",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="A server is well if it serves and is at most so many versions behind.",
)
@click.option(
    "--interval",
    "interval_s",
    type=Seconds(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@lines_option
def watch(sources: tuple[str, ...], once: bool, max_lag_versions: int, interval_s: float, as_json: bool) -> None:
    """Show what every server serves, how far it is behind, and what is wrong with it.

    From the servers' acknowledgements in a BUCKET, or from the servers themselves by their URLs (http://host:8000).
    Looks again every second until Ctrl-C; with --json every look that brings news is one object on a line, which
    `delta-wire report --fleet` draws.

    \b
    Examples: delta-wire watch runs/demo/bucket
              delta-wire watch http://host-1:8000 http://host-2:8000 --once
    """
    look = _chosen(sources)
    if once:
        with progress("asking"):
            replicas = look()
        if as_json:
            print_json(_record(replicas))
        else:
            _show(replicas)
        _judge(replicas, max_lag_versions)
        return
    _follow(look, interval_s, as_json)


def _chosen(sources: tuple[str, ...]) -> Callable[[], list[Replica]]:
    from delta_wire.fleet import from_bucket, from_server

    servers = [source for source in sources if source.startswith(("http://", "https://"))]
    if len(servers) == len(sources):
        return lambda: [from_server(url) for url in servers]
    if servers or len(sources) > 1:
        raise click.UsageError("give one BUCKET, or the URLs of servers (http://host:8000), not both")
    reader = open_reader("".join(sources))
    # an address that is no bucket is told at once
    with progress("looking for the newest version"):
        latest = reader.latest()
    if latest is None:
        say(nothing_published(reader))
    return lambda: from_bucket(reader)


def _follow(look: Callable[[], list[Replica]], interval_s: float, as_json: bool) -> None:
    shown: list[Replica] | None = None
    outage = None
    while True:
        try:
            with progress("asking"):
                replicas = look()
            outage = None
        except (StoreUnavailableError, BucketNotFoundError) as error:
            # it may come back; said once
            replicas = shown or []
            if str(error) != outage:
                outage = str(error)
                say(f"waiting: {error}")
        if replicas != shown:
            if as_json:
                print_json(_record(replicas))
            else:
                if is_terminal(sys.stdout):
                    click.clear()
                _show(replicas)
            shown = replicas
        time.sleep(interval_s)


def _record(replicas: list[Replica]) -> dict[str, Any]:
    from delta_wire.fleet import now_unix_s

    return {"unix_s": now_unix_s(), "servers": [replica.to_json() for replica in replicas]}


def _show(replicas: list[Replica]) -> None:
    from delta_wire.describe import format_age
    from delta_wire.fleet import now_unix_s

    if not replicas:
        say("no server has said anything yet")
        return
    now = now_unix_s()
    print_table(
        ["server", "state", "version", "behind", "since", "latency", "pause"],
        [
            [
                replica.server,
                replica.state,
                replica.version or "-",
                "-" if replica.lag_versions is None else str(replica.lag_versions),
                "-" if replica.served_unix_s is None else format_age(max(0.0, now - replica.served_unix_s)),
                "-" if replica.latency_s is None else f"{replica.latency_s:.1f} s",
                "-" if replica.pause_ms is None else f"{replica.pause_ms:.1f} ms",
            ]
            for replica in replicas
        ],
    )
    for replica in replicas:
        if replica.reason:
            say(f"{replica.server}: {replica.reason}")


def _judge(replicas: list[Replica], max_lag_versions: int) -> None:
    from delta_wire.fleet import healthy

    if not replicas or not all(healthy(replica, max_lag_versions) for replica in replicas):
        raise click.exceptions.Exit(EXIT_REFUSED)
