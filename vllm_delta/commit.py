# SPDX-License-Identifier: Apache-2.0
"""The state machine of a server: attach to the live weights, follow the bucket, commit, recover.

It runs in the driver thread and reaches the engine only through [`~vllm_delta.engine.Engine`]. Every failure ends in a
state and a reason; none leaves the weights half changed without generation being held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.errors import BaseMismatchError, DeltaError, DigestMismatchError, FormatError, LayoutError
from delta_wire.manifest import Ack, Manifest, VersionId
from delta_wire.state import TensorTable
from vllm_delta.engine import Engine, EngineStopped
from vllm_delta.layout import Layout, refuse, total
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.status import Status
from vllm_delta.subscriber import Position, Staged, Subscriber
from vllm_delta.transaction import Outcome, Transaction

logger = logging.getLogger("vllm.vllm_delta.commit")
_MAX_BACKOFF_S = 8.0


@dataclass(frozen=True, slots=True)
class Attached:
    """What is known about the live weights since the start.

    Args:
        layout (`Layout`): of all ranks.
        table (`TensorTable`): of the loaded checkpoint.
        folder (`Path`): of the loaded checkpoint.
        digest (`Digest`): of the weights as they were loaded.
    """

    layout: Layout
    table: TensorTable
    folder: Path
    digest: Digest


class Coordinator:
    """Drives one server.

    Args:
        engine (`Engine`): the engine core.
        ranks (`Ranks`): side work on the ranks.
        subscriber (`Subscriber`): the bucket.
        settings (`Settings`): of the server.
        folder (`Callable`): finds the folder of the loaded checkpoint.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        subscriber: Subscriber,
        settings: Settings,
        folder: Callable[[], Path],
    ):
        self._engine = engine
        self._ranks = ranks
        self._subscriber = subscriber
        self._settings = settings
        self._folder = folder
        self.status = Status(settings.server_id, settings.bucket)
        self.wake = threading.Event()
        self._verifications: SimpleQueue[Future[dict[str, Any]]] = SimpleQueue()
        self._attached: Attached | None = None
        self._refused: LayoutError | None = None
        # where the run's version of the loaded checkpoint is, and where the live weights are; `None` until located
        self._base: Position | None = None
        self._position: Position | None = None
        # why the live weights are not known to be any version; generation is paused
        self._unproven: str | None = None
        # manifest of a version whose delta did not lead to its digest
        self._wrong: str | None = None
        self._ignored: VersionId | None = None
        self._about = settings.bucket
        self._failures = 0
        self._acked: tuple[Any, ...] | None = None
        self._served_unix_s = time.time()
        self._ack_failed = False

    def step(self) -> float:
        """Do what can be done now. Never raises except [`EngineStopped`].

        Returns:
            `float`: seconds until the next step is due.
        """
        try:
            self._attach()
            if self._unproven is not None:
                self._resync()
            self._verify()
            self._follow()
            self._failures = 0
        except EngineStopped:
            raise
        except Exception as error:
            self._fail(error)
        self._ack()
        return min(max(self._settings.poll_s, _MAX_BACKOFF_S), self._settings.poll_s * 2**self._failures)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, DeltaError):
            logger.error("unexpected error while handling %s", self._about, exc_info=error)
        reason = str(error) or repr(error)
        if self._unproven is not None:
            reason = f"generation is paused, the live weights are not proven: {self._unproven}; {reason}"
        self.status.degraded(self._about, reason)
        self._failures = min(self._failures + 1, 16)
        self._subscriber.reset()
        self._drain_verifications(error)

    # -- attach -------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Map the live weights, check the map against the loaded checkpoint, and compute what they are."""
        if self._refused is not None:
            raise self._refused
        if self._attached is not None:
            return
        self._about = "the live model"
        folder = self._folder()
        table = Checkpoint(folder).table()
        try:
            layout = Layout(table, self._ranks.trace())
            problems: dict[str, str] = {}
            for rank, reply in enumerate(self._ranks.job("check")):
                for name, reason in reply["problems"].items():
                    problems.setdefault(name, f"{reason} (rank {rank})")
            refuse(problems)
        except LayoutError as error:
            # the layout of a running server does not change any more
            self._refused = error
            raise
        digest = total(self._live(layout))
        self._attached = Attached(layout, table, folder, digest)
        self.status.attached(digest, layout.num_ranks)

    def _live(self, layout: Layout) -> dict[str, Digest]:
        return layout.combine([reply["lanes"] for reply in self._ranks.job("digest")])

    @property
    def _here(self) -> Attached:
        assert self._attached is not None, "step() attaches first"
        return self._attached

    # -- follow -------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        self._about = self._settings.bucket
        target = self._subscriber.target()
        self.status.aims_at(None if target is None else target.version)
        if target is None:
            if self._position is not None:
                raise FormatError(
                    f"{self._settings.bucket}: LATEST is gone, this server had followed it to {self._position.version}; "
                    "restore the bucket or restart the server on another one"
                )
            self.status.waiting(f"{self._settings.bucket} has no version yet")
            return
        self._about = str(target.version)
        if self._position is None:
            self._locate(target)
        while (position := self._position) is not None and self._leads_on(position, target):
            self._advance(position, target)
        assert self._position is not None
        self.status.serving(self._position.version, self._position.digest)

    def _locate(self, target: Manifest) -> None:
        """Find the version of the run that the live weights are."""
        here = self._here
        self._subscriber.table(target).require_same(
            here.table, f"the run in {self._settings.bucket}", f"the served checkpoint {here.folder}"
        )
        position = self._subscriber.locate(here.digest, target)
        if position is None:
            raise BaseMismatchError(
                f"the served checkpoint {here.folder} is another base than that of the run in {self._settings.bucket}: "
                f"its digest is {here.digest}, version {target.version} has {target.digest} and no version before it "
                "has the served one. Start the server on the run's base or on a checkout of one of its versions "
                "(delta-wire checkout), or use another bucket."
            )
        self._engine.between_steps(lambda: self._engine.set_label(str(position.version)))
        self._base = self._position = position

    def _leads_on(self, position: Position, target: Manifest) -> bool:
        """Whether the target is ahead of the live weights."""
        here, there = position.version, target.version
        if here.run != there.run or there.seq > here.seq:
            return True
        if there.seq < here.seq and self._ignored != there:
            self._ignored = there
            logger.warning("%s: the pointer went back to %s; staying on %s", self._settings.bucket, there, here)
        if there.seq == here.seq and target.digest != position.digest:
            raise BaseMismatchError(
                f"{self._settings.bucket}: version {there} now has digest {target.digest}, this server committed it as "
                f"{here} with {position.digest}; versions never change. Give each run a bucket of its own."
            )
        return False

    def _advance(self, position: Position, target: Manifest) -> None:
        """Stage and commit one change that leads to the target or to an anchor on the way."""
        past = self._wrong == target.sha256 and self._subscriber.can_go_past(position, target)
        staged = self._subscriber.stage(position, target, past=past)
        try:
            self._subscriber.table(staged.manifest).require_same(
                self._here.table, f"version {staged.manifest.version}", f"the served checkpoint {self._here.folder}"
            )
            self._commit(position, staged)
        finally:
            self._subscriber.clear()

    def _commit(self, position: Position, staged: Staged) -> None:
        manifest = staged.manifest
        transaction = Transaction(
            self._engine,
            self._here.layout,
            position.digest,
            manifest.digest,
            str(manifest.version),
            self._settings.cache_policy,
        )
        replies = self._ranks.job(staged.kind, staged.path)
        try:
            # from the old bits as they are now: what cannot be right is refused before a weight is written
            transaction.expect(replies)
        except DigestMismatchError:
            self._wrong = manifest.sha256
            raise
        self.status.staged(manifest.version.seq)
        began_s = time.perf_counter()
        outcome = self._engine.between_steps(transaction.run)
        commit_ms = (time.perf_counter() - began_s) * 1000
        if outcome.state != "done":
            self._take_back(position, manifest, outcome)
        self._position = Position(manifest.version, manifest.digest)
        self._served_unix_s = time.time()
        self.status.committed(
            manifest.version,
            manifest.digest,
            {"pause": outcome.pause_ms, "commit": commit_ms, "scatter": outcome.scatter_ms},
        )
        self._ranks.release()
        logger.info(
            "serving %s: %d elements of %d versions in one commit, pause %.1f ms (writing %.1f ms)",
            manifest.version,
            sum(reply["num_changed"] for reply in replies),
            staged.num_versions,
            outcome.pause_ms,
            outcome.scatter_ms,
        )

    def _take_back(self, position: Position, manifest: Manifest, outcome: Outcome) -> None:
        """A commit failed and was undone. Prove the old state once more, over all weights, and raise."""
        problem = f"version {manifest.version} could not be committed: {outcome.problem}"
        if outcome.state == "unproven":
            self._unproven = f"{problem}; the old weights could not be restored"
            raise LayoutError(self._unproven)
        self._prove(position, problem)
        raise DigestMismatchError(f"{problem}; every rank serves {position.version} again")

    # -- prove and recover --------------------------------------------------------------------------------------

    def _prove(self, position: Position, context: str) -> dict[str, Digest]:
        """Digest all live weights; hold generation and raise unless they are the version they should be."""
        try:
            sums = self._live(self._here.layout)
        except DigestMismatchError as error:
            self._hold(f"{context}: {error}")
        if total(sums) != position.digest:
            self._hold(f"{context}: the live weights have digest {total(sums)}, expected {position.digest}")
        return sums

    def _hold(self, reason: str) -> None:
        self._unproven = reason
        self._engine.between_steps(self._engine.pause)
        raise DigestMismatchError(reason)

    def _resync(self) -> None:
        """Bring the live weights back to the loaded checkpoint, prove them in full, and generate again."""
        here = self._here
        self._about = str(here.folder)
        label = "default" if self._base is None else str(self._base.version)
        self._ranks.job("plan_checkpoint", here.folder)
        transaction = Transaction(self._engine, here.layout, Digest(), None, label, "reset")
        outcome = self._engine.between_steps(transaction.run)
        if outcome.state != "done":
            raise LayoutError(f"{here.folder} could not be written back: {outcome.problem}")
        found = total(self._live(here.layout))
        if found != here.digest:
            raise DigestMismatchError(
                f"after writing {here.folder} back the live weights have digest {found}, expected {here.digest}; "
                "restart the server if this goes on"
            )
        self._position = self._base
        logger.warning("the live weights are those of %s again, generation goes on", here.folder)
        self._unproven = None
        self._engine.between_steps(self._engine.resume)
        self._ranks.release()

    # -- verify -------------------------------------------------------------------------------------------------

    def verify(self) -> Future[dict[str, Any]]:
        """Ask for the digest of all live weights; safe from any thread.

        Returns:
            `Future`: the answer of `POST /delta/verify`. Hashing runs beside the engine's steps; no commit happens
            meanwhile.
        """
        answer: Future[dict[str, Any]] = Future()
        self._verifications.put(answer)
        self.wake.set()
        return answer

    def _verify(self) -> None:
        waiting = self._take_verifications()
        if not waiting:
            return
        here, position = self._here, self._position
        self._about = "the live model"
        expected = here.digest if position is None else position.digest
        sums: dict[str, Digest] = {}
        problem: str | None = None
        try:
            sums = self._live(here.layout)
            if total(sums) != expected:
                problem = f"a verification found digest {total(sums)}, expected {expected}"
        except DigestMismatchError as error:
            problem = str(error)
        except Exception as error:
            for answer in waiting:
                answer.set_exception(error)
            raise
        for answer in waiting:
            answer.set_result(
                {
                    "digest": str(total(sums)),
                    "expected": str(expected),
                    "equal": problem is None,
                    "version": None if position is None else str(position.version),
                    "num_params": here.table.num_params,
                    "ranks": here.layout.num_ranks,
                    "tensors": {name: str(digest) for name, digest in sorted(sums.items())},
                }
            )
        if problem is not None:
            self._hold(problem)

    def _take_verifications(self) -> list[Future[dict[str, Any]]]:
        taken = []
        while True:
            try:
                taken.append(self._verifications.get_nowait())
            except Empty:
                return taken

    def _drain_verifications(self, error: Exception) -> None:
        if self._attached is None:
            for answer in self._take_verifications():
                answer.set_exception(error)

    # -- ack ----------------------------------------------------------------------------------------------------

    def _ack(self) -> None:
        """Tell the bucket what is served, whenever that has changed."""
        status = self.status
        state = status.state
        if not self._settings.ack or state == "waiting":
            return
        news = (status.version, status.digest, state, status.reason)
        if news == self._acked:
            return
        ack = Ack(
            server=self._settings.server_id,
            version=status.version,
            digest=status.digest,
            state=state,
            reason=status.reason,
            pause_ms=status.pause_ms,
            served_unix_s=self._served_unix_s,
        )
        try:
            self._subscriber.write_ack(ack)
        except DeltaError as error:
            if not self._ack_failed:
                logger.warning("cannot report to the bucket what is served: %s", error)
            self._ack_failed = True
            return
        self._ack_failed = False
        self._acked = news
