# SPDX-License-Identifier: Apache-2.0
"""The `delta-wire` command. Data goes to standard output, messages to standard error.

Exit codes: 0 all is well; 1 refused, not found or not as announced; 2 wrong usage; 130 interrupted. With `--json`
there is exactly one JSON object on standard output, `{"error": {"type", "message"}}` if the command failed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delta_wire import __version__
from delta_wire.errors import DeltaError, FormatError, ObjectNotFoundError, SetupError

# numpy and everything above it is imported where it is needed: --help must not wait for it
if TYPE_CHECKING:
    from delta_wire.bucket import BucketReader
    from delta_wire.manifest import Manifest

EXIT_REFUSED = 1
EXIT_INTERRUPTED = 130
_VERSION = re.compile(r"latest|[0-9]{1,12}|[A-Za-z0-9]{1,64}-[0-9]{1,15}-[0-9]{1,12}")

json_option = click.option("--json", "as_json", is_flag=True, help="Write one JSON object to standard output.")
base_option = click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A copy of the checkpoint that the run started from, if the place the bucket names is not on this machine.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="delta-wire")
def cli() -> None:
    """Look into buckets of weight updates, prove them, and turn any version into a checkpoint.

    BUCKET is a folder or file:///folder. VERSION is a number, run-epoch-number, or "latest".
    """


@cli.command()
@click.argument("bucket")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Newest versions; 0 for all.")
@json_option
def log(bucket: str, limit: int, as_json: bool) -> None:
    """List versions, newest first: step, changed share, size, age, restart points."""
    from delta_wire.report import format_age, format_bytes, summary

    reader = _open(bucket)
    latest = reader.latest()
    versions = []
    if latest is not None:
        try:
            for manifest in reader.walk(latest):
                versions.append(summary(reader, manifest))
                if len(versions) == limit:
                    break
        except ObjectNotFoundError as error:
            click.echo(f"older versions have been removed: {error}", err=True)
    if as_json:
        _print_json({"bucket": reader.store.url, "run": latest and latest.version.run, "versions": versions})
        return
    if latest is None:
        click.echo(f"{reader.store.url}: nothing has been published yet", err=True)
        return
    click.echo(f"{reader.store.url}: run {latest.version.run}")
    _print_table(
        ["version", "step", "changed", "delta", "of full", "age", "anchor"],
        [
            [
                version["version"],
                "-" if version["step"] is None else str(version["step"]),
                f"{version['changed_frac']:.4%}",
                format_bytes(version["delta_bytes"]),
                "-" if not version["delta_bytes"] else f"1/{version['full_bytes'] / version['delta_bytes']:.0f}",
                format_age(version["age_s"]),
                version["anchor"] or "",
            ]
            for version in versions
        ],
    )


@cli.command()
@click.argument("bucket", metavar="BUCKET[@VERSION]")
@json_option
def inspect(bucket: str, as_json: bool) -> None:
    """Show a run and its model, or what one version changes, tensor by tensor."""
    address, version = _split(bucket)
    reader = _open(address)
    if version is None:
        _inspect_run(reader, as_json)
    else:
        _inspect_version(reader, _find(reader, version), as_json)


@cli.command()
@click.argument("bucket")
@base_option
@json_option
def verify(bucket: str, base: Path | None, as_json: bool) -> None:
    """Replay the run from its oldest restart point and recompute every digest; exit code 1 if one is wrong."""
    from delta_wire.replay import verify as replay

    reader = _open(bucket)
    checks = []
    for check in replay(reader, base):
        checks.append(check)
        if not as_json:
            click.echo(f"{'ok    ' if check.ok else 'FAILED'} {check.version or check.seq} {' '.join(check.checks)}")
            if check.reason:
                click.echo(f"       {check.reason}", err=True)
    failed = [check for check in checks if not check.ok]
    if as_json:
        versions = [
            {
                "seq": check.seq,
                "version": check.version,
                "ok": check.ok,
                "checks": list(check.checks),
                "reason": check.reason,
            }
            for check in checks
        ]
        _print_json({"bucket": reader.store.url, "ok": not failed, "versions": versions})
    else:
        click.echo(f"{len(checks) - len(failed)} of {len(checks)} versions proven", err=True)
    if failed:
        raise click.exceptions.Exit(EXIT_REFUSED)


@cli.command()
@click.argument("bucket", metavar="BUCKET@VERSION")
@click.argument("folder", type=click.Path(path_type=Path))
@base_option
@json_option
def checkout(bucket: str, folder: Path, base: Path | None, as_json: bool) -> None:
    """Write a version into FOLDER as a checkpoint that transformers and vLLM open."""
    from delta_wire.replay import checkout as write

    address, version = _split(bucket)
    if version is None:
        raise click.UsageError(f"{bucket}: expected BUCKET@VERSION, a VERSION being latest, a number or run-epoch-seq")
    reader = _open(address)
    manifest = _find(reader, version)
    written = write(reader, manifest, folder, base)
    if as_json:
        _print_json({"version": str(manifest.version), "digest": str(manifest.digest), "folder": str(written)})
    else:
        click.echo(written)
        click.echo(f"version {manifest.version}, digest {manifest.digest} proven", err=True)


def main() -> None:
    """Entry point: as click's own, with the exit codes that the module describes."""
    try:
        code = cli.main(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # whoever read the output has seen enough; the interpreter would complain when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = EXIT_REFUSED
    except (DeltaError, OSError) as error:
        code = _report(error)
    sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception) -> int:
    if "--json" in sys.argv:
        document = {"error": {"type": type(error).__name__, "message": str(error)}}
        # a program that reads standard output finds one object there in any case
        _print_json(document)
        click.echo(json.dumps(document), err=True)
    else:
        click.echo(f"error: {error}", err=True)
    return EXIT_REFUSED


