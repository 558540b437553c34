# SPDX-License-Identifier: Apache-2.0
"""Following a run whose versions are adapters for the served model; the part of the coordinator that does.

The base weights stay what they were loaded as and are proven as such; versions are exchanged in one slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from delta_wire.adapter import Adapter
from delta_wire.digest import Digest
from delta_wire.errors import BaseMismatchError, DigestMismatchError, LayoutError
from delta_wire.manifest import Manifest
from vllm_delta.adapter_files import AdapterFiles
from vllm_delta.adapter_label import adapter_label
from vllm_delta.course import Course
from vllm_delta.cut import Cut
from vllm_delta.engine import Engine
from vllm_delta.live import Live
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.status import Status
from vllm_delta.subscriber import Position, Subscriber
from vllm_delta.transaction import Outcome, Transaction

logger = logging.getLogger("vllm.vllm_delta.adapter_run")
_SHOWN = 6


class AdapterRun:
    """The adapter of one server.

    Args:
        engine (`Engine`): the engine core.
        ranks (`Ranks`): side work on the ranks.
        subscriber (`Subscriber`): the bucket.
        course (`Course`): whether versions lead on.
        cut (`Cut`): whether anything leads there.
        settings (`Settings`): of the server.
        status (`Status`): what is served.
        hold (callable): generate nothing until everything is proven again; raises.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        subscriber: Subscriber,
        course: Course,
        cut: Cut,
        settings: Settings,
        status: Status,
        hold: Callable[[str, int | None], NoReturn],
    ):
        self._engine = engine
        self._ranks = ranks
        self._subscriber = subscriber
        self._course = course
        self._cut = cut
        self._settings = settings
        self._status = status
        self._hold = hold
        self._files = AdapterFiles(subscriber)
        # of the version in the slot; `None` before the first, and while what is there is not proven
        self.position: Position | None = None

    def forget(self) -> None:
        """What is in the slot is not proven any more, or not labelled: the next version is put there anew."""
        self.position = None

    def follow(self, here: Live, base: Digest, target: Manifest, adapter: Adapter) -> None:
        """Serve the newest version, or raise and leave what is served as it is.

        Args:
            here (`Live`): the base model.
            base (`Digest`): of its live weights.
            target (`Manifest`): newest version.
            adapter (`Adapter`): what it says about itself.
        """
        if base != adapter.base_digest:
            raise BaseMismatchError(
                f"the adapter in {self._settings.bucket} was trained on a base model with digest "
                f"{adapter.base_digest} ({adapter.base_reference}), the served weights of {here.folder} have digest "
                f"{base}; serve the base it was trained on, or use another bucket"
            )
        while self.position is None or self._course.leads_on(self.position, target):
            self._advance(here, target, adapter)
        self._cut.over()
        self._status.serving(self.position.version, self.position.digest, self._course.remark)

    def prove(self) -> str | None:
        """Compare what the ranks hold with the version, in full. Returns what is wrong."""
        position = self.position
        if position is None:
            return None
        for rank, reply in enumerate(self._ranks.job("check_adapter")):
            if reply["problem"] is not None:
                return f"rank {rank}: {reply['problem']}"
            if reply["digest"] != str(position.digest):
                return (
                    f"rank {rank}: the adapter that was compared has digest {reply['digest']}, version "
                    f"{position.version} has {position.digest}"
                )
        return None

    def _advance(self, here: Live, target: Manifest, adapter: Adapter) -> None:
        if self.position is not None:
            self._subscriber.refuse_fork(self.position, target)
        with self._cut.noticed(target):
            folder = self._files.stage(target)
        self._require_read(self._ranks.job("plan_adapter", folder, adapter.name), target, folder)
        self._status.staged(target.version.seq, sum(file.stat().st_size for file in folder.iterdir()))
        label = adapter_label(str(target.version), adapter.name)
        transaction = Transaction(self._engine, here.layout, Digest(), None, label, self._settings.cache_policy)
        began_s = time.perf_counter()
        outcome = self._engine.between_steps(transaction.run)
        commit_ms = (time.perf_counter() - began_s) * 1000
        if outcome.state != "done":
            self._take_back(target, outcome)
        self.position = Position(target.version, target.digest)
        self._status.carries(adapter)
        self._status.committed(target.version, target.digest, outcome.pause_ms, commit_ms, outcome.scatter_ms)
        self._files.keep_only(folder)
        self._ranks.release()
        logger.info("serving adapter %s as %s, pause %.1f ms", target.version, adapter.name, outcome.pause_ms)

    def _require_read(self, replies: list[dict[str, Any]], target: Manifest, folder: Path) -> None:
        used: set[str] = set()
        for rank, reply in enumerate(replies):
            if reply["digest"] != str(target.digest):
                raise DigestMismatchError(
                    f"rank {rank}: {folder} has digest {reply['digest']} there, version {target.version} has "
                    f"{target.digest}; every rank must see the same folder (DELTA_SYNC_STAGE_DIR)"
                )
            used.update(reply["used"])
        unused = [name for name in self._subscriber.table(target) if name not in used]
        if unused:
            more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
            raise LayoutError(
                f"no layer of the served model takes {len(unused)} tensors of the adapter: "
                f"{', '.join(unused[:_SHOWN])}{more}; publish with delta_sync_adapter=merged"
            )

    def _take_back(self, target: Manifest, outcome: Outcome) -> NoReturn:
        problem = f"version {target.version} of the adapter could not be put in place: {outcome.problem}"
        if outcome.state == "unproven":
            self.forget()
            self._hold(f"{problem}; the old adapter could not be restored", outcome.rank)
        served = "no adapter" if self.position is None else str(self.position.version)
        error = DigestMismatchError(f"{problem}; every rank serves {served} again")
        error.rank = outcome.rank
        raise error
