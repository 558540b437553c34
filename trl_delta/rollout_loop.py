# SPDX-License-Identifier: Apache-2.0
"""TRL's rollout loop with the versions of the answers. Runs in the worker's process, which imports it by name."""

from __future__ import annotations

from typing import Any

import aiohttp
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from trl_delta.rollouts import begin_rollout, note_answer, version_metrics


class VersionedRolloutLoop(_AsyncRolloutLoop):
    """Each sample's `metrics` say which versions have made it, see [`~trl_delta.rollouts.record_versions`]."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # by the rollout's training rows, kept alive with them so that no other object has their id
        self._noted: dict[int, tuple[Any, list[int]]] = {}

    async def _generate_one(self, *args: Any, **kwargs: Any) -> Any:
        # every rollout is a task, and so has a context of its own
        noted = begin_rollout()
        result = await super()._generate_one(*args, **kwargs)
        sequences = result[2]
        self._noted[id(sequences)] = (sequences, noted)
        return result

    async def _post(self, path: str, payload: dict, timeout: float, max_retries: int = 3) -> Any:
        async def post() -> dict:
            async with self.session.post(  # pyright: ignore[reportOptionalMemberAccess]
                f"{self.vllm_server_url}{path}", json=payload, timeout=aiohttp.ClientTimeout(total=timeout)
            ) as response:
                response.raise_for_status()
                note_answer(response.headers)
                return await response.json() or {}

        return await self._retry(post, label=f"POST {path}", max_attempts=max_retries)

    async def _score_group(self, group: Any) -> list[Any]:
        samples = await super()._score_group(group)
        metrics = []
        for sequences in group.completions_sequences:
            _, noted = self._noted.pop(id(sequences), (None, []))
            metrics += [version_metrics(noted)] * len(sequences)
        for sample, extra in zip(samples, metrics, strict=True):
            sample.metrics.update(extra)
        return samples
