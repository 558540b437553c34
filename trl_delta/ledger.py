# SPDX-License-Identifier: Apache-2.0
"""What a session has published: which version has which digest, and which step's weights it has."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from delta_wire.bucket import Published
from delta_wire.digest import Digest


@dataclass(frozen=True, slots=True)
class Record:
    """A version that became durable.

    Args:
        seq (`int`): its sequence number.
        step (`int`): optimizer step whose weights it was published with.
        digest ([`~delta_wire.digest.Digest`]): of its state.
        delta_bytes (`int`): size of its objects.
        num_changed (`int`): changed elements.
        publish_s (`float`): seconds from hand-over to durable, other tries included.
    """

    seq: int
    step: int
    digest: Digest
    delta_bytes: int
    num_changed: int
    publish_s: float


class Ledger:
    """The versions of a session. Written by the publisher's thread, read by any.

    Args:
        seq (`int`): version that the session begins with.
        digest ([`~delta_wire.digest.Digest`]): of that version.
        step (`int`): optimizer step whose weights it has.
    """

    def __init__(self, seq: int, digest: Digest, step: int):
        self.records: list[Record] = []
        # what waits for a change of anything that a publisher knows
        self._changed = threading.Condition()
        self._start_seq = self._durable_seq = seq
        self._digests = {seq: digest}
        # newest step whose weights equal a version's; the step of an empty delta needs no version of its own
        self._contains = {seq: step}
        self._since_s = {seq: time.monotonic()}

    @property
    def durable_seq(self) -> int:
        """Sequence number of the newest durable version."""
        return self._durable_seq

    def digest_of(self, seq: int) -> Digest | None:
        """Digest of a version of this session, `None` for others."""
        with self._changed:
            return self._digests.get(seq)

    def step_of(self, seq: int) -> int | None:
        """Newest optimizer step whose weights are those of version `seq`, `None` for versions of other sessions."""
        with self._changed:
            return self._contains.get(seq)

    def durable_since_s(self, seq: int) -> float:
        """Monotonic time at which a version became durable; that of the session's start for older ones."""
        with self._changed:
            return self._since_s.get(seq, self._since_s[self._start_seq])

    def _enter(self, published: Published, *, step: int, submitted_s: float) -> None:
        """A version is durable. Under the condition `_changed`."""
        manifest, now_s = published.manifest, time.monotonic()
        seq = manifest.version.seq
        self._durable_seq = seq
        self._digests[seq] = manifest.digest
        self._contains[seq] = step
        self._since_s[seq] = now_s
        self.records.append(
            Record(
                seq=seq,
                step=step,
                digest=manifest.digest,
                delta_bytes=published.delta_bytes,
                num_changed=manifest.changed_params,
                publish_s=now_s - submitted_s,
            )
        )
