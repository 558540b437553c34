# SPDX-License-Identifier: Apache-2.0
"""`delta-wire verify`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from delta_wire.commands.common import (
    EXIT_REFUSED,
    base_option,
    json_option,
    newest,
    open_reader,
    print_json,
    progress,
    say,
)


@click.command()
@click.argument("bucket")
@base_option
@json_option
def verify(bucket: str, base: Path | None, as_json: bool) -> None:
    """Replay the run from its oldest restart point and recompute every digest; exit code 1 if one is wrong.

    \b
    Example: delta-wire verify runs/demo/bucket
    """
    from delta_wire.fleet import LOST
    from delta_wire.replay import verify as replay

    reader = open_reader(bucket)
    latest = newest(reader)
    checks = []
    with progress("proving version") as shown:
        for check in replay(reader, base):
            checks.append(check)
            shown.step(latest.version.seq - checks[0].seq + 1)
            if not as_json:
                shown.clear()
                mark = "ok    " if check.ok else "FAILED"
                click.echo(f"{mark} {check.version or check.seq} {' '.join(check.checks)}")
                if check.reason:
                    say(f"       {check.reason}")
    failed = [check for check in checks if not check.ok]
    if as_json:
        print_json({"bucket": reader.store.url, "ok": not failed, "versions": [asdict(check) for check in checks]})
    else:
        say(f"{len(checks) - len(failed)} of {len(checks)} versions proven")
        if failed and not checks[-1].ok:
            say(f"the newest version cannot be rebuilt: restore what is named above; {LOST}")
        elif failed:
            say("the newest version is proven: a later anchor leads past what failed")
    if failed:
        raise click.exceptions.Exit(EXIT_REFUSED)
