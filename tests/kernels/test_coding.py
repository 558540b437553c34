# SPDX-License-Identifier: Apache-2.0
"""The CPU forms of the bulk coding: torn streams stay inside of their memory."""

import numpy as np
import pytest
import torch

from delta_wire import kernels
from delta_wire.kernels import cpu_rice

GUARD = 0x5A5A5A5A


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("universe", "count"), [(300, 290), (300, 160), (300, 20), (90, 50), (64, 63), (64, 32)])
def test_torn_streams_write_nothing_outside(universe: int, count: int, dtype: type[np.signedinteger]):
    rng = np.random.default_rng(0)
    positions = torch.from_numpy(np.sort(rng.choice(universe, count, replace=False)))
    n, size = np.array([universe]), np.array([count])
    low, high = (stream.numpy().view(np.uint64) for stream in kernels.rice_encode(positions, n, size))
    fitting = 0
    for _ in range(200):
        torn_low, torn_high = low.copy(), high.copy()
        for stream in (torn_low, torn_high):
            for _ in range(rng.integers(3) if stream.size else 0):
                stream[rng.integers(stream.size)] = rng.integers(1 << 63) * rng.integers(2)
        memory = np.full(count + 2 * universe, GUARD, dtype=dtype)
        end = cpu_rice.rice_decode(torn_low, torn_high, n, size, memory[universe : universe + count])
        assert (memory[:universe] == GUARD).all() and (memory[universe + count :] == GUARD).all()
        if end >= 0:
            found = memory[universe : universe + count]
            assert (np.diff(found) > 0).all() and found[0] >= 0 and found[-1] < universe
            fitting += 1
    assert 0 < fitting < 200
