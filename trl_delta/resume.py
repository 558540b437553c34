# SPDX-License-Identifier: Apache-2.0
"""What a trainer's checkpoint keeps of the run in the bucket."""

from __future__ import annotations

from dataclasses import dataclass, fields


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

    @classmethod
    def parse(cls, saved: object) -> Resumed | None:
        """From a checkpoint's state; `None` for what is none."""
        if not isinstance(saved, dict) or set(saved) != {field.name for field in fields(cls)}:
            return None
        return cls(**saved)
