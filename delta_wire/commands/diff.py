# SPDX-License-Identifier: Apache-2.0
"""`delta-wire diff`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delta_wire.commands.common import (
    base_option,
    find,
    json_option,
    open_reader,
    print_json,
    print_table,
    progress,
    say,
    split,
)

if TYPE_CHECKING:
    from delta_wire.checkpoint import Checkpoint


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@base_option
@json_option
def diff(a: str, b: str, base: Path | None, as_json: bool) -> None:
    """Compare two states bit by bit; A and B are BUCKET@VERSION or folders with a checkpoint.

    The exit code is 0 whether they differ or not; the answer is in the output.

    \b
    Examples: delta-wire diff runs/demo/bucket@2 runs/demo/bucket@latest
              delta-wire diff runs/demo/bucket@latest my-checkpoint
    """
    from delta_wire.compare import compare

    tensors = []
    with _state(a, base) as (name_a, first), _state(b, base) as (name_b, second), progress("comparing") as shown:
        table = first.table()
        table.require_same(second.table(), name_a, name_b)
        for entry in compare(first, second):
            shown.step(len(table))
            if entry["changed"]:
                tensors.append(entry)
    num_params = table.num_params
    changed = sum(entry["changed"] for entry in tensors)
    result: dict[str, Any] = {
        "a": name_a,
        "b": name_b,
        "equal": not tensors,
        "num_params": num_params,
        "changed_params": changed,
        "changed_frac": changed / num_params if num_params else 0.0,
        "tensors": sorted(tensors, key=lambda entry: (-entry["changed"], entry["name"])),
    }
    if as_json:
        print_json(result)
        return
    if not tensors:
        click.echo(f"equal in all {num_params:,} elements of {len(table)} tensors")
        return
    click.echo(f"{changed:,} of {num_params:,} elements differ ({result['changed_frac']:.4%})")
    print_table(
        ["tensor", "differ", "share", "steps of 1", "larger"],
        [
            [
                entry["name"],
                f"{entry['changed']:,}",
                f"{entry['changed'] / entry['elements']:.4%}",
                f"{entry['steps']['1'] / entry['changed']:.1%}",
                f"{1 - entry['steps']['1'] / entry['changed']:.1%}",
            ]
            for entry in result["tensors"]
        ],
    )
    say(f"compared {name_a} with {name_b}")


@contextmanager
def _state(argument: str, base: Path | None) -> Iterator[tuple[str, Checkpoint]]:
    """A state by its name and as a checkpoint in memory."""
    from delta_wire.checkpoint import Checkpoint
    from delta_wire.replay import materialise

    address, version = split(argument)
    if version is None:
        if not os.path.isdir(argument):
            raise click.UsageError(f"{argument}: expected BUCKET@VERSION or a folder with a checkpoint")
        yield argument, Checkpoint(argument)
        return
    reader = open_reader(address)
    manifest = find(reader, version)
    with ExitStack() as stack:
        with progress(f"rebuilding version {manifest.version}") as shown:
            state = stack.enter_context(materialise(reader, manifest, base, shown.step))
        yield f"{reader.store.url}@{manifest.version}", state.checkpoint
