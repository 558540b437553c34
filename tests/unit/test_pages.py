# SPDX-License-Identifier: Apache-2.0
"""Live weights in huge pages: contents stay, and the ends of a mapping are no obstacle."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from delta_wire import kernels

HUGE_BYTES = 1 << 21


def test_contents_stay_whatever_the_system_does():
    tensors = [torch.randint(-100, 100, (size,), dtype=torch.int16) for size in (5 << 20, 3 << 20, 1000, 0)]
    before = [tensor.clone() for tensor in tensors]
    gathered = kernels.use_huge_pages(tensors)
    assert gathered % HUGE_BYTES == 0
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(tensors, before, strict=True))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="of Linux")
def test_a_mapping_that_ends_within_a_huge_page(monkeypatch: pytest.MonkeyPatch):
    # what the system is asked for never reaches outside of what is mapped: it would refuse all of it
    asked = []

    class Libc:
        def madvise(self, start, size, advice):
            asked.append((start.value, size.value))
            return 0

    monkeypatch.setattr("delta_wire.kernels.devices.ctypes.CDLL", lambda name: Libc())
    room = mmap.mmap(-1, 5 * HUGE_BYTES + 4096)
    # the first and the last page of the mapping belong to the tensor, too
    tensor = torch.from_numpy(np.frombuffer(room, dtype=np.int16))
    gathered = kernels.use_huge_pages([tensor])
    first = -(-tensor.data_ptr() // HUGE_BYTES) * HUGE_BYTES
    last = (tensor.data_ptr() + tensor.nbytes) // HUGE_BYTES * HUGE_BYTES
    assert {start for start, _ in asked} >= set(range(first, last, HUGE_BYTES))
    assert gathered == len(asked) * HUGE_BYTES >= 4 * HUGE_BYTES
    maps = [line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert all(any(int(a, 16) <= start and start + size <= int(b, 16) for a, b in maps) for start, size in asked)


def test_small_tensors_are_left_alone():
    assert kernels.use_huge_pages([torch.zeros(1000, dtype=torch.int16)]) == 0
    assert kernels.use_huge_pages([]) == 0
