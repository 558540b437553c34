# SPDX-License-Identifier: Apache-2.0
"""`delta-wire checkout`."""

from __future__ import annotations

from pathlib import Path

import click

from delta_wire.commands.common import base_option, find, json_option, open_reader, print_json, progress, say, split


@click.command()
@click.argument("bucket", metavar="BUCKET@VERSION")
@click.argument("folder")
@base_option
@json_option
def checkout(bucket: str, folder: str, base: Path | None, as_json: bool) -> None:
    """Write a version into FOLDER as a checkpoint that transformers and vLLM open.

    \b
    Example: delta-wire checkout runs/demo/bucket@latest checkpoint
    """
    from delta_wire.replay import checkout as write

    address, version = split(bucket)
    if version is None:
        raise click.UsageError(f"{bucket}: expected BUCKET@VERSION, a VERSION being latest, a number or run-epoch-seq")
    # an empty name would mean the folder that the command was called in
    if not folder.strip():
        raise click.UsageError("FOLDER is empty; name a folder that does not exist yet")
    reader = open_reader(address)
    manifest = find(reader, version)
    with progress(f"rebuilding version {manifest.version}") as shown:
        written = write(reader, manifest, Path(folder), base, shown.step)
    if as_json:
        print_json({"version": str(manifest.version), "digest": str(manifest.digest), "folder": str(written)})
    else:
        click.echo(written)
        say(f"version {manifest.version}, digest {manifest.digest} proven")
