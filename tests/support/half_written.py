# SPDX-License-Identifier: Apache-2.0
"""A commit that stops in the middle of what it writes."""

from typing import Any

import numpy as np


def run_half(changes: Any) -> dict[int, tuple[int, int]]:
    """Write the first half of prepared changes on a CPU."""
    # vLLM's CPU workers do not start where the compiler below it has been imported before they fork
    from delta_wire.kernels import cpu_replace
    from delta_wire.kernels.replacement import only_wrong

    counts = np.zeros((len(changes.lanes), 2), dtype=np.int64)
    half = changes._gaps.size // 2
    places = (changes._gaps[:half], changes._jumps, changes._firsts, changes._every)
    progress = np.zeros(3, dtype=np.uint64)
    cpu_replace.replace(*places, changes._old, changes._new, changes._bounds, counts, progress, 0)
    return only_wrong(counts.tolist())
