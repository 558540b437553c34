# SPDX-License-Identifier: Apache-2.0
"""`delta-wire completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from delta_wire.commands.common import json_option, print_json


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
@click.pass_context
def completion(context: click.Context, shell: str, as_json: bool) -> None:
    """Print the script that completes commands and options in a shell.

    \b
    Example: delta-wire completion bash >> ~/.bashrc
    """
    root = context.find_root()
    name = root.info_name or "delta-wire"
    complete = get_completion_class(shell)
    assert complete is not None
    script = complete(root.command, {}, name, f"_{name.replace('-', '_').upper()}_COMPLETE").source()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
