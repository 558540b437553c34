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
from pathlib import Path
from typing import Any, NoReturn

from delta_wire.adapter import Adapter
from delta_wire.digest import Digest
from delta_wire.errors import (
    DeltaError,
    DigestMismatchError,
    FormatError,
    LayoutError,
    RateLimitedError,
    SetupError,
)
from delta_wire.manifest import POINTER_KEY, Manifest
from vllm_delta.acks import Reporter
from vllm_delta.adapter_run import AdapterRun
from vllm_delta.course import Course
from vllm_delta.cut import Cut
from vllm_delta.engine import Engine, EngineStopped
from vllm_delta.layout import total
from vllm_delta.live import Live
from vllm_delta.polling import Polling
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.status import Status
from vllm_delta.subscriber import Position, Staged, Subscriber
from vllm_delta.transaction import Outcome, Transaction
from vllm_delta.verify import Verifications

logger = logging.getLogger("vllm.vllm_delta.commit")


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
        self._verifications = Verifications()
        self._live: Live | None = None
        self._refused: LayoutError | None = None
        # where the run's version of the loaded checkpoint is, and where the live weights are; `None` until located
        self._base: Position | None = None
        self._position: Position | None = None
        # why the live weights are not known to be any version; generation is paused
        self._unproven: str | None = None
        # why something else may have written weights; generation is paused until they are proven
        self._suspected: str | None = None
        # proven again, but generation is still paused
        self._recovered = False
        # manifest of a version that its deltas do not lead to
        self._wrong: str | None = None
        self._about = settings.bucket
        self._polling = Polling(settings.poll_s)
        self._course = Course(subscriber, settings.bucket)
        self._reporter = Reporter(subscriber, settings, self.status)
        self._cut = Cut(subscriber, settings, self.status)
        self.adapter = AdapterRun(
            engine, ranks, subscriber, self._course, self._cut, settings, self.status, self._hold
        )

    def step(self) -> float:
        """Do what can be done now. Never raises except [`EngineStopped`].

        Returns:
            `float`: seconds until the next step is due.
        """
        try:
            self._attach()
            if self._unproven is not None:
                self._resync()
            if self._suspected is not None:
                self._clear_suspicion()
            self._verify()
            self._follow()
            self._generate_again()
            self._polling.succeeded()
            self._reporter.report()
        except EngineStopped:
            raise
        except BaseException as error:
            # whatever ends a step, an exit in a store's client included, must not end the following in silence
            self._fail(error)
        if self._unproven is not None and self._polling.failures == 1:
            return 0.0
        return self._polling.pause_s()

    def hint(self) -> None:
        """The bucket may have changed; safe from any thread."""
        self._polling.hint()
        self.wake.set()

    def verify(self) -> Future[dict[str, Any]]:
        """Ask for the digest of all live weights; safe from any thread.

        Returns:
            `Future`: the answer of `POST /delta/verify`. Hashing runs beside the engine's steps; no commit happens
            meanwhile.
        """
        answer = self._verifications.request()
        self.wake.set()
        return answer

    def suspect(self, reason: str) -> None:
        """Generate nothing until the live weights are proven. For the engine's thread, between two steps."""
        self._engine.pause()
        self._suspected = reason
        self.wake.set()

    def _fail(self, error: BaseException) -> None:
        if self._unproven is None:
            self._generate_again()
        reason = str(error) or repr(error)
        if self._unproven is not None and self._unproven != reason:
            reason = f"generation is paused, the live weights are not proven: {self._unproven}; {reason}"
        if not isinstance(error, (DeltaError, OSError)) and reason != self.status.reason:
            logger.error("unexpected error while handling %s", self._about, exc_info=error)
        self.status.degraded(self._about, reason, error.rank if isinstance(error, DeltaError) else None)
        self._polling.failed(error)
        if self._live is None or self._unproven is not None:
            self._verifications.fail(error)
        # the bucket may have been replaced: open it anew next time
        self._subscriber.reset()
        try:
            self._reporter.report()
        except Exception:
            logger.exception("cannot report to the bucket what is served")

    # -- attach -------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        if self._refused is not None:
            raise self._refused
        if self._live is not None:
            return
        self._about = "the live model"
        try:
            self._live = Live.attach(self._ranks, self._folder())
        except LayoutError as error:
            # the layout of a running server does not change any more
            self._refused = error
            raise
        self.status.attached(self._live.loaded, self._live.layout.num_ranks)

    @property
    def _here(self) -> Live:
        assert self._live is not None, "step() attaches first"
        return self._live

    # -- follow -------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        self._about = self._settings.bucket
        if self._polling.forbidden_s:
            # woken by something else
            raise RateLimitedError(
                f"{self._about}: was asked too often and says so; it is asked again in "
                f"{self._polling.forbidden_s:.0f} s. Poll more slowly (DELTA_SYNC_POLL_S) or use fewer servers.",
                self._polling.forbidden_s,
            )
        try:
            target = self._subscriber.target()
        except Exception:
            # nobody knows what is newest
            self.status.aims_at(None)
            raise
        self.status.aims_at(None if target is None else target.version)
        if target is None:
            followed = self.adapter.position or self._position
            if followed is not None:
                raise FormatError(
                    f"{self._settings.bucket}/{POINTER_KEY} is gone, this server had followed it to "
                    f"{followed.version}; restore the bucket or restart the server on another one"
                )
            self.status.waiting(f"{self._settings.bucket} has no version yet")
            return
        self._about = str(target.version)
        if target.adapter is not None:
            self._follow_adapter(target, target.adapter)
            return
        if self.adapter.position is not None:
            raise SetupError(
                f"{self._settings.bucket} now holds a run of whole models, this server follows an adapter in it "
                f"({self.adapter.position.version}); restart the server"
            )
        self._course.require_model(self._here, target)
        if self._position is None:
            self._base = self._position = self._course.locate(self._here, target)
            label = str(self._position.version)
            self._engine.between_steps(lambda: self._engine.set_label(label))
        elif self._position.version.run != target.version.run:
            # another run in this one's place is followed as at a start: if the loaded checkpoint is a version of it
            self._base = self._course.locate(self._here, target)
        self._polling.found(news=self._position.version != target.version)
        while self._course.leads_on(self._position, target):
            self._advance(self._position, target)
        self._cut.over()
        self.status.serving(self._position.version, self._position.digest, self._course.remark)

    def _follow_adapter(self, target: Manifest, adapter: Adapter) -> None:
        at = self.adapter.position
        self._polling.found(news=at is None or at.version != target.version)
        base = self._here.loaded if self._position is None else self._position.digest
        self.adapter.follow(self._here, base, target, adapter)

    def _advance(self, position: Position, target: Manifest) -> None:
        """Stage and commit one change that leads to the target or to an anchor on the way."""
        past = self._wrong == target.sha256 and self._subscriber.has_anchor_after(position.version, target)
        with self._cut.noticed(target):
            staged = self._subscriber.stage(position, target, past=past)
        try:
            self._commit(position, staged)
        finally:
            self._subscriber.clear()
        self._ranks.release()

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
            with self._cut.noticed(manifest):
                transaction.expect(replies)
        except DigestMismatchError as error:
            # the delta is wrong, or what it was to change is no longer what was proven
            if self._wrong != manifest.sha256:
                self._prove(position, str(error))
            self._wrong = manifest.sha256
            raise
        self.status.staged(manifest.version.seq, staged.size_bytes)
        began_s = time.perf_counter()
        outcome = self._engine.between_steps(transaction.run)
        commit_ms = (time.perf_counter() - began_s) * 1000
        if outcome.state != "done":
            self._take_back(position, manifest, outcome)
        # before anything else can fail: the weights are another version now
        self._position = Position(manifest.version, manifest.digest)
        self.status.committed(manifest.version, manifest.digest, outcome.pause_ms, commit_ms, outcome.scatter_ms)
        logger.info(
            "serving %s: %d elements of %d versions in one commit, pause %.1f ms (writing %.1f ms)",
            manifest.version,
            sum(reply["num_changed"] for reply in replies),
            staged.num_versions,
            outcome.pause_ms,
            max(outcome.scatter_ms),
        )

    def _take_back(self, position: Position, manifest: Manifest, outcome: Outcome) -> None:
        """A commit failed and was undone. Prove the old state once more, over all weights, and raise."""
        problem = f"version {manifest.version} could not be committed: {outcome.problem}"
        if outcome.state == "unproven":
            self._hold(f"{problem}; the old weights could not be restored", outcome.rank)
        self._prove(position, problem)
        error = DigestMismatchError(f"{problem}; every rank serves {position.version} again")
        error.rank = outcome.rank
        raise error

    # -- prove and recover --------------------------------------------------------------------------------------

    def _verify(self) -> None:
        here, position = self._here, self._position
        self._about = "the live model"
        expected, version = (here.loaded, None) if position is None else (position.digest, position.version)
        problem = self._verifications.answer(here, expected, version, self.adapter)
        if problem is not None:
            self._hold(problem)

    def _prove(self, position: Position, context: str) -> None:
        """Digest all live weights; hold generation and raise unless they are the version they should be."""
        try:
            found = total(self._here.digests())
        except DigestMismatchError as error:
            self._hold(f"{context}: {error}")
        if found != position.digest:
            self._hold(f"{context}: the live weights have digest {found}, expected {position.digest}")

    def _clear_suspicion(self) -> None:
        """Prove the live weights and generate again, or hold generation and raise."""
        reason, self._suspected = self._suspected, None
        here, position = self._here, self._position
        self._about = "the live model"
        try:
            found = total(here.digests())
        except DigestMismatchError as error:
            self._hold(f"{reason}: {error}")
        except Exception:
            self._suspected = self._suspected or reason
            raise
        expected = here.loaded if position is None else position.digest
        if found != expected:
            self._hold(f"{reason}: the live weights have digest {found}, expected {expected}")
        problem = self.adapter.prove()
        if problem is not None:
            self._hold(f"{reason}: {problem}")
        self._engine.between_steps(self._resume)
        logger.info("%s, and the live weights are what they were; generation goes on", reason)

    def _resume(self) -> None:
        # in the engine's thread, like a suspicion: what was written since the proof is not overlooked
        if self._suspected is None:
            self._engine.resume()

    def _hold(self, reason: str, rank: int | None = None) -> NoReturn:
        """Generate nothing until the weights are proven again."""
        self._engine.between_steps(self._engine.pause)
        self._unproven = reason
        # recovery begins at once, whatever was tried before
        self._polling.succeeded()
        error = DigestMismatchError(reason)
        error.rank = rank
        raise error

    def _resync(self) -> None:
        """Bring the live weights back to a whole checkpoint, prove them in full, and generate again."""
        here = self._here
        self._about = str(here.folder)
        try:
            self._write_back(here.folder, here.loaded, self._base)
        except SetupError:
            # the folder that the server was started on is gone
            target = self._subscriber.target()
            if target is None:
                raise
            staged = self._subscriber.stage_checkpoint(target)
            self._about = str(staged.manifest.version)
            self._write_back(
                staged.path, staged.manifest.digest, Position(staged.manifest.version, staged.manifest.digest)
            )
        # whatever is in its slot, and labelled as nothing now
        self.adapter.forget()
        # generation goes on after the newest version has been committed: nobody gets an older one than before
        self._unproven, self._recovered = None, True

    def _generate_again(self) -> None:
        """End the pause of a recovery."""
        if self._recovered:
            self._recovered = False
            self._engine.between_steps(self._resume)

    def _write_back(self, folder: Path, digest: Digest, position: Position | None) -> None:
        here = self._here
        label = "default" if position is None else str(position.version)
        self._ranks.job("plan_checkpoint", folder)
        # caches may hold what wrong weights computed
        transaction = Transaction(self._engine, here.layout, Digest(), None, label, "reset")
        outcome = self._engine.between_steps(transaction.run)
        if outcome.state != "done":
            raise LayoutError(f"{folder} could not be written back: {outcome.problem}")
        found = total(here.digests())
        if found != digest:
            raise DigestMismatchError(
                f"after writing {folder} back the live weights have digest {found}, expected {digest}; restart the "
                "server if this goes on"
            )
        self._position = position
        self.status.moved(None if position is None else position.version, digest)
        self._ranks.release()
        logger.warning("the live weights are proven to be those of %s again", folder)
