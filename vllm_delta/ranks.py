# SPDX-License-Identifier: Apache-2.0
"""All ranks at once: what each answers, or the error of the first that failed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delta_wire import errors
from delta_wire.errors import DeltaError
from vllm_delta.engine import Engine
from vllm_delta.layout import RankTrace

# each look is a remote call between two steps: what takes long is looked at more rarely
_POLL_S = 0.04
_POLL_FRAC = 0.1


def raise_failures(replies: Sequence[dict[str, Any]]) -> None:
    """Raise the first error that a rank reported, as the class it was there."""
    for rank, reply in enumerate(replies):
        if "error" in reply:
            kind = getattr(errors, reply["kind"], None)
            message = f"rank {rank}: {reply['error']}"
            if isinstance(kind, type) and issubclass(kind, DeltaError):
                error = kind(message)
            else:
                error = DeltaError(f"{message} ({reply['kind']}; the server's log has the details)")
            error.rank = rank
            raise error


class Ranks:
    """Work on all ranks that does not write to live weights.

    Args:
        engine (`Engine`): the engine core.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._jobs = itertools.count(1)

    def trace(self) -> list[RankTrace]:
        """Trace the model's loader on all ranks."""
        replies = self._ask("delta_trace")
        if len({reply["table_sha256"] for reply in replies}) > 1:
            raise errors.ModelMismatchError(
                "the ranks see different checkpoints under the model's path; put the same files on every host"
            )
        return [RankTrace(reply["regions"], reply["problems"], reply["cores"]) for reply in replies]

    def job(self, kind: str, *args: str | Path) -> list[dict[str, Any]]:
        """Run side work on all ranks and wait for all of it; steps go on meanwhile."""
        job = next(self._jobs)
        began_s = time.monotonic()
        self._ask("delta_submit", job, kind, *map(str, args))
        while True:
            replies = self._engine.between_steps(lambda: self._engine.rpc("delta_poll", job))
            if not any(reply.get("pending") for reply in replies):
                raise_failures(replies)
                return replies
            time.sleep(max(_POLL_S, (time.monotonic() - began_s) * _POLL_FRAC))

    def prove(self, number: int) -> list[dict[str, Any]]:
        """Compute one of the computed parts anew, on all ranks between the same two steps, and compare."""
        return self._ask("delta_prove", number)

    def release(self) -> None:
        """Let all ranks forget their plan."""
        self._ask("delta_release")

    def _ask(self, method: str, *args: Any) -> list[dict[str, Any]]:
        replies = self._engine.between_steps(lambda: self._engine.rpc(method, *args))
        raise_failures(replies)
        return replies
