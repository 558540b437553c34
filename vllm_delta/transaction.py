# SPDX-License-Identifier: Apache-2.0
"""The commit itself: everything that happens between two steps, and how it is taken back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from delta_wire.digest import Digest
from delta_wire.errors import DeltaError, DigestMismatchError
from vllm_delta.engine import Engine
from vllm_delta.layout import Layout, total
from vllm_delta.ranks import raise_failures
from vllm_delta.settings import CachePolicy


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a commit ended.

    Args:
        state (`str`): `done`; `undone` if every rank holds the old bits again; `unproven` if that could not be shown,
            generation is paused then.
        problem (`str`, *optional*): why it was not done.
        pause_ms (`float`): how long no step could run.
        scatter_ms (`list[float]`): of it, what each rank spent on reading and writing weights.
        rank (`int`, *optional*): the rank that failed.
    """

    state: Literal["done", "undone", "unproven"]
    problem: str | None
    pause_ms: float
    scatter_ms: list[float]
    rank: int | None = None


@dataclass(slots=True)
class Transaction:
    """One planned change of all ranks.

    Args:
        engine (`Engine`): the engine core.
        layout (`Layout`): of all ranks.
        before (`Digest`): of the live state.
        after (`Digest`, *optional*): what the result must be; without it the caller proves the result.
        label (`str`): of the new version.
        policy (`str`): what happens to the caches.
    """

    engine: Engine
    layout: Layout
    before: Digest
    after: Digest | None
    label: str
    policy: CachePolicy
    # hashes of what the ranks' plans add to each region, known to lead from `before` to `after`
    _planned: list[str] = field(default_factory=list, init=False)

    def expect(self, replies: Sequence[dict[str, Any]]) -> None:
        """Raise [`DigestMismatchError`] unless the ranks' changes lead from `before` to `after`."""
        if self.after is None:
            # from weights that nobody can vouch for; ranks that share a block may have to change it differently
            return
        change = total(self.layout.combine([reply["lanes"] for reply in replies]))
        if self.before + change != self.after:
            raise DigestMismatchError(
                f"version {self.label}: its manifest announces digest {self.after}, its files lead from "
                f"{self.before} to {self.before + change}; they are not what the trainer described. Its "
                "next anchor leads past them."
            )
        self._planned = [reply["lanes_sha256"] for reply in replies]

    def _require_planned(self, replies: Sequence[dict[str, Any]]) -> None:
        """Raise [`DigestMismatchError`] unless every rank wrote, bit for bit, the plan that was expected of it.

        A rank has compared what it replaced and what it wrote with its plan. There may be thousands of regions, so
        what they add up to is not sent and added up again while generation stands still.
        """
        if self.after is None:
            return
        for rank, (reply, planned) in enumerate(zip(replies, self._planned, strict=True)):
            if reply.get("lanes_sha256") != planned:
                error = DigestMismatchError(
                    f"version {self.label}: rank {rank} wrote another plan than the one that leads to {self.after}"
                )
                error.rank = rank
                raise error

    def run(self) -> Outcome:
        """Commit on all ranks. Runs inside [`Engine.between_steps`] and does not raise."""
        start_s = time.perf_counter()
        scatter_ms: list[float] = []
        try:
            self.engine.drain()
            replies = self.engine.rpc("delta_commit")
            raise_failures(replies)
            scatter_ms = [reply["scatter_ms"] for reply in replies]
            self._require_planned(replies)
            if any(reply["computed"] for reply in replies):
                raise_failures(self.engine.rpc("delta_compute"))
            self.engine.renew_caches(self.policy, self.label)
            self.engine.set_label(self.label)
        except Exception as error:
            restored = self._undo()
            if not restored:
                self.engine.pause()
            pause_ms = (time.perf_counter() - start_s) * 1000
            problem = str(error) or repr(error)
            rank = error.rank if isinstance(error, DeltaError) else None
            return Outcome("undone" if restored else "unproven", problem, pause_ms, scatter_ms, rank)
        return Outcome("done", None, (time.perf_counter() - start_s) * 1000, scatter_ms)

    def _undo(self) -> bool:
        try:
            replies = self.engine.rpc("delta_undo")
            if any(reply.get("computed") for reply in replies):
                replies = [*replies, *self.engine.rpc("delta_compute")]
            return all(reply.get("restored") is True for reply in replies)
        except Exception:
            # the executor itself failed: nobody knows what the ranks hold
            return False
