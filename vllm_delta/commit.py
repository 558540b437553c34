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
from typing import Any

from delta_wire.adapter import Adapter
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
from vllm_delta.live import Live
from vllm_delta.polling import Polling
from vllm_delta.ranks import Ranks
from vllm_delta.recovery import Recovery, Standing
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
        self._verifications = Verifications(settings.verify_frac)
        self._refused: LayoutError | None = None
        # manifest of a version that its deltas do not lead to
        self._wrong: str | None = None
        self._at = Standing(about=settings.bucket)
        self._polling = Polling(settings.poll_s)
        self._recovery = Recovery(engine, ranks, subscriber, self.status, self._polling, self._at, self.wake.set)
        self._course = Course(subscriber, settings.bucket)
        self._reporter = Reporter(subscriber, settings, self.status)
        self._cut = Cut(subscriber, settings, self.status)
        self.adapter = AdapterRun(
            engine, ranks, subscriber, self._course, self._cut, settings, self.status, self._recovery.hold
        )

    def step(self) -> float:
        """Do what can be done now. Never raises except [`EngineStopped`].

        Returns:
            `float`: seconds until the next step is due.
        """
        try:
            self._attach()
            if self._recovery.resync():
                # whatever is in its slot, and labelled as nothing now
                self.adapter.forget()
            self._recovery.clear_suspicion(self.adapter.prove)
            self._verify()
            self._follow()
            self._recovery.generate_again()
            self._polling.succeeded()
            self._reporter.report()
        except EngineStopped:
            raise
        except BaseException as error:
            # whatever ends a step, an exit in a store's client included, must not end the following in silence
            self._fail(error)
        self.status.looked = True
        if self._recovery.unproven is not None and self._polling.failures == 1:
            return 0.0
        return self._polling.pause_s()

    @property
    def attached(self) -> bool:
        """Whether the live weights are mapped and what they are is known."""
        return self._at.live is not None

    def hint(self) -> None:
        """The bucket may have changed; safe from any thread."""
        self._polling.hint()
        self.wake.set()

    def verify(self) -> Future[dict[str, Any]]:
        """Ask for the digest of all live weights; safe from any thread.

        Returns:
            `Future`: the answer of `POST /delta/verify`. Hashing runs beside the engine's steps, a small share of the
            time; no commit happens meanwhile.
        """
        answer = self._verifications.request()
        self.wake.set()
        return answer

    def suspect(self, reason: str) -> None:
        """Generate nothing until the live weights are proven. For the engine's thread, between two steps."""
        self._recovery.suspect(reason)

    def _fail(self, error: BaseException) -> None:
        unproven, about = self._recovery.unproven, self._at.about
        if unproven is None:
            self._recovery.generate_again()
        reason = str(error) or repr(error)
        if unproven is not None and unproven != reason:
            reason = f"generation is paused, the live weights are not proven: {unproven}; {reason}"
        if not isinstance(error, (DeltaError, OSError)) and reason != self.status.reason:
            logger.error("unexpected error while handling %s", about, exc_info=error)
        self.status.degraded(about, reason, error.rank if isinstance(error, DeltaError) else None)
        self._polling.failed(error)
        if self._at.live is None or unproven is not None:
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
        if self._at.live is not None:
            return
        self._at.about = "the live model"
        try:
            live = self._at.live = Live.attach(self._ranks, self._folder())
        except LayoutError as error:
            # the layout of a running server does not change any more
            self._refused = error
            raise
        self.status.attached(live.loaded, live.layout.num_ranks)

    def _verify(self) -> None:
        at = self._at
        at.about = "the live model"
        version = None if at.position is None else at.position.version
        problem = self._verifications.answer(at.here, at.digest, version, self.adapter)
        if problem is not None:
            self._recovery.hold(problem)

    # -- follow -------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        at = self._at
        at.about = self._settings.bucket
        if self._polling.forbidden_s:
            # woken by something else
            raise RateLimitedError(
                f"{at.about}: was asked too often and says so; it is asked again in "
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
            followed = self.adapter.position or at.position
            if followed is not None:
                raise FormatError(
                    f"{self._settings.bucket}/{POINTER_KEY} is gone, this server had followed it to "
                    f"{followed.version}; restore the bucket or restart the server on another one"
                )
            self.status.waiting(f"{self._settings.bucket} has no version yet")
            return
        at.about = str(target.version)
        if target.adapter is not None:
            self._follow_adapter(target, target.adapter)
            return
        if self.adapter.position is not None:
            raise SetupError(
                f"{self._settings.bucket} now holds a run of whole models, this server follows an adapter in it "
                f"({self.adapter.position.version}); restart the server"
            )
        self._course.require_model(at.here, target)
        if at.position is None:
            at.base = at.position = self._course.locate(at.here, target)
            label = str(at.position.version)
            self._engine.between_steps(lambda: self._engine.set_label(label))
        elif at.position.version.run != target.version.run:
            # another run in this one's place is followed as at a start: if the loaded checkpoint is a version of it
            at.base = self._course.locate(at.here, target)
        self._polling.found(news=at.position.version != target.version)
        while self._course.leads_on(at.position, target):
            self._advance(at.position, target)
        self._cut.over()
        self.status.serving(at.position.version, at.position.digest, self._course.remark)

    def _follow_adapter(self, target: Manifest, adapter: Adapter) -> None:
        position = self.adapter.position
        self._polling.found(news=position is None or position.version != target.version)
        self.adapter.follow(self._at.here, self._at.digest, target, adapter)

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
            self._at.here.layout,
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
                self._recovery.prove(str(error))
            self._wrong = manifest.sha256
            raise
        self.status.staged(manifest.version.seq, staged.size_bytes)
        began_s = time.perf_counter()
        outcome = self._engine.between_steps(transaction.run)
        commit_ms = (time.perf_counter() - began_s) * 1000
        if outcome.state != "done":
            self._take_back(position, manifest, outcome)
        # before anything else can fail: the weights are another version now
        self._at.position = Position(manifest.version, manifest.digest)
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
            self._recovery.hold(f"{problem}; the old weights could not be restored", outcome.rank)
        self._recovery.prove(problem)
        error = DigestMismatchError(f"{problem}; every rank serves {position.version} again")
        error.rank = outcome.rank
        raise error
