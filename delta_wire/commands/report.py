# SPDX-License-Identifier: Apache-2.0
"""`delta-wire report`."""

from __future__ import annotations

from pathlib import Path

import click

from delta_wire.commands.common import base_option, json_option, newest, open_reader, print_json, progress, say

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("bucket")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("report"),
    show_default=True,
    help="Folder for index.html and the pictures.",
)
@click.option("--logs", type=_file, help="The trainer's log: trainer_state.json, or JSON lines with steps.")
@click.option("--fleet", type=_file, help="What `delta-wire watch --json` recorded of the servers.")
@click.option("--limit", type=click.IntRange(min=1), default=200, show_default=True, help="Newest versions to read.")
@base_option
@json_option
def report(
    bucket: str,
    output: Path,
    logs: Path | None,
    fleet: Path | None,
    limit: int,
    base: Path | None,
    as_json: bool,
) -> None:
    """Write a page about a run that needs no explanation: index.html with all pictures in it, and each as a PNG.

    Density per step and per part of the model, bytes against the whole model and against the entropy floor, latency,
    and how far each server is behind; with --logs the reward and the trainer's own times, with --fleet all of that
    over time. Drawing needs the extra `report`.

    \b
    Example: delta-wire report runs/demo/bucket --logs runs/demo/log.jsonl --fleet runs/demo/fleet.jsonl
    """
    from delta_wire.report.collect import collect
    from delta_wire.report.page import write_page
    from delta_wire.report.plots import draw_report, new_figure

    with progress("preparing"):
        # tells that matplotlib is missing before minutes are spent on reading
        new_figure(1, 1)
    reader = open_reader(bucket)
    latest = newest(reader)
    with progress("reading version") as shown:
        data = collect(reader, latest, limit=limit, base=base, logs=logs, fleet=fleet, each=shown.step)
    page = output / "index.html"
    with progress("drawing picture") as shown:
        pictures = draw_report(data, output, shown.step)
        write_page(data, pictures, page)
    if as_json:
        print_json({"page": str(page), "pictures": {name: str(path) for name, path in pictures.items()}, "data": data})
    else:
        click.echo(page)
        say(f"{len(pictures)} pictures of {len(data['versions'])} versions")
