# SPDX-License-Identifier: Apache-2.0
"""What `delta-wire doctor` looks at on the trainer's side."""

from __future__ import annotations

from collections.abc import Iterator

from delta_wire.doctor import Context, Finding, ok, problem
from trl_delta.config import ENCODING_VARIABLE, ENCODINGS

VARIABLES = frozenset({ENCODING_VARIABLE})


def encoding(context: Context) -> Iterator[Finding]:
    """The environment's choice of an encoding."""
    chosen = context.env.get(ENCODING_VARIABLE, "")
    if not chosen:
        return
    if chosen in ENCODINGS:
        yield ok("encoding", chosen)
    else:
        yield problem("encoding", f"{ENCODING_VARIABLE}={chosen!r}", f"set it to one of {', '.join(ENCODINGS)}")


CHECKS = (encoding,)
