# SPDX-License-Identifier: Apache-2.0
"""What a trainer's checkpoint keeps of the run in the bucket."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a trainer's checkpoint says about the run it belongs to.

    Args:
        run (`str`): the bucket's run.
        seq (`int`): newest version that was durable when the checkpoint was saved.
        digest (`str`): of the weights in the checkpoint.
        step (`int`): their optimizer step.
    """

    run: str
    seq: int
    digest: str
    step: int

    def compare(self, digest: str, step: int) -> None:
        """Warn if the weights that were loaded, with this digest, are not those that were saved."""
        # of several processes none knows the digest of all when it saves
        if self.digest not in ("", digest):
            logger.warning(
                "delta sync: the weights of step %d have digest %s, those that the checkpoint was saved with had %s; "
                "they were saved in another precision, or something has changed them since (an adapter that was "
                "merged twice?). What is published is what they are now.",
                step,
                digest,
                self.digest,
            )

    @classmethod
    def parse(cls, saved: object) -> Resumed | None:
        """From a checkpoint's state; `None` for what is none."""
        if not isinstance(saved, dict) or set(saved) != {field.name for field in fields(cls)}:
            return None
        return cls(**saved)
