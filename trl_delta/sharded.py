# SPDX-License-Identifier: Apache-2.0
"""Publishing from several training processes: each uploads its part of a version, the first commits them all.

The processes agree on two things through [`~trl_delta.ranks.Ranks`]. *Turns*: at every step the first process says
whether the next one becomes a version, so that all extract after the same step, and none waits for another. *Rounds*
([`~trl_delta.rounds.PartWriter`]): every version that was begun ends the same way everywhere. Nothing is lost by a
process that is slow or dies: weights that were not published are still different from the snapshot of the version
before.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from delta_wire.bucket import Published
from delta_wire.digest import Digest
from delta_wire.errors import StoreError
from delta_wire.manifest import AnchorPart
from delta_wire.state import Delta, OldBits, compose
from trl_delta.anchors import AnchorMaker
from trl_delta.publisher import Item, Publisher
from trl_delta.ranks import RankError, Ranks
from trl_delta.rounds import Abandoned, PartWriter, Skipped
from trl_delta.rows import Rows, upload_rows

logger = logging.getLogger(__name__)
# versions begun and not finished: one being uploaded, one extracted and waiting
_MAX_BEGUN = 2
_TURN_TIMEOUT_S = 600.0
_KEPT_TURNS = 1000


@dataclass
class _Begun(Item):
    """A version that all processes have begun.

    Args:
        failure (`Exception`, *optional*): why this process has no part of it.
        stops (`bool`): whether that ends publishing.
        is_anchored (`bool`): it gets an anchor out of what all processes own.
    """

    failure: Exception | None = None
    stops: bool = False
    is_anchored: bool = False


class ShardedPublisher(Publisher):
    """A [`Publisher`] on each of several training processes; versions have a part of each.

    The training thread calls [`ShardedPublisher.take_turn`] after every step, on every process alike, and
    [`ShardedPublisher.take_last_turn`] once at the end. Deltas do not coalesce here: while versions wait for the
    bucket or for a slow process there are no turns, and the next one finds all that has changed since.

    Args:
        ranks ([`~trl_delta.ranks.Ranks`]): of the training.
        writer ([`PartWriter`]): with a clone of `ranks`.
        starts, sizes (`dict`): flat checkpoint index of the first element that this process owns, and how many those
            are, by checkpoint name.
        snapshot (callable): a copy of what this process owns of a tensor as it was last handed over, uint16, flat.
        step, encoding, mirror, retry_min_s, retry_max_s: see [`Publisher`]; the mirror is of what this process owns.
        turn_timeout_s (`float`, *optional*): how long the first process may lag behind by a step.
    """

    def __init__(
        self,
        ranks: Ranks,
        writer: PartWriter,
        *,
        starts: dict[str, int],
        sizes: dict[str, int],
        snapshot: OldBits,
        step: int,
        encoding: str = "packed",
        mirror: dict[str, np.ndarray] | None = None,
        retry_min_s: float = 0.5,
        retry_max_s: float = 30.0,
        turn_timeout_s: float = _TURN_TIMEOUT_S,
    ):
        self._ranks = ranks
        self._starts = starts
        self._sizes = sizes
        self._turn_timeout_s = turn_timeout_s
        self._calls = 0
        self._left = False
        # what the first process has promised for the next call, known to itself without asking
        self._promise: dict[str, Any] = {"publish": True, "anchor": False}
        # whether the version of the current turn is to have an anchor
        self._is_anchored = False
        self._begun: deque[_Begun] = deque()
        # what was found for a version that did not come about, until the next one takes it along
        self._carried: Delta = {}
        # an error of the thread, until all processes act on it after the same step
        self._error: Exception | None = None
        self._parts = writer
        super().__init__(
            writer,
            step=step,
            encoding=encoding,
            mirror=mirror,
            snapshot=snapshot,
            retry_min_s=retry_min_s,
            retry_max_s=retry_max_s,
        )
        writer.cancelled = self._abandon.is_set
        if ranks.is_first:
            ranks.put("turn/1", self._promise)

    def take_turn(self, step: int, due: bool) -> bool:
        """Whether the weights of this step become a version. Called after every step by the training thread.

        Never waits for a bucket or for a slow upload: what the first process decides was decided a step ago.
        """
        self._calls += 1
        if self.failure is not None:
            return False
        try:
            told = self._promise if self._ranks.is_first else self._hear(f"turn/{self._calls}", self._turn_timeout_s)
            if self._ranks.is_first:
                self._promise_next(told if due else {})
        except RankError as error:
            self.failure = error
            return False
        return self._act_on(told, due)

    def take_last_turn(self, timeout_s: float) -> bool:
        """As [`ShardedPublisher.take_turn`] at the end of training, when the weights become a version in any case."""
        if self.failure is not None:
            return False
        try:
            if self._ranks.is_first:
                told = self._stop_or({"publish": True, "anchor": self.needs_step})
                self._ranks.put("turn/last", told)
            else:
                told = self._hear("turn/last", timeout_s)
        except RankError as error:
            self.failure = error
            return False
        return self._act_on(told, True)

    @property
    def _anchor_maker(self) -> AnchorMaker | None:
        # the version that has it is made in a round of all processes
        return self._parts.anchors

    @property
    def needs_step(self) -> bool:
        anchors = self._parts.anchors
        with self._changed:
            under_way = (*self._begun, self._in_flight)
            is_coming = any(isinstance(item, _Begun) and item.is_anchored for item in under_way)
        return anchors is not None and anchors.asked and not is_coming

    @property
    def stopped(self) -> Exception | None:
        # the first process knows of an error before all act on it
        return self.failure or self._error

    @property
    def has_room(self) -> bool:
        with self._changed:
            return self._under_way() < _MAX_BEGUN

    @property
    def newest_seq(self) -> int:
        with self._changed:
            return self._durable_seq + self._under_way()

    def submit(self, delta: Delta, *, digest: Digest, step: int) -> None:
        """Hand over what this process changed by a step whose turn it is; the same steps on every process."""
        with self._changed:
            if self._closing:
                raise RuntimeError("ShardedPublisher.submit: the publisher is closed")
            self.left_out = False
            self._begin(_Begun(delta, digest, step, is_anchored=self._is_anchored))

    def skip(self, failure: Exception, *, step: int, stops: bool) -> None:
        """The weights of a step whose turn it was could not be looked at here, so that no process publishes them.

        Takes the place of [`ShardedPublisher.submit`]: the others learn of it where they wait for this process' part.
        """
        with self._changed:
            self._begin(_Begun({}, Digest(), step, failure=failure, stops=stops, is_anchored=self._is_anchored))

    def stop(self, failure: Exception) -> None:
        with self._changed:
            self._error = failure
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the last version is durable; `False` when time runs out, publishing has stopped, or a process
        could not look at its weights."""
        durable = super().wait(timeout_s)
        self.failure = self.stopped
        # with nothing under way either, if it has stopped before this process had begun the last one
        return durable and self.failure is None

    def close(self, timeout_s: float) -> bool:
        durable = super().close(timeout_s)
        if not self._left:
            self._left = True
            try:
                self._ranks.leave()
            except RankError as error:
                logger.debug("delta sync: %s", error)
        return durable

    def _under_way(self) -> int:
        return len(self._begun) + (self._in_flight is not None)

    def _drained(self) -> bool:
        return self._under_way() == 0

    def _hear(self, key: str, timeout_s: float) -> dict[str, Any]:
        told = self._ranks.wait_for(key, timeout_s)
        if told is None:
            raise RankError(f"rank 0 has said nothing about {key} for {timeout_s:.0f} s; it has died, or it hangs")
        return told

    def _promise_next(self, told: dict[str, Any]) -> None:
        """Say what the next step is for, while this one does what it was `told`."""
        publishes = told.get("publish", False)
        with self._changed:
            begun = self._under_way() + publishes
        needs_anchor = self.needs_step and not (publishes and told["anchor"])
        self._promise = self._stop_or({"publish": begun < _MAX_BEGUN, "anchor": needs_anchor})
        self._ranks.put(f"turn/{self._calls + 1}", self._promise)
        # training in step keeps processes within one step of each other
        if self._calls > _KEPT_TURNS:
            self._ranks.remove(f"turn/{self._calls - _KEPT_TURNS}")

    def _stop_or(self, turn: dict[str, Any]) -> dict[str, Any]:
        return turn if self._error is None else {"stop": str(self._error)}

    def _act_on(self, told: dict[str, Any], due: bool) -> bool:
        if "stop" in told:
            self.failure = self._error or RankError(told["stop"])
            return False
        self._is_anchored = told["anchor"]
        return due and told["publish"]

    def _take(self) -> Item | None:
        with self._changed:
            self._changed.wait_for(lambda: self._begun or self._closing)
            self._in_flight = self._begun.popleft() if self._begun else None
            return self._in_flight

    def _record(self, item: Item, published: Published) -> None:
        if published.manifest.version.seq > self.durable_seq:
            super()._record(item, published)
            return
        # nothing has changed anywhere
        with self._changed:
            self._contains[self.durable_seq] = item.step
            self._in_flight = None
            self._changed.notify_all()

    def _publish(self, item: Item) -> Published | None:
        try:
            return super()._publish(item)
        except Abandoned as reason:
            logger.debug("delta sync: closed before the end of a version: %s", reason)
        except Skipped as reason:
            if self._ranks.is_first:
                self.notices.skipped(item.step, reason)
        return None

    def _write(self, item: Item, anchor: AnchorPart | None) -> Published:
        assert isinstance(item, _Begun) and anchor is None
        return self._parts.publish(
            item.delta,
            digest=item.digest,
            step=item.step,
            encoding=self._encoding,
            old_bits=None if self._mirror is None else self._mirror.__getitem__,
            failure=item.failure,
            stops=item.stops,
            rows=self._upload_rows if item.is_anchored else None,
        )

    def _upload_rows(self, seq: int) -> Rows | None:
        try:
            return upload_rows(self.writer.store, self._sizes, self._starts, self._bits_in_flight, seq=seq)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            logger.warning("delta sync: no anchor for version %d this time: %s", seq, error)
            return None

    def _bits_in_flight(self, name: str) -> np.ndarray:
        assert self._snapshot is not None, "it is always given"
        with self.extracting:
            bits = self._snapshot(name)
            with self._changed:
                later = [item.delta[name] for item in self._begun if name in item.delta]
        for part in reversed(later):
            assert part.old is not None, "the detector hands old bits over"
            bits[part.indices - self._starts[name]] = part.old
        return bits

    def _fail(self, error: Exception) -> None:
        self.stop(error)
        # outside of a round nobody would hear of it
        self._parts.leave(error)

    def _drop(self, item: Item) -> None:
        with self._changed:
            if self._begun:
                self._begun[0].delta = compose(item.delta, self._begun[0].delta)
            else:
                self._carried, self.left_out = item.delta, True
        super()._drop(item)

    def _begin(self, item: _Begun) -> None:
        item.delta, self._carried = compose(self._carried, item.delta), {}
        self._begun.append(item)
        self._changed.notify_all()

    def _advance_mirror(self, mirror: dict[str, np.ndarray], delta: Delta) -> None:
        for name, part in delta.items():
            mirror[name][part.indices - self._starts[name]] = part.new
