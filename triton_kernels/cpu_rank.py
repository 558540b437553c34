# SPDX-License-Identifier: Apache-2.0
"""Ranks within the exponents of the old values, for the encoding `context`, on the CPU. Compiled by numba."""

import numpy as np

from delta_wire.kernels.cpu import jit


@jit
def class_counts(bits, counts):
    """Histogram (`[256]`, int64) of the exponents of bf16 patterns."""
    for i in range(bits.size):
        counts[(bits[i] >> np.uint16(7)) & np.uint16(0xFF)] += 1


@jit
def class_ranks(bits, base, indices, exponent, rank):
    """For changed elements (`indices`, `[K]`, ascending, all within a slab that starts at `base` and holds `bits`):
    the exponent of the old value and the element's rank among the slab's elements of that exponent."""
    seen = np.zeros(256, dtype=np.int64)
    at = np.int64(0)
    for i in range(bits.size):
        e = (bits[i] >> np.uint16(7)) & np.uint16(0xFF)
        if at < indices.size and indices[at] == base + i:
            exponent[at] = e
            rank[at] = seen[e]
            at += 1
        seen[e] += 1


@jit
def class_select(bits, base, ranks, start, indices, slot):
    """Inverse of [`class_ranks`]: `ranks` holds the changed ranks by class, class `e` at `start[e]:start[e + 1]`;
    writes the flat indices in ascending order and where in `ranks` each came from."""
    seen = np.zeros(256, dtype=np.int64)
    following = start.copy()
    at = np.int64(0)
    for i in range(bits.size):
        e = (bits[i] >> np.uint16(7)) & np.uint16(0xFF)
        if following[e] < start[e + 1] and ranks[following[e]] == seen[e]:
            indices[at] = base + i
            slot[at] = following[e]
            following[e] += 1
            at += 1
        seen[e] += 1