def _open(address: str) -> BucketReader:
    from delta_wire.bucket import BucketReader
    from delta_wire.stores import open_store

    return BucketReader(open_store(address))


def _split(bucket: str) -> tuple[str, str | None]:
    address, at, version = bucket.rpartition("@")
    # a folder's own name may contain an @
    if not at or not address or not _VERSION.fullmatch(version) or os.path.isdir(bucket):
        return bucket, None
    return address, version


def _find(reader: BucketReader, version: str) -> Manifest:
    """A version on the chain that ends at the newest; manifests that no reader would follow are not found."""
    latest = reader.latest()
    if latest is None:
        raise SetupError(f"{reader.store.url}: nothing has been published yet")
    if version == "latest":
        return latest
    seq = int(version.rpartition("-")[2])
    for manifest in reader.walk(latest):
        if manifest.version.seq == seq and (version.isdecimal() or version == str(manifest.version)):
            return manifest
        if manifest.version.seq <= seq:
            break
    raise FormatError(
        f"{reader.store.url}: there is no version {version} in the run; the newest is {latest.version} "
        f"(delta-wire log {reader.store.url})"
    )


def _inspect_run(reader: BucketReader, as_json: bool) -> None:
    latest = reader.latest()
    if latest is None:
        raise SetupError(f"{reader.store.url}: nothing has been published yet")
    from delta_wire.report import describe_run, format_age, format_bytes

    run = describe_run(reader, latest)
    if as_json:
        _print_json(run)
        return
    model, newest = run["model"], run["latest"]
    click.echo(f"bucket    {run['bucket']}")
    click.echo(f"run       {run['run']}")
    full = format_bytes(model["full_bytes"])
    click.echo(f"model     {model['tensors']} tensors, {model['num_params']:,} parameters, {full}")
    click.echo(f"base      {run['restart_point']['version']}: {run['restart_point']['anchor']}")
    click.echo(f"latest    {newest['version']}, step {newest['step']}, {format_age(newest['age_s'])} old")
    click.echo(f"digest    {newest['digest']}")
    click.echo(
        f"changed   {newest['changed_params']:,} ({newest['changed_frac']:.4%}), {format_bytes(newest['delta_bytes'])}"
    )
    for ack in run["servers"]:
        reason = f": {ack['reason']}" if ack["reason"] else ""
        click.echo(f"server    {ack['server']} {ack['state']} {ack['version']}{reason}")


def _inspect_version(reader: BucketReader, manifest: Manifest, as_json: bool) -> None:
    from delta_wire.report import describe_tensors, format_bytes, summary

    version = summary(reader, manifest)
    version["tensors"] = describe_tensors(reader, manifest)
    if as_json:
        _print_json(version)
        return
    click.echo(f"version   {version['version']}, step {version['step']}")
    click.echo(f"digest    {version['digest']}")
    click.echo(f"parent    {version['parent']}")
    click.echo(f"anchor    {version['anchor']}")
    size = format_bytes(version["delta_bytes"])
    click.echo(f"changed   {version['changed_params']:,} ({version['changed_frac']:.4%}), {size}")
    rows = [[t["name"], f"{t['listed']:,}", f"{t['listed'] / max(t['elements'], 1):.4%}"] for t in version["tensors"]]
    _print_table(["tensor", "elements sent", "share"], rows)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value))


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
