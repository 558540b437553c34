# SPDX-License-Identifier: Apache-2.0
"""The CPU forms of the bulk coding: torn streams stay inside of their memory."""

import numpy as np
import pytest
import torch

from delta_wire import kernels
from delta_wire.kernels import cpu_rice, cpu_steps

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


@pytest.mark.parametrize("group", [[0], [1], [63, 0, 65], [4000, 1, 999]])
@pytest.mark.parametrize("largest", [2, 1 << 7, 1 << 16])
def test_counts_alone_equal_those_of_the_code(group: list[int], largest: int):
    rng = np.random.default_rng(1)
    old = rng.integers(1 << 16, size=sum(group)).astype(np.uint16)
    new = old ^ rng.integers(1, largest, size=old.size).astype(np.uint16)
    sizes = np.array(group, dtype=np.int64)
    expected = cpu_steps.encode_steps(old, new, sizes, np.empty(0, dtype=np.int64))[0]
    assert np.array_equal(cpu_steps.level_counts(old, new, sizes), expected)
