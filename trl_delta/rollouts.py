# SPDX-License-Identifier: Apache-2.0
"""Which versions have made a rollout: what the servers say of each answer, kept with the sample.

TRL stamps a group of rollouts with the version number that was known when its first request left. A server may switch
while an answer is on its way, and says so in the answer's headers; TRL's rollout worker drops them.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

logger = logging.getLogger(__name__)
VERSION_HEADER = "x-weight-version"
VERSIONS_HEADER = "x-weight-versions"


def record_versions(worker: Any) -> bool:
    """Let TRL's rollout worker keep the versions of each sample's answers.

    Every sample gets `delta/mixed_frac` (1 if several versions have made it, else 0; TRL logs the mean) and
    `delta/sample_version` (sequence number of the oldest of them) in its `metrics`.

    Args:
        worker: of an AsyncGRPOTrainer, not started yet. A worker with another loop than TRL's own stays as it is.

    Returns:
        `bool`: whether it will.
    """
    loop = getattr(worker, "_loop_cls", None)
    try:
        from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
    except ImportError:
        return False
    if loop is not _AsyncRolloutLoop:
        logger.debug("delta sync: the rollout worker runs %s; samples are not marked with versions", loop)
        return False
    from trl_delta.rollout_loop import VersionedRolloutLoop

    worker._loop_cls = VersionedRolloutLoop
    return True


_answers: ContextVar[list[int] | None] = ContextVar("delta_versions_of_the_rollout", default=None)


def begin_rollout() -> list[int]:
    """Sequence numbers of the answers that the running task gets from here on."""
    noted: list[int] = []
    _answers.set(noted)
    return noted


def note_answer(headers: Any) -> None:
    """Keep what an answer's headers say; answers of servers without the extension say nothing."""
    noted = _answers.get()
    if noted is None:
        return
    for version in (headers.get(VERSIONS_HEADER) or headers.get(VERSION_HEADER) or "").split(","):
        seq = version.strip().rpartition("-")[2]
        if seq.isdecimal():
            noted.append(int(seq))


def version_metrics(noted: list[int]) -> dict[str, float]:
    """What a sample's `metrics` get."""
    if not noted:
        return {}
    return {"delta/mixed_frac": float(len(set(noted)) > 1), "delta/sample_version": float(min(noted))}
