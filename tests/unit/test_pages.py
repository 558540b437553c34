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


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTDUMP"), reason="of Linux")
@pytest.mark.parametrize("seam_bytes", [0, 4096, 3 * HUGE_BYTES + 4096])
def test_every_whole_page_between_the_ends_and_seams_of_mappings(monkeypatch: pytest.MonkeyPatch, seam_bytes: int):
    class Libc:
        def madvise(self, start, size, advice):
            """Refuses what lies in no mapping in full, as the system does."""
            maps = [line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
            inside = any(int(a, 16) <= start.value and start.value + size.value <= int(b, 16) for a, b in maps)
            return 0 if inside else -1

    monkeypatch.setattr("delta_wire.kernels.devices.ctypes.CDLL", lambda name: Libc())
    room = mmap.mmap(-1, 6 * HUGE_BYTES + 4096)
    if seam_bytes:
        # as numpy does with its own: advice for a part of a mapping makes two of it
        room.madvise(mmap.MADV_DONTDUMP, 0, seam_bytes)
    # the first and the last page of the mapping belong to the tensor, too
    tensor = torch.from_numpy(np.frombuffer(room, dtype=np.int16))
    # at most one is lost at each end, and one at the seam
    assert kernels.use_huge_pages([tensor]) >= (4 if seam_bytes else 5) * HUGE_BYTES


def test_small_tensors_are_left_alone():
    assert kernels.use_huge_pages([torch.zeros(1000, dtype=torch.int16)]) == 0
    assert kernels.use_huge_pages([]) == 0
