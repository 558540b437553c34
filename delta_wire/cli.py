# SPDX-License-Identifier: Apache-2.0
"""The `delta-wire` command. Data goes to standard output, messages to standard error.

Exit codes: 0 all is well; 1 refused, not found, not as announced, or the output could not be written; 2 wrong usage;
130 interrupted. With `--json` there is exactly one JSON object on standard output, `{"error": {"type", "message"}}` if
the command failed; commands that follow something (`log --follow`, `watch`) write one object a line.
"""

from __future__ import annotations

import os
import sys

import click

from delta_wire import __version__
from delta_wire.commands import (
    bench,
    checkout,
    completion,
    diff,
    doctor,
    gc,
    inspect,
    keygen,
    log,
    report,
    verify,
    watch,
)
from delta_wire.commands.common import EXIT_INTERRUPTED, EXIT_REFUSED, print_json, say
from delta_wire.errors import DeltaError

PROGRAM = "delta-wire"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Look into buckets of weight updates, prove them, and turn any version into a checkpoint.

    BUCKET is a folder, file:///folder or the address of an object store (hf://buckets/…, s3://…). VERSION is a number,
    run-epoch-number, or "latest". With DELTA_SYNC_PUBLIC_KEY set nothing is believed that this key has not signed.

    \b
    Exit codes: 0 all is well · 2 wrong usage · 130 interrupted
                1 refused, not found, not as announced, or nobody takes the output
    """


for _command in (
    log.log,
    inspect.inspect,
    verify.verify,
    checkout.checkout,
    diff.diff,
    watch.watch,
    doctor.doctor,
    report.report,
    gc.gc,
    keygen.keygen,
    bench.bench,
    completion.completion,
):
    cli.add_command(_command)


def main() -> None:
    """Entry point: as click's own, with the exit codes that the module describes."""
    try:
        code = _run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # whoever read the output has seen enough
        _drop_output()
        code = EXIT_REFUSED
    except OSError as error:
        # what was written did not arrive, so nothing more is
        _drop_output()
        say(f"error: standard output: {error.strerror or error}")
        code = EXIT_REFUSED
    except KeyboardInterrupt:
        # at a moment at which click does not wait for it
        say("interrupted")
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _run() -> int:
    """Run the command; only errors of standard output leave this."""
    try:
        code = cli.main(standalone_mode=False, prog_name=PROGRAM)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        if _wants_json():
            print_json({"error": {"type": type(error).__name__, "message": error.format_message()}})
        error.show()
        return error.exit_code
    except click.Abort:
        say("interrupted")
        return EXIT_INTERRUPTED
    except DeltaError as error:
        return _refused(error, str(error))
    except OSError as error:
        if sys.stdout is not None:
            # what did not arrive there is still waiting, so this raises again if standard output was meant
            sys.stdout.flush()
        what = "" if error.filename is None else f"{error.filename}: "
        return _refused(error, f"{what}{error.strerror or error}")


def _refused(error: Exception, message: str) -> int:
    if _wants_json():
        # a program that reads standard output finds one object there in any case
        print_json({"error": {"type": type(error).__name__, "message": message}})
    say(f"error: {message}")
    return EXIT_REFUSED


def _wants_json() -> bool:
    return "--json" in sys.argv[1:]


def _drop_output() -> None:
    """Let the interpreter flush at its exit without complaining."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
