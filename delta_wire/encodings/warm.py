# SPDX-License-Identifier: Apache-2.0
"""Compiling what codes and decodes deltas before the first one is waited for."""

from __future__ import annotations

import numpy as np

from delta_wire.encodings import context, packed
from delta_wire.state import Delta, TensorDelta, TensorSpec, TensorTable, check_part, compose, resolve

_SIZE = 64
# changed elements and the largest change of their bits: few, half and all; small steps and new bits
_CASES = {"few": (1, 3), "half": (_SIZE // 2, 3), "all": (_SIZE, 3), "wild": (_SIZE // 2, 30_000)}


def warm_up() -> None:
    """Compile (or load from the cache) all that numba compiles of the encodings, so that no version pays for it.

    The first time on a machine that takes some seconds, in which the first versions of a run would be late.
    """
    random = np.random.default_rng(0)
    table = TensorTable(TensorSpec(name, (_SIZE,)) for name in _CASES)
    state = {
        name: (random.standard_normal(_SIZE, np.float32).view(np.uint32) >> 16).astype(np.uint16) for name in table
    }
    delta: Delta = {}
    for name, (count, most) in _CASES.items():
        indices = np.sort(random.choice(_SIZE, count, replace=False)).astype(np.int32)
        old = state[name][indices]
        delta[name] = TensorDelta(name, indices, old ^ random.integers(1, most, count).astype(np.uint16), old)
    for blobs, decode in (
        (packed.encode(delta, table), lambda blobs: packed.decode(blobs, table, "warm-up")),
        (
            context.encode(delta, table, state.__getitem__),
            lambda blobs: context.decode(blobs, table, "warm-up", state.__getitem__),
        ),
    ):
        found = decode(blobs)
        compose(found, found)
        for name, part in found.items():
            check_part(part, table[name], "warm-up")
            resolve(part, state[name][part.indices])
    compose(delta, delta)
