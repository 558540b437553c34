# SPDX-License-Identifier: Apache-2.0
"""A commit that stops in the middle of what it writes."""

from typing import Any

import numpy as np


def run_half(changes: Any) -> list[tuple[int, int]]:
    """Write the first half of prepared changes on a CPU."""
    # vLLM's CPU workers do not start where the compiler below it has been imported before they fork
    from delta_wire.kernels import cpu_replace

    counts = np.zeros((len(changes.lanes), 2), dtype=np.int64)
    half = changes._addresses.size // 2
    cpu_replace.replace(changes._addresses, changes._old, changes._new, changes._bounds, counts, 0, half)
    return [(stale, unwritten) for stale, unwritten in counts.tolist()]
