# SPDX-License-Identifier: Apache-2.0
"""`report_to: [delta_sync]` under the plain `trl grpo` command, which imports what `reward_funcs` names."""

from __future__ import annotations

from typing import Any

# registers the name delta_sync with transformers
import trl_delta.callback  # noqa: F401


def none(completions: list[Any], **kwargs: Any) -> list[None]:
    """A reward function without an opinion: TRL leaves it out of every sum.

    ```yaml
    report_to: [delta_sync]
    reward_funcs: [accuracy_reward, trl_delta.rewards.none]
    env: {DELTA_SYNC_BUCKET: /mnt/shared/run-1}
    ```
    """
    return [None] * len(completions)
