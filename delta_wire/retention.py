# SPDX-License-Identifier: Apache-2.0
"""What of a run may be removed, and removing it.

Readers restart from anchors, so what lies before an old enough anchor is of no use to anybody. Kept are the newest
restart points (two at least), every version after the older of them, whatever a live server still has to pass, and all
of it for a grace period after it has become useless: a reader may have decided to fetch it a moment ago.

Only what a trainer publishes under a number up to that of the newest version is ever touched. Above it another trainer
may be at work; below it nothing new can appear, since numbers only grow.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from delta_wire.acks import Ack, read_acks
from delta_wire.chain import BucketReader
from delta_wire.errors import ObjectNotFoundError, SetupError
from delta_wire.manifest import Manifest, VersionId, manifest_key
from delta_wire.stores.base import ObjectInfo, Store

logger = logging.getLogger(__name__)
_NUMBERED = re.compile(r"(?:versions/([0-9]{12})\.json|deltas/([0-9]{12})-[^/]*|anchors/([0-9]{12})-[^/]*/.*)")
_PREFIXES = ("versions/", "deltas/", "anchors/")
_BATCH = 100


@dataclass(frozen=True, slots=True)
class Policy:
    """What is kept.

    Args:
        restart_points (`int`): newest versions with an anchor that stay, with everything after the oldest of them.
        grace_s (`float`): how long what has become useless stays.
        lease_s (`float`): a server that has said nothing new for so long no longer keeps what it would need next.
    """

    restart_points: int = 2
    grace_s: float = 3600.0
    lease_s: float = 3600.0

    def __post_init__(self):
        if self.restart_points < 2:
            raise SetupError(
                f"retention keeps at least two restart points, found {self.restart_points}: a reader that is about to "
                "start from the older one must still find it"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep would do.

    Args:
        head ([`~delta_wire.refs.VersionId`], *optional*): newest version; `None` in an empty bucket.
        oldest ([`~delta_wire.refs.VersionId`], *optional*): oldest version that stays whole.
        kept_bytes (`int`): size of what stays.
        delete: objects to remove now.
        waiting: objects whose grace period is not over.
    """

    head: VersionId | None
    oldest: VersionId | None
    kept_bytes: int
    delete: tuple[ObjectInfo, ...]
    waiting: tuple[ObjectInfo, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(info.size_bytes for info in self.delete)


def plan(reader: BucketReader, policy: Policy | None = None, *, now_unix_s: float | None = None) -> Plan:
    """Decide once, by the dates that manifests and acks carry; for a command, beside a trainer or without one.

    Args:
        reader ([`~delta_wire.bucket.BucketReader`]): the run.
        policy ([`Policy`], *optional*): what is kept.
        now_unix_s (`float`, *optional*): the time; this machine's clock otherwise.

    Nothing is written. [`~delta_wire.errors.FormatError`] if a manifest that has to be kept is damaged.
    """
    policy = policy or Policy()
    now_s = time.time() if now_unix_s is None else now_unix_s
    acks = [ack for ack in read_acks(reader.store) if now_s - ack.served_unix_s < policy.lease_s]
    survey = _survey(reader, policy, acks)

    def is_due(info: ObjectInfo) -> bool:
        return now_s - survey.useless_since_s(_number(info.key)) >= policy.grace_s

    return survey.plan(is_due)


def sweep(store: Store, plan: Plan) -> int:
    """Remove what a plan lists, manifests first; returns how many objects. Safe to repeat after an error."""
    order = sorted(plan.delete, key=lambda info: (not info.key.startswith("versions/"), info.key))
    for at in range(0, len(order), _BATCH):
        store.delete([info.key for info in order[at : at + _BATCH]])
    return len(order)


class Sweeper:
    """Retention beside publishing. Time is this process' own, so that a clock that jumps removes nothing too early.

    Args:
        reader ([`~delta_wire.bucket.BucketReader`]): the run; for use by one thread.
        policy ([`Policy`], *optional*): what is kept.
        clock (callable, *optional*): seconds that never go back.
    """

    def __init__(
        self, reader: BucketReader, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._reader = reader
        self._policy = policy or Policy()
        self._clock = clock
        self._useless_since_s: dict[str, float] = {}
        self._heard: dict[str, tuple[Ack, float]] = {}

    def plan(self) -> Plan:
        """Decide anew. What is found useless for the first time waits for the grace period to pass."""
        now_s = self._clock()
        survey = _survey(self._reader, self._policy, self._live_acks(now_s))
        useless = {info.key for info in survey.useless}
        self._useless_since_s = {key: self._useless_since_s.get(key, now_s) for key in useless}
        return survey.plan(lambda info: now_s - self._useless_since_s[info.key] >= self._policy.grace_s)

    def sweep(self, owner: VersionId) -> Plan:
        """Remove what is due, if the bucket's newest version is still of the owner's run and epoch."""
        found = self.plan()
        head = found.head
        if found.delete and head is not None and (head.run, head.epoch) == (owner.run, owner.epoch):
            sweep(self._reader.store, found)
            logger.info(
                "%s: removed %d objects (%d bytes) from before version %s",
                self._reader.store.url,
                len(found.delete),
                found.freed_bytes,
                found.oldest,
            )
        return found

    def _live_acks(self, now_s: float) -> list[Ack]:
        acks = read_acks(self._reader.store)
        before = self._heard
        self._heard = {
            ack.server: known if (known := before.get(ack.server)) is not None and known[0] == ack else (ack, now_s)
            for ack in acks
        }
        return [ack for ack, since_s in self._heard.values() if now_s - since_s < self._policy.lease_s]


@dataclass(frozen=True)
class _Survey:
    chain: list[Manifest]
    kept_bytes: int
    useless: list[ObjectInfo]

    def useless_since_s(self, number: int) -> float:
        """By the trainer's clock: when the version was published that made this number useless."""
        if number < self.chain[-1].version.seq:
            return next(manifest for manifest in self.chain if manifest.anchor is not None).created_unix_s
        return next(m for m in reversed(self.chain) if m.version.seq >= number).created_unix_s

    def plan(self, is_due: Callable[[ObjectInfo], bool]) -> Plan:
        if not self.chain:
            return Plan(None, None, self.kept_bytes, (), ())
        due = [info for info in self.useless if is_due(info)]
        keys = {info.key for info in due}
        waiting = tuple(info for info in self.useless if info.key not in keys)
        return Plan(self.chain[0].version, self.chain[-1].version, self.kept_bytes, tuple(due), waiting)


def _survey(reader: BucketReader, policy: Policy, acks: Iterable[Ack]) -> _Survey:
    # before the pointer: what is listed was there when the newest version was read, or is older
    listed = [info for prefix in _PREFIXES for info in reader.store.list(prefix)]
    head = reader.latest()
    if head is None:
        return _Survey([], sum(info.size_bytes for info in listed), [])
    run = head.version.run
    served = [ack.version.seq for ack in acks if ack.version is not None and ack.version.run == run]
    chain, enough = _kept_chain(reader, head, policy.restart_points, min(served, default=head.version.seq))
    # the first version's manifest tells a server that was started on the base that it may follow the run
    needed = {manifest_key(0)}
    for manifest in chain:
        needed.add(manifest_key(manifest.version.seq))
        for part in (manifest.delta, manifest.anchor):
            if part is not None:
                needed.update(ref.key for ref in part.objects)
    # numbers from here on belong to the chain, or to nobody any more
    lowest = 0 if enough else chain[-1].version.seq
    useless, kept_bytes = [], 0
    for info in listed:
        number = _number(info.key)
        if lowest <= number <= head.version.seq and info.key not in needed:
            useless.append(info)
        else:
            kept_bytes += info.size_bytes
    return _Survey(chain, kept_bytes, useless)


def _kept_chain(
    reader: BucketReader, head: Manifest, restart_points: int, served_seq: int
) -> tuple[list[Manifest], bool]:
    """Versions that stay, newest first, and whether what lies before them may go."""
    chain: list[Manifest] = []
    anchors = 0
    try:
        for manifest in reader.walk(head):
            chain.append(manifest)
            anchors += manifest.anchor is not None
            if anchors >= restart_points and manifest.version.seq <= served_seq:
                return chain, True
    except ObjectNotFoundError:
        # removed before
        pass
    return chain, anchors >= restart_points


def _number(key: str) -> int:
    """Number of the version that an object belongs to, -1 if it is none of ours."""
    match = _NUMBERED.fullmatch(key)
    return -1 if match is None else int(next(group for group in match.groups() if group))
