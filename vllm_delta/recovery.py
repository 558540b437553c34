# SPDX-License-Identifier: Apache-2.0
"""Proving the live weights, generating nothing while they are not proven, and bringing them back without a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from delta_wire.digest import Digest
from delta_wire.errors import DigestMismatchError, LayoutError, SetupError
from vllm_delta.engine import Engine
from vllm_delta.layout import total
from vllm_delta.live import Live
from vllm_delta.polling import Polling
from vllm_delta.ranks import Ranks
from vllm_delta.status import Status
from vllm_delta.subscriber import Position, Subscriber
from vllm_delta.transaction import Transaction

logger = logging.getLogger("vllm.vllm_delta.recovery")


@dataclass
class Standing:
    """What the driver knows of the live weights and of the run.

    Args:
        live (`Live`, *optional*): the live weights, once they are mapped.
        base (`Position`, *optional*): where the run's version of the loaded checkpoint is, once located.
        position (`Position`, *optional*): where the live weights are, once located.
        about (`str`): what is being done something with, for whoever reads an error.
    """

    live: Live | None = None
    base: Position | None = None
    position: Position | None = None
    about: str = ""

    @property
    def here(self) -> Live:
        assert self.live is not None, "the driver attaches first"
        return self.live

    @property
    def digest(self) -> Digest:
        """What the live weights must have."""
        return self.here.loaded if self.position is None else self.position.digest


class Recovery:
    """The live weights of one server, in doubt or not.

    Args:
        engine (`Engine`): the engine core.
        ranks (`Ranks`): side work on the ranks.
        subscriber (`Subscriber`): the bucket.
        status (`Status`): what is served.
        polling (`Polling`): begins anew when something is to be mended.
        standing (`Standing`): of the server.
        wake (callable): have the driver look at once.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        subscriber: Subscriber,
        status: Status,
        polling: Polling,
        standing: Standing,
        wake: Callable[[], None],
    ):
        self._engine = engine
        self._ranks = ranks
        self._subscriber = subscriber
        self._status = status
        self._polling = polling
        self._at = standing
        self._wake = wake
        # why the live weights are not known to be any version; generation is paused
        self.unproven: str | None = None
        # why something else may have written weights; generation is paused until they are proven
        self.suspected: str | None = None
        # proven again, but generation is still paused
        self.recovered = False

    def suspect(self, reason: str) -> None:
        """Generate nothing until the live weights are proven. For the engine's thread, between two steps."""
        self._engine.pause()
        self.suspected = reason
        self._wake()

    def hold(self, reason: str, rank: int | None = None) -> NoReturn:
        """Generate nothing until the weights are proven again."""
        self._engine.between_steps(self._engine.pause)
        self.unproven = reason
        # recovery begins at once, whatever was tried before
        self._polling.succeeded()
        error = DigestMismatchError(reason)
        error.rank = rank
        raise error

    def prove(self, context: str) -> None:
        """Digest all live weights; hold generation and raise unless they are the version they should be."""
        try:
            found = total(self._at.here.digests())
        except DigestMismatchError as error:
            self.hold(f"{context}: {error}")
        if found != self._at.digest:
            self.hold(f"{context}: the live weights have digest {found}, expected {self._at.digest}")

    def clear_suspicion(self, prove_adapter: Callable[[], str | None]) -> None:
        """Prove the live weights and generate again, or hold generation and raise.

        Args:
            prove_adapter (callable): what is wrong with the run's adapter.
        """
        if self.suspected is None:
            return
        reason, self.suspected = self.suspected, None
        self._at.about = "the live model"
        try:
            self.prove(reason)
        except DigestMismatchError:
            raise
        except Exception:
            self.suspected = self.suspected or reason
            raise
        problem = prove_adapter()
        if problem is not None:
            self.hold(f"{reason}: {problem}")
        self._engine.between_steps(self._resume)
        logger.info("%s, and the live weights are what they were; generation goes on", reason)

    def resync(self) -> bool:
        """Bring weights that are not proven back to a whole checkpoint, and prove them in full.

        Returns:
            `bool`: whether that was necessary.
        """
        if self.unproven is None:
            return False
        here = self._at.here
        self._at.about = str(here.folder)
        try:
            self._write_back(here.folder, here.loaded, self._at.base)
        except SetupError:
            # the folder that the server was started on is gone
            target = self._subscriber.target()
            if target is None:
                raise
            staged = self._subscriber.stage_checkpoint(target)
            self._at.about = str(staged.manifest.version)
            self._write_back(
                staged.path, staged.manifest.digest, Position(staged.manifest.version, staged.manifest.digest)
            )
        # generation goes on after the newest version has been committed: nobody gets an older one than before
        self.unproven, self.recovered = None, True
        return True

    def generate_again(self) -> None:
        """End the pause of a recovery."""
        if self.recovered:
            self.recovered = False
            self._engine.between_steps(self._resume)

    def _resume(self) -> None:
        # in the engine's thread, like a suspicion: what was written since the proof is not overlooked
        if self.suspected is None:
            self._engine.resume()

    def _write_back(self, folder: Path, digest: Digest, position: Position | None) -> None:
        here = self._at.here
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
        self._at.position = position
        self._status.moved(None if position is None else position.version, digest)
        self._ranks.release()
        logger.warning("the live weights are proven to be those of %s again", folder)
