# SPDX-License-Identifier: Apache-2.0
"""What `delta-wire doctor` looks at: each check yields findings that say what was found and what to do.

Trainer and server side add checks of their own through entry points of the group `delta_wire.doctor`, each a module
with `CHECKS` (functions as here) and `VARIABLES` (names in the environment that it reads).
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from delta_wire.errors import DeltaError

logger = logging.getLogger(__name__)
State = Literal["ok", "warning", "problem", "skipped"]
GROUP = "delta_wire.doctor"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Args:
        check (`str`): what.
        state (`str`): `"ok"`, `"warning"` (works, but see to it), `"problem"` (will not work), `"skipped"`.
        found (`str`): what was found.
        fix (`str`, *optional*): what to do.
    """

    check: str
    state: State
    found: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What is looked at.

    Args:
        env (`Mapping`): the environment of trainer or server.
        cwd (`Path`): folder that they are started from.
        bucket (`str`, *optional*): address of the bucket.
        serve (`tuple[str, ...]`): words of the command that starts a server; empty: not looked at.
        model (`Path`, *optional*): checkpoint that the run starts or has started from.
        num_servers (`int`): servers that poll the bucket with one token.
        write (`bool`): whether a small object may be written to the bucket and removed again.
    """

    env: Mapping[str, str]
    cwd: Path
    bucket: str | None = None
    serve: tuple[str, ...] = ()
    model: Path | None = None
    num_servers: int = 1
    write: bool = True


Check = Callable[[Context], Iterable[Finding]]


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(check, "warning", found, fix)


def problem(check: str, found: str, fix: str) -> Finding:
    return Finding(check, "problem", found, fix)


def examine(context: Context) -> Iterator[Finding]:
    """All checks of all sides, one after another; a check that fails itself is a finding, too."""
    from delta_wire.doctor import bucket, environment

    checks: list[Check] = [*environment.CHECKS]
    variables: set[str] = set()
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        side = entry.load()
        checks += side.CHECKS
        variables |= side.VARIABLES
    checks += bucket.CHECKS
    yield from environment.variables(context, variables)
    for check in checks:
        try:
            yield from check(context)
        except DeltaError as error:
            yield problem(check.__name__.replace("_", " "), str(error), "see the message")
