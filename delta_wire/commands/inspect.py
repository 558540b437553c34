# SPDX-License-Identifier: Apache-2.0
"""`delta-wire inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delta_wire.commands.common import (
    base_option,
    find,
    json_option,
    newest,
    open_reader,
    print_json,
    print_table,
    progress,
    say,
    split,
)

if TYPE_CHECKING:
    from delta_wire.bucket import BucketReader
    from delta_wire.manifest import Manifest


@click.command()
@click.argument("bucket", metavar="BUCKET[@VERSION]")
@base_option
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PNG",
    help="Also draw what the version changes into this file (needs the extra 'report').",
)
@json_option
def inspect(bucket: str, base: Path | None, plot: Path | None, as_json: bool) -> None:
    """Show a run and its model, or what one version changes, tensor by tensor.

    Per tensor: elements sent, how they are coded, bits per change of the tensor coded alone, and the sizes of the
    steps, counted in neighbouring bf16 values.

    \b
    Examples: delta-wire inspect runs/demo/bucket
              delta-wire inspect runs/demo/bucket@latest --plot latest.png
    """
    address, version = split(bucket)
    reader = open_reader(address)
    if version is not None:
        _inspect_version(reader, find(reader, version), base, plot, as_json)
    elif plot is not None or base is not None:
        raise click.UsageError(f"--plot and --base show one version: name it, as in {bucket}@latest")
    else:
        _inspect_run(reader, as_json)


def _inspect_run(reader: BucketReader, as_json: bool) -> None:
    from delta_wire.describe import describe_run, format_age, format_bytes

    latest = newest(reader)
    with progress("looking at the run"):
        run = describe_run(reader, latest)
    if as_json:
        print_json(run)
        return
    model, last = run["model"], run["latest"]
    click.echo(f"bucket    {run['bucket']}")
    click.echo(f"run       {run['run']}")
    full = format_bytes(model["full_bytes"])
    click.echo(f"model     {model['tensors']} tensors, {model['num_params']:,} parameters, {full}")
    if run["adapter"]:
        adapter, below = run["adapter"], run["adapter"]["base"]
        click.echo(f"adapter   {adapter['name']}, rank {adapter['rank']}, for {below['reference']} {below['digest']}")
    click.echo(f"base      {run['restart_point']['version']}: {run['restart_point']['anchor']}")
    click.echo(f"latest    {last['version']}, step {last['step']}, {format_age(last['age_s'])} old")
    click.echo(f"digest    {last['digest']}")
    size = format_bytes(last["delta_bytes"])
    click.echo(f"changed   {last['changed_params']:,} ({last['changed_frac']:.4%}), {size}")
    for ack in run["servers"]:
        reason = f": {ack['reason']}" if ack["reason"] else ""
        click.echo(f"server    {ack['server']} {ack['state']} {ack['version']}{reason}")


def _inspect_version(
    reader: BucketReader, manifest: Manifest, base: Path | None, plot: Path | None, as_json: bool
) -> None:
    from delta_wire.describe import describe_tensors, format_bytes, summary

    with progress("looking at tensor") as shown:
        version = summary(reader, manifest)
        version["tensors"] = describe_tensors(reader, manifest, base, shown.step)
    if plot is not None:
        from delta_wire.report.plots import draw_version

        draw_version(version, plot)
        say(f"drawn into {plot}")
    if as_json:
        print_json(version)
        return
    click.echo(f"version   {version['version']}, step {version['step']}")
    click.echo(f"digest    {version['digest']}")
    click.echo(f"parent    {version['parent'] or '-'}")
    click.echo(f"anchor    {version['anchor'] or '-'}")
    size = format_bytes(version["delta_bytes"])
    click.echo(f"changed   {version['changed_params']:,} ({version['changed_frac']:.4%}), {size}")
    if version["encoding"]:
        bits = 8 * version["delta_bytes"] / max(1, version["changed_params"])
        click.echo(f"encoding  {version['encoding']}, {bits:.2f} bits per change with all headers")
    _print_steps(version["tensors"])
    print_table(
        ["tensor", "elements sent", "share", "form", "bits/change", "steps of 1", "larger"],
        [_row(tensor) for tensor in version["tensors"]],
    )


def _row(tensor: dict[str, Any]) -> list[str]:
    bits, steps = tensor["bits_per_change"], tensor["steps"]
    total = sum(steps.values()) if steps else 0
    return [
        tensor["name"],
        f"{tensor['listed']:,}",
        f"{tensor['listed'] / max(tensor['elements'], 1):.4%}",
        tensor["form"],
        "-" if bits is None else f"{bits:.2f}",
        "-" if not total else f"{steps['1'] / total:.1%}",
        "-" if not total else f"{1 - steps['1'] / total:.1%}",
    ]


def _print_steps(tensors: list[dict[str, Any]]) -> None:
    """The histogram of the whole version."""
    known = [tensor["steps"] for tensor in tensors if tensor["steps"]]
    total = sum(sum(steps.values()) for steps in known)
    if not total:
        return
    click.echo("steps     in neighbouring bf16 values")
    for label in known[0]:
        count = sum(steps[label] for steps in known)
        click.echo(f"  {label:>6}  {count / total:6.1%} {'#' * round(40 * count / total)}".rstrip())
