# SPDX-License-Identifier: Apache-2.0
"""What happens to cached keys and values when the weights change."""

from __future__ import annotations

import hashlib
from typing import Any

from vllm_delta.settings import CachePolicy


def renew(core: Any, policy: CachePolicy, label: str) -> None:
    """Apply a policy to the caches of an engine core. Runs between two steps.

    Args:
        core: vLLM's engine core.
        policy (`str`): `forget`, `reset` or `keep`.
        label (`str`): the new version.
    """
    if policy == "keep":
        return
    scheduler = core.scheduler
    if policy == "reset":
        core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    else:
        forget(scheduler, label)
        if scheduler.connector is not None and not scheduler.reset_connector_cache():
            raise RuntimeError("the KV connector could not drop what the old weights computed")
    if core.vllm_config.model_config.is_multimodal_model:
        core.reset_encoder_cache()


def forget(scheduler: Any, label: str) -> None:
    """Drop every cached prefix without touching a block that a request uses.

    Running requests keep the keys and values they have, which the old weights computed. What they cache from now on
    must never be found by another request, so their block hashes are salted with the version they lived through.
    """
    coordinator = scheduler.kv_cache_manager.coordinator
    pools = {
        id(pool): pool for pool in [coordinator.block_pool, *(m.block_pool for m in coordinator.single_type_managers)]
    }
    for pool in pools.values():
        _forget_pool(pool)
    for request in scheduler.requests.values():
        if request.num_computed_tokens:
            request.cache_salt = f"{request.cache_salt or ''}|{label}"
            request.block_hashes[:] = [_salted(block_hash, label) for block_hash in request.block_hashes]


def _forget_pool(pool: Any) -> None:
    for block in pool.blocks:
        block.reset_hash()
    pool.cached_block_hashes_by_block.clear()
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    if pool.enable_kv_cache_events:
        from vllm.distributed.kv_events import AllBlocksCleared

        pool.kv_event_queue.append(AllBlocksCleared())


def _salted(block_hash: bytes, label: str) -> bytes:
    return hashlib.sha256(label.encode() + block_hash).digest()[: len(block_hash)]
