# SPDX-License-Identifier: Apache-2.0
"""What happens to cached keys and values when the weights change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_delta.settings import CachePolicy

# hashes are of 16 or 32 bytes
_ODD = np.uint64(0x9E3779B97F4A7C15)


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
    managers = coordinator.single_type_managers
    pools = {id(pool): pool for pool in [coordinator.block_pool, *(manager.block_pool for manager in managers)]}
    for pool in pools.values():
        _forget_pool(pool)
    if scheduler.connector is not None:
        # it may look for hashes among the free blocks, and keep what it finds
        stale = [pool.blocks for pool in pools.values()]
    else:
        # No hash of a free block is found any more, and it is reset when the block is taken. There may be hundreds of
        # thousands of them, and generation stands still.
        stale = [blocks for manager in managers for blocks in manager.req_to_blocks.values()]
    for blocks in stale:
        for block in blocks:
            block.reset_hash()
    _salt([request for request in scheduler.requests.values() if request.num_computed_tokens], label)


def _forget_pool(pool: Any) -> None:
    pool.cached_block_hashes_by_block.clear()
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    if pool.enable_kv_cache_events:
        from vllm.distributed.kv_events import AllBlocksCleared

        pool.kv_event_queue.append(AllBlocksCleared())


def _salt(requests: Sequence[Any], label: str) -> None:
    """Make other hashes of the blocks of requests, all at once: hashing them anew takes seven times as long."""
    hashes = [block_hash for request in requests for block_hash in request.block_hashes]
    for request in requests:
        request.cache_salt = f"{request.cache_salt or ''}|{label}"
    if not hashes:
        return
    size = len(hashes[0])
    joined = np.frombuffer(b"".join(hashes), dtype=np.uint64).reshape(len(hashes), -1)
    # a bijection for each version, and one after another another one: what two requests have in common they have
    # only if they lived through the same versions
    salt = np.frombuffer(hashlib.sha256(label.encode()).digest()[:size], dtype=np.uint64)
    salted = (joined * _ODD + salt).tobytes()
    at = 0
    for request in requests:
        end = at + size * len(request.block_hashes)
        request.block_hashes[:] = [salted[start : start + size] for start in range(at, end, size)]
        at = end
