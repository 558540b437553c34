# SPDX-License-Identifier: Apache-2.0
"""Fast CPU forms over numpy arrays. Compiled by numba on first use and cached on disk; all of them release the GIL.

Arrays are C-contiguous unless said otherwise. Bits are uint16, keys are Python ints below 2^64.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

_GROUP = 64
_PART = 16


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.njit` without the GIL, cached on disk."""
    # a read-only install with a read-only home has nowhere to keep compiled code: compile per process then
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False)(function)
    except RuntimeError:
        return numba.njit(nogil=True, cache=False, boundscheck=False)(function)


@jit
def mix(x):
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@jit
def _round_f32(wide):
    upper = wide >> np.uint32(16)
    rounded = (wide + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    nan = upper | np.uint32(0x0040)
    return np.uint16(nan if (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded)


@jit
def round_f32(wide, out):
    """bf16 bits `out` (`[N]`, uint16) of float32 patterns `wide` (`[N]`, uint32). Reads 4 N bytes, writes 2 N."""
    for i in range(wide.size):
        out[i] = _round_f32(wide[i])


@jit
def _may_differ_f32(wide, snapshot):
    """Non-zero if any rounded pattern is not the snapshot's, or if there is a NaN to look at closely.

    Additions and bit operations from index zero on, so that it vectorises: a magnitude above that of infinity carries
    into bit 31.
    """
    differs = np.uint32(0)
    for i in range(wide.size):
        x = wide[i]
        rounded = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        nan = ((x & np.uint32(0x7FFFFFFF)) + np.uint32(0x007FFFFF)) & np.uint32(0x80000000)
        differs |= (rounded ^ np.uint32(snapshot[i])) | nan
    return differs


@jit
def extract_f32(wide, snapshot, start, stop, indices, old, new):
    """Find the elements of `[start, stop)` whose rounded bits differ from the snapshot's, and update the snapshot.

    Reads 6 bytes an element once: nearly no group of 64 holds a change, so a vectorised test skips it; one that does
    is narrowed down to 16 by the same test.

    Args:
        wide: uint32 `[N]`, float32 patterns.
        snapshot: uint16 `[N]`.
        indices, old, new: scratch of at least `stop - start` entries.

    Returns:
        The number of changes, which fill the front of the scratch in ascending order.
    """
    at = 0
    for group in range(start, stop, _GROUP):
        end = min(group + _GROUP, stop)
        if _may_differ_f32(wide[group:end], snapshot[group:end]) == 0:
            continue
        for part in range(group, end, _PART):
            part_end = min(part + _PART, end)
            if _may_differ_f32(wide[part:part_end], snapshot[part:part_end]) == 0:
                continue
            for i in range(part, part_end):
                bits = _round_f32(wide[i])
                if bits != snapshot[i]:
                    indices[at] = i
                    old[at] = snapshot[i]
                    new[at] = bits
                    snapshot[i] = bits
                    at += 1
    return at


@jit
def _differs_bits(bits, snapshot):
    differs = np.uint16(0)
    for i in range(bits.size):
        differs |= bits[i] ^ snapshot[i]
    return differs


@jit
def extract_bits(bits, snapshot, start, stop, indices, old, new):
    """As [`extract_f32`] for 16-bit patterns; reads 4 bytes an element."""
    at = 0
    for group in range(start, stop, _GROUP):
        end = min(group + _GROUP, stop)
        if _differs_bits(bits[group:end], snapshot[group:end]) == 0:
            continue
        for i in range(group, end):
            if bits[i] != snapshot[i]:
                indices[at] = i
                old[at] = snapshot[i]
                new[at] = bits[i]
                snapshot[i] = bits[i]
                at += 1
    return at


@jit
def digest_sparse(indices, bits, key_0, key_1):
    """Two lanes summed over `[K]` elements. Reads 6 K or 10 K bytes."""
    lane_0 = np.uint64(0)
    lane_1 = np.uint64(0)
    for i in range(indices.size):
        word = (np.uint64(indices[i]) << np.uint64(16)) | np.uint64(bits[i])
        lane_0 += mix(word ^ key_0)
        lane_1 += mix(word + key_1)
    return lane_0, lane_1


@jit
def digest_block(bits, start, step_0, step_1, step_2, key_0, key_1):
    """Two lanes over a 3-D view `bits` of any strides whose element `[i, j, k]` has the flat index
    `start + i * step_0 + j * step_1 + k * step_2`. Reads 2 N bytes."""
    lane_0 = np.uint64(0)
    lane_1 = np.uint64(0)
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            row = start + i * step_0 + j * step_1
            for k in range(bits.shape[2]):
                word = (np.uint64(row + k * step_2) << np.uint64(16)) | np.uint64(bits[i, j, k])
                lane_0 += mix(word ^ key_0)
                lane_1 += mix(word + key_1)
    return lane_0, lane_1


@jit
def gather(flat, positions, out):
    """`out[i] = flat[positions[i]]`. Reads 10 K bytes, writes 2 K."""
    for i in range(positions.size):
        out[i] = flat[positions[i]]


@jit
def scatter(flat, positions, new, old):
    """Swap `new` into `flat` at `positions`, keeping what was there in `old`."""
    for i in range(positions.size):
        at = positions[i]
        old[i] = flat[at]
        flat[at] = new[i]


@jit
def swap(flat, positions, new, indices, key_0, key_1, old, lanes):
    """As [`scatter`], and adds the lanes (`[4]`, uint64) of the old bits and of those read back. Reads 16 K or 20 K
    bytes, writes 4 K."""
    scatter(flat, positions, new, old)
    for i in range(positions.size):
        index = np.uint64(indices[i]) << np.uint64(16)
        before = index | np.uint64(old[i])
        after = index | np.uint64(flat[positions[i]])
        lanes[0] += mix(before ^ key_0)
        lanes[1] += mix(before + key_1)
        lanes[2] += mix(after ^ key_0)
        lanes[3] += mix(after + key_1)


@jit
def check_indices(indices, num_elements):
    """Position of the first entry that is out of range or not greater than its predecessor, −1 if there is none."""
    previous = np.int64(-1)
    for i in range(indices.size):
        index = np.int64(indices[i])
        if index <= previous or index >= num_elements:
            return i
        previous = index
    return -1


@jit
def check_segments(indices, bounds, sizes):
    """First segment `[bounds[s], bounds[s + 1])` that [`check_indices`] refuses for a tensor of `sizes[s]` elements,
    −1 if there is none."""
    for segment in range(sizes.size):
        if check_indices(indices[bounds[segment] : bounds[segment + 1]], sizes[segment]) >= 0:
            return segment
    return -1


@jit
def merge_count(first, second):
    """Size of the union of two strictly ascending index arrays."""
    i = j = count = 0
    while i < first.size and j < second.size:
        a = np.int64(first[i])
        b = np.int64(second[j])
        i += a <= b
        j += b <= a
        count += 1
    return count + (first.size - i) + (second.size - j)


@jit
def merge_fill(first, old_1, new_1, second, old_2, new_2, drop_equal, indices, old, new):
    """Compose two sparse changes of one tensor: where both touch an index, the old bits are the first's and the new
    bits the second's. With `drop_equal`, elements that end where they began are left out. Returns the number kept."""
    i = j = at = 0
    while i < first.size or j < second.size:
        take_first = i < first.size and (j >= second.size or np.int64(first[i]) <= np.int64(second[j]))
        take_second = j < second.size and (i >= first.size or np.int64(second[j]) <= np.int64(first[i]))
        index = np.int64(first[i]) if take_first else np.int64(second[j])
        before = old_1[i] if take_first else old_2[j]
        after = new_2[j] if take_second else new_1[i]
        i += take_first
        j += take_second
        if before != after or not drop_equal:
            indices[at] = index
            old[at] = before
            new[at] = after
            at += 1
    return at
