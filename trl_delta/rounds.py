# SPDX-License-Identifier: Apache-2.0
"""Rounds: how each of several training processes uploads its part of a version and the first commits them all.

A version that was begun ends the same way everywhere: committed by the first process when all parts are in the bucket,
or by an error that all learn of. A process that is slow delays it; one that has died keeps it from being published.
One that could not look at its weights does so, too, and then all keep what they have found for the next version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from delta_wire.bucket import BucketWriter, Published
from delta_wire.digest import Digest
from delta_wire.errors import DigestMismatchError
from delta_wire.manifest import AnchorPart, Manifest, VersionId, manifest_key
from delta_wire.parts import Part, upload_part
from delta_wire.shards import Shard
from delta_wire.state import Delta, OldBits, TensorTable
from delta_wire.stores import Store
from trl_delta.contribution import Contribution
from trl_delta.ranks import RankError, Ranks
from trl_delta.replica import ReplayedAnchors
from trl_delta.rows import Rows, remove_rows

logger = logging.getLogger(__name__)
_SLOW_AFTER_S = 60.0


class Abandoned(Exception):
    """Publishing was closed while it waited for other processes."""


class Skipped(Exception):
    """A version does not come about, because a process has no part of it."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A run whose newest version has the training model's weights.

    Args:
        head ([`~delta_wire.manifest.Manifest`]): that version.
        next_seq (`int`): number of the next; those of a trainer that died may lie in between.
        writer ([`~delta_wire.bucket.BucketWriter`], *optional*): on the first process.
    """

    head: Manifest
    next_seq: int
    writer: BucketWriter | None


@dataclass
class _Round:
    """A version that is being published; kept from try to try."""

    delta: Delta
    is_anchored: bool
    parts: list[Part] | None = None
    rows: Rows | None = None
    reported: bool = False
    # on the first process: what all have reported
    gathered: list[Contribution] | None = None


class PartWriter:
    """One process' side of the versions that all write together; the first one's also writes the manifests.

    Args:
        ranks ([`~trl_delta.ranks.Ranks`]): for use by the publisher's thread.
        store ([`~delta_wire.stores.Store`]): the bucket.
        table ([`~delta_wire.state.TensorTable`]): the whole model.
        opened ([`Opened`]): the run.
        shards (`dict`): in whose rows the changes of a tensor are coded, by checkpoint name.
        anchors ([`~trl_delta.replica.ReplayedAnchors`], *optional*): on the first process.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: Store,
        table: TensorTable,
        opened: Opened,
        shards: dict[str, Shard],
        anchors: ReplayedAnchors | None = None,
    ):
        self.store = store
        self.cancelled: Callable[[], bool] = lambda: False
        self._ranks = ranks
        self._table = table
        self._head = opened.head
        self._next_seq = opened.next_seq
        self._writer = opened.writer
        self._shards = shards
        self.anchors = anchors
        self._number = 0
        self._round: _Round | None = None

    @property
    def version(self) -> VersionId:
        return self._head.version

    @property
    def digest(self) -> Digest:
        return self._head.digest

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def publish(
        self,
        delta: Delta,
        *,
        digest: Digest,
        step: int | None,
        encoding: str,
        old_bits: OldBits | None,
        anchor: AnchorPart | None = None,
        failure: Exception | None = None,
        stops: bool = False,
        rows: Callable[[int], Rows | None] | None = None,
    ) -> Published:
        """Take part in the next version.

        Args:
            delta (`Delta`): what this process changes, possibly nothing.
            digest ([`~delta_wire.digest.Digest`]): of what this process owns after the change. Those of all add up to
                the version's, and so must what the parts change.
            step (`int`, *optional*): optimizer step.
            encoding (`str`): of the parts.
            old_bits (`Callable`, *optional*): bits of the tensors' rows that this process owns, before the change.
            anchor ([`~delta_wire.manifest.AnchorPart`], *optional*): refused; no process has the whole weights. Those
                of [`~trl_delta.replica.ReplayedAnchors`] need none.
            failure (`Exception`, *optional*): this process has no part, and this is why: [`Skipped`] on all.
            stops (`bool`, *optional*, defaults to `False`): that ends publishing, on all.
            rows (`Callable`, *optional*): uploads what this process owns after the change, given the version's number,
                for an anchor that a server has asked for; `None` if it cannot. Given on all processes or none.

        Returns:
            [`~delta_wire.bucket.Published`]: the same on every process; of the version before if nothing changed.

        After an `OSError`, of the bucket or of this machine, call again with the same delta. [`RankError`] if another
        process failed, [`Skipped`] if one has no part, [`Abandoned`] if publishing was closed.
        """
        if anchor is not None:
            raise ValueError("PartWriter.publish: an anchor needs the whole weights, which no process has")
        began_s = time.monotonic()
        if self._round is None or self._round.delta is not delta:
            self._round = _Round(delta, rows is not None)
            self._number += 1
        current = self._round
        try:
            if failure is not None and stops:
                raise failure
            if current.parts is None:
                current.parts = [] if failure is not None else self._upload(delta, encoding, old_bits)
            if rows is not None and failure is None:
                if self._ranks.is_first:
                    # a checkpoint takes its time
                    self._ranks.put(self._key("anchor"), True)
                    # there is a version then, though nothing may have changed anywhere
                    current.parts = current.parts or [
                        upload_part(self.store, self._table, {}, seq=self.next_seq, encoding=encoding)
                    ]
                current.rows = current.rows or rows(self.next_seq)
            if not current.reported:
                # what another process is to blame for is told by that one
                told = "" if isinstance(failure, RankError) else f"rank {self._ranks.rank}: {failure}"
                contribution = Contribution(current.parts, digest, current.rows, None if failure is None else told)
                self._ranks.put(self._key(self._ranks.rank), contribution.to_json())
                current.reported = True
            outcome = self._lead(current, step) if self._ranks.is_first else self._follow()
        except (OSError, Abandoned):
            # of the bucket, or of the folder for temporary files: tried again
            raise
        except Skipped:
            self._round = None
            raise
        except Exception as error:
            self._tell(str(error) if isinstance(error, RankError) else f"rank {self._ranks.rank}: {error}")
            raise
        if outcome is not None:
            self._head = outcome
            self._next_seq = outcome.version.seq + 1
        self._round = None
        size_bytes = outcome.delta.size_bytes if outcome is not None and outcome.delta else 0
        return Published(self._head, size_bytes, time.monotonic() - began_s)

    def _upload(self, delta: Delta, encoding: str, old_bits: OldBits | None) -> list[Part]:
        by_shard: dict[Shard, Delta] = {}
        for name, part in delta.items():
            by_shard.setdefault(self._shards[name], {})[name] = part
        return [
            upload_part(
                self.store,
                self._table,
                share,
                seq=self.next_seq,
                encoding=encoding,
                old_bits=old_bits,
                shard=shard,
            )
            for shard, share in by_shard.items()
        ]

    def _lead(self, current: _Round, step: int | None) -> Manifest | None:
        assert self._writer is not None
        if current.gathered is None:
            current.gathered = self._gather()
        gathered = current.gathered
        rows = [entry.rows for entry in gathered if entry.rows is not None]
        failures = [entry.failure for entry in gathered if entry.failure is not None]
        if failures:
            remove_rows(self.store, rows)
            skipped = next(filter(None, failures), "another process did not take part")
            self._end({"skipped": skipped})
            raise Skipped(skipped)
        parts = [part for entry in gathered for part in entry.parts]
        expected = sum((entry.digest for entry in gathered), Digest())
        found = sum((part.change for part in parts), self.digest)
        if found != expected:
            raise DigestMismatchError(
                f"{self.store.url}: version {self.next_seq} would have digest {found}, the processes hold weights "
                f"with {expected}; their parts do not begin at version {self.version}"
            )
        make_anchor = partial(self._make_anchor, rows if current.is_anchored else None)
        published = self._writer.commit(parts, step=step, make_anchor=make_anchor) if parts else None
        remove_rows(self.store, rows)
        if published is not None and self.anchors is not None:
            self.anchors.published(published.manifest)
        manifest = published and published.manifest
        self._end({"manifest": manifest and manifest.to_bytes().decode()})
        return manifest

    def _end(self, how: dict[str, Any]) -> None:
        """Tell all how the round has ended, and forget what was said before."""
        self._ranks.remove(self._key("anchor"))
        for rank in range(self._ranks.count):
            self._ranks.remove(self._key(rank))
        # whoever has delivered its part has read how the round before ended
        self._ranks.remove(f"round/{self._number - 1}/end")
        self._ranks.put(self._key("end"), how)

    def _make_anchor(self, rows: list[Rows] | None, manifest: Manifest) -> AnchorPart | None:
        if self.anchors is None:
            return None
        # it may have been answered, or taken back, since the round began
        if rows is not None and self.anchors.asked:
            return self.anchors.make_of(rows, self._ranks.count, manifest)
        if not self.anchors.ready:
            return None
        self._ranks.put(self._key("anchor"), True)
        return self.anchors.make_for(manifest)

    def _gather(self) -> list[Contribution]:
        gathered: list[Contribution] = []
        for rank in range(self._ranks.count):
            told = self._wait_for(rank, f"its part of version {self.next_seq}")
            if "error" in told:
                raise RankError(told["error"])
            gathered.append(Contribution.from_json(told))
        return gathered

    def _follow(self) -> Manifest | None:
        told = self._wait_for("end", f"the manifest of version {self.next_seq}")
        if "error" in told:
            raise RankError(told["error"])
        if "skipped" in told:
            raise Skipped(told["skipped"])
        if told["manifest"] is None:
            return None
        raw = told["manifest"].encode()
        return Manifest.from_bytes(raw, f"{self.store.url}/{manifest_key(self.next_seq)}")

    def _wait_for(self, who: int | str, what: str) -> dict[str, Any]:
        rank = 0 if who == "end" else who
        told = self._ranks.wait_for(self._key(who), _SLOW_AFTER_S, self.cancelled)
        if told is None and not self.cancelled():
            # an anchor is being made
            if self._ranks.find(self._key("anchor")) is None:
                logger.warning(
                    "delta sync: rank %s has not delivered %s for %.0f s; training goes on, and what it changes is in "
                    "the next version. If that process has died, restart the training.",
                    rank,
                    what,
                    _SLOW_AFTER_S,
                )
            told = self._ranks.wait_for(self._key(who), float("inf"), self.cancelled)
        if told is None:
            raise Abandoned(f"rank {rank} has not delivered {what}")
        return told

    def leave(self, failure: Exception) -> None:
        """Publishing has ended here by an error; what waits for this process in the next round learns of it."""
        if self._round is None:
            self._number += 1
            self._tell(f"rank {self._ranks.rank}: {failure}")

    def _tell(self, reason: str) -> None:
        key = self._key("end" if self._ranks.is_first else self._ranks.rank)
        try:
            self._ranks.put(key, {"error": reason})
        except RankError:
            logger.debug("delta sync: nobody can be told that %s", reason)

    def _key(self, who: int | str) -> str:
        return f"round/{self._number}/{who}"
