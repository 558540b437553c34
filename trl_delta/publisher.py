# SPDX-License-Identifier: Apache-2.0
"""Publishing in the background: one delta on its way, one waiting, and no change ever lost."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from delta_wire.acks import Ack
from delta_wire.bucket import Published
from delta_wire.digest import Digest
from delta_wire.errors import RateLimitedError
from delta_wire.manifest import AnchorPart, VersionId
from delta_wire.state import Delta, OldBits, compose
from delta_wire.stores import Store
from trl_delta.anchors import AnchorMaker
from trl_delta.ledger import Ledger
from trl_delta.notices import Notices

# how long a thread that hangs in a call to the store is waited for when closing
_JOIN_S = 5.0


class Writer(Protocol):
    """What the publisher needs of a [`~delta_wire.bucket.BucketWriter`]."""

    @property
    def store(self) -> Store: ...

    @property
    def version(self) -> VersionId: ...

    @property
    def digest(self) -> Digest: ...

    @property
    def next_seq(self) -> int: ...

    def publish(
        self,
        delta: Delta,
        *,
        digest: Digest,
        step: int | None,
        encoding: str,
        old_bits: OldBits | None,
        anchor: AnchorPart | None,
    ) -> Published: ...


@dataclass
class Item:
    """What is on its way to become a version.

    Args:
        delta (`Delta`): since the one before.
        digest ([`~delta_wire.digest.Digest`]): of the state after it.
        step (`int`): optimizer step of that state.
        submitted_s (`float`): when it was handed over.
        is_answer (`bool`): there is nothing to publish but the anchor that a server has asked for.
    """

    delta: Delta
    digest: Digest
    step: int
    submitted_s: float = field(default_factory=time.monotonic)
    is_answer: bool = False


class Publisher(Ledger):
    """Owns a writer and the thread that calls it.

    The training thread hands deltas over and never waits. While one is being published, later ones coalesce into a
    single one that waits. A bucket out of reach is tried again, ever more slowly, for as long as the publisher is
    open; any other error stops it and is kept in `failure`.

    Args:
        writer ([`~delta_wire.bucket.BucketWriter`]): its version is the state that the first delta applies to.
        step (`int`): optimizer step of that state.
        encoding (`str`, *optional*, defaults to `"packed"`): encoding of the deltas.
        mirror (`dict`, *optional*): all bits of the writer's version by tensor name, uint16, flat, for encodings that
            need them; kept up to date with what is durable.
        anchors ([`~trl_delta.anchors.AnchorMaker`], *optional*): knows when a version gets an anchor; needs
            `snapshot`.
        snapshot (callable, *optional*): a copy of a tensor as it was last handed over, uint16.
        retry_min_s, retry_max_s (`float`, *optional*): first and longest pause between two tries.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        step: int,
        encoding: str = "packed",
        mirror: dict[str, np.ndarray] | None = None,
        anchors: AnchorMaker | None = None,
        snapshot: OldBits | None = None,
        retry_min_s: float = 0.5,
        retry_max_s: float = 30.0,
    ):
        super().__init__(writer.version.seq, writer.digest, step)
        self.writer = writer
        self.failure: Exception | None = None
        self._encoding = encoding
        self._mirror = mirror
        self._anchors = anchors
        self._snapshot = snapshot
        # held while the snapshot moves and until what changed has been handed over
        self.extracting = threading.Lock()
        self._retry_s = (retry_min_s, retry_max_s)
        self.notices = Notices(writer.store.url)
        self._pending: Item | None = None
        self._in_flight: Item | None = None
        # the newest weights that were to be published could not be looked at
        self.left_out = False
        self._closing = False
        self._abandon = threading.Event()
        self._thread = threading.Thread(target=self._run, name="delta-publisher", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> Exception | None:
        """What has ended publishing; `None` while it goes on."""
        return self.failure

    @property
    def has_room(self) -> bool:
        """Whether another delta can be handed over. Here always: it is folded into the one that waits."""
        return True

    @property
    def needs_step(self) -> bool:
        """Whether a server waits for an anchor that only the next step can bring. Here never."""
        return False

    @property
    def newest_seq(self) -> int:
        """Sequence number that the newest weights handed over will have, once all on its way is durable."""
        with self._changed:
            return self._durable_seq + sum(item is not None for item in (self._in_flight, self._pending))

    def heed(self, acks: list[Ack]) -> None:
        """Take note of what servers ask for in their acknowledgements, all that there are. From any thread."""
        maker, run = self._anchor_maker, self.writer.version.run
        if maker is not None:
            maker.requests.heed(acks, run, self._durable_seq)
            with self._changed:
                self._changed.notify_all()
            return
        ack = next((ack for ack in acks if ack.needs_anchor is not None and ack.needs_anchor.run == run), None)
        if ack is not None:
            self.notices.no_anchor(ack)

    @property
    def _anchor_maker(self) -> AnchorMaker | None:
        return self._anchors

    def take_turn(self, step: int, due: bool) -> bool:
        """Whether to extract and hand over the weights of this step, which are `due`. Called after every step."""
        return due

    def take_last_turn(self, timeout_s: float) -> bool:
        """Whether to extract and hand over the last weights of the training."""
        return True

    def submit(self, delta: Delta, *, digest: Digest, step: int) -> None:
        """Hand a delta over. Called by the training thread, which holds `extracting` if there are anchors.

        Args:
            delta (`Delta`): change since the previous call, with old bits; may be empty.
            digest ([`~delta_wire.digest.Digest`]): of the state after it.
            step (`int`): optimizer step of that state.
        """
        with self._changed:
            if self._closing:
                raise RuntimeError("Publisher.submit: the publisher is closed")
            self.left_out = False
            if self._pending is not None:
                pending = self._pending
                pending.delta, pending.digest, pending.step = compose(pending.delta, delta), digest, step
            elif delta or self._in_flight is not None:
                self._pending = Item(delta, digest, step)
            else:
                self._contains[self._durable_seq] = step
            self._changed.notify_all()

    def skip(self, failure: Exception, *, step: int, stops: bool) -> None:
        """The weights of a step whose turn it was could not be looked at; the next delta contains what they change.

        Args:
            failure (`Exception`): why.
            step (`int`): optimizer step.
            stops (`bool`): whether that ends publishing.
        """
        if stops:
            self.stop(failure)
        else:
            self.left_out = True
            self.notices.skipped(step, failure)

    def stop(self, failure: Exception) -> None:
        """End publishing by an error, which `failure` has then."""
        with self._changed:
            self.failure = failure
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything handed over is durable; `False` when time runs out, publishing has stopped, or the
        newest weights could not be handed over."""
        with self._changed:
            self._changed.wait_for(lambda: self._drained() or self.stopped is not None, timeout_s)
            return self._drained() and not self.left_out

    def close(self, timeout_s: float) -> bool:
        """Wait as [`Publisher.wait`] does, then end the thread. Safe to call again."""
        durable = self.wait(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._abandon.set()
        self._thread.join(_JOIN_S)
        return durable

    def _drained(self) -> bool:
        return self._pending is None and self._in_flight is None

    def _run(self) -> None:
        try:
            while (item := self._take()) is not None:
                published = self._publish(item)
                if published is not None:
                    self._record(item, published)
                elif self._abandon.is_set():
                    return
                else:
                    self._drop(item)
        except Exception as error:
            # kept for the training thread: an error that dies with this thread would look like a slow bucket
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.stop(error)

    def _take(self) -> Item | None:
        """The next item, now in flight; `None` once the publisher is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._pending is not None or self._closing or self._is_asked())
                item, self._pending = self._pending, None
                if item is None and not self._closing:
                    # a server needs an anchor, and training may be waiting for it: a version without a change
                    seq = self._durable_seq
                    item = Item({}, self._digests[seq], self._contains[seq], is_answer=True)
                elif item is not None and not item.delta:
                    # changes that undid each other
                    self._contains[self._durable_seq] = item.step
                    self._changed.notify_all()
                    continue
                self._in_flight = item
                return item

    def _publish(self, item: Item) -> Published | None:
        """Try until the item is durable; `None` once the publisher is closed, or if there is nothing to publish."""
        pause_s, longest_s = self._retry_s
        while True:
            try:
                anchor = self._make_anchor(item)
                if item.is_answer and anchor is None:
                    return None
                return self._write(item, anchor)
            except OSError as error:
                # of the bucket, or of the folder for temporary files
                self.notices.outage(self._durable_seq + 1, error)
                limited_s = error.retry_after_s if isinstance(error, RateLimitedError) else 0.0
                if self._abandon.wait(max(pause_s, limited_s)):
                    return None
                pause_s = min(2 * pause_s, longest_s)

    def _write(self, item: Item, anchor: AnchorPart | None) -> Published:
        return self.writer.publish(
            item.delta,
            digest=item.digest,
            step=item.step,
            encoding=self._encoding,
            old_bits=None if self._mirror is None else self._mirror.__getitem__,
            anchor=anchor,
        )

    def _drop(self, item: Item) -> None:
        """There is no version for this item."""
        with self._changed:
            self._in_flight = None
            self._changed.notify_all()

    def _advance_mirror(self, mirror: dict[str, np.ndarray], delta: Delta) -> None:
        for name, part in delta.items():
            mirror[name][part.indices] = part.new

    def _is_asked(self) -> bool:
        return self._anchors is not None and self._anchors.asked

    def _make_anchor(self, item: Item) -> AnchorPart | None:
        if self._anchors is None or not self._anchors.due:
            return None
        return self._anchors.make(self._bits_in_flight, self.writer.next_seq, item.digest)

    def _bits_in_flight(self, name: str) -> np.ndarray:
        """A tensor in the state that is being published: the snapshot without what has changed since."""
        assert self._snapshot is not None, "anchors need a snapshot"
        with self.extracting:
            bits = self._snapshot(name)
            part = None if self._pending is None else self._pending.delta.get(name)
            if part is not None:
                assert part.old is not None, "the detector hands old bits over"
                bits.reshape(-1)[part.indices] = part.old
        return bits

    def _record(self, item: Item, published: Published) -> None:
        if self._anchors is not None:
            self._anchors.published(published.manifest)
        if self._mirror is not None:
            self._advance_mirror(self._mirror, item.delta)
        self.notices.published(published.manifest.version, item.step)
        with self._changed:
            self._enter(published, step=item.step, submitted_s=item.submitted_s)
            self._in_flight = None
            self._changed.notify_all()
