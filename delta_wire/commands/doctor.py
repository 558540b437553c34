# SPDX-License-Identifier: Apache-2.0
"""`delta-wire doctor`."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import click

from delta_wire.commands.common import EXIT_REFUSED, json_option, print_json, progress, say

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_MARKS = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM", "skipped": "-      "}


@click.command()
@click.argument("bucket", required=False)
@click.option("--serve", default="", metavar="COMMAND", help="The command that starts a server, in quotes.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The checkpoint that the run starts from.",
)
@click.option(
    "--servers",
    "num_servers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many servers follow the bucket with one token.",
)
@click.option("--read-only", is_flag=True, help="Write nothing into the bucket, not even for a moment.")
@json_option
def doctor(
    bucket: str | None, serve: str, model: Path | None, num_servers: int, read_only: bool, as_json: bool
) -> None:
    """Look at this machine, its settings and a bucket, and say what to fix; exit code 1 if something will not work.

    Without BUCKET the one of DELTA_SYNC_BUCKET is looked at.

    \b
    Examples: delta-wire doctor runs/demo/bucket
              delta-wire doctor --serve "vllm serve MODEL --dtype bfloat16"
    """
    from delta_wire.doctor import Context, examine

    try:
        words = tuple(shlex.split(serve))
    except ValueError as error:
        raise click.UsageError(f"--serve: {error}") from error
    # as in a shell: what comes before the command is set for it
    set_before = [word.split("=", 1) for word in itertools.takewhile(_ASSIGNMENT.match, words)]
    words = words[len(set_before) :]
    env = os.environ | dict(set_before)
    context = Context(
        env=env,
        cwd=Path.cwd(),
        bucket=bucket or env.get("DELTA_SYNC_BUCKET", "").strip() or None,
        serve=words,
        model=model,
        num_servers=num_servers,
        write=not read_only,
    )
    findings = []
    with progress("looking") as shown:
        for finding in examine(context):
            findings.append(finding)
            if not as_json:
                shown.clear()
                click.echo(f"{_MARKS[finding.state]}  {finding.check}: {finding.found}")
                if finding.fix:
                    click.echo(f"         → {finding.fix}")
    problems = sum(finding.state == "problem" for finding in findings)
    if as_json:
        print_json({"ok": not problems, "findings": [asdict(finding) for finding in findings]})
    else:
        warnings = sum(finding.state == "warning" for finding in findings)
        say(f"{problems} problems, {warnings} warnings, {len(findings)} things looked at")
    if problems:
        raise click.exceptions.Exit(EXIT_REFUSED)
