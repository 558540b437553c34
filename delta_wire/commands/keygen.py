# SPDX-License-Identifier: Apache-2.0
"""`delta-wire keygen`."""

from __future__ import annotations

from pathlib import Path

import click

from delta_wire.commands.common import PUBLIC_KEY, json_option, print_json, say


@click.command()
@click.argument("file")
@json_option
def keygen(file: str, as_json: bool) -> None:
    """Make a key pair: the private key goes into FILE, the public key is printed.

    The trainer signs every version with the private key (delta_sync_signing_key), which nobody else needs. Servers and
    this command accept no other versions if they are given the public key (DELTA_SYNC_PUBLIC_KEY).

    \b
    Example: delta-wire keygen run-1.key
    """
    from delta_wire.signing import generate_key

    # an empty name would mean the folder that the command was called in
    if not file.strip():
        raise click.UsageError("FILE is empty; name a file that does not exist yet")
    public = generate_key(Path(file))
    if as_json:
        print_json({"private_key_file": file, "public_key": public})
    else:
        click.echo(public)
        say(f"private key in {file}: delta_sync_signing_key={file} on the trainer, {PUBLIC_KEY}={public} elsewhere")
