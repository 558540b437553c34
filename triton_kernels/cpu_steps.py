# SPDX-License-Identifier: Apache-2.0
"""Steps on the monotone bf16 line on the CPU: coding, applying, composing. Compiled by numba, GIL released.

A magnitude is coded by the position of its top bit, level by level: level `j` asks, of the elements whose top bit is
at least `j`, whose is higher, and the answers are the positions of a segment (see `cpu_rice`). The bits below the top
one follow in a stream of raw bits, in the order in which the elements drop out.
"""

import numpy as np

from delta_wire.kernels.cpu import jit
from delta_wire.kernels.cpu_bits import leading_zeros, read_bits
from delta_wire.kernels.cpu_rice import stream_bounds


@jit
def line(bits):
    """Position of a bf16 pattern on the monotone integer line: −0 right below +0, everything in numeric order."""
    return bits ^ np.uint16(0x7FFF) if bits & np.uint16(0x8000) else bits


@jit
def encode_steps(old, new, group, like):
    """Code the steps from `old` to `new` in groups with statistics of their own.

    Args:
        old, new: uint16 `[K]`, different everywhere, in group order.
        group: int64 `[G]`, sizes of the groups.
        like: an array of the index type for the levels.

    Returns:
        `(counts, levels, raw)`: int64 `[G, 16]`, how many top bits are above each level; the levels' segments one
        after another, group by group; uint64 words: one sign bit for each step, then the bits below the top ones.
    """
    size = old.size
    counts = np.zeros((group.size, 16), dtype=np.int64)
    signs = np.zeros(size // 64 + 1, dtype=np.uint64)
    first = np.empty(size + 1, dtype=like.dtype)
    rest = np.empty(size + 1, dtype=np.uint16)
    top_bits = np.int64(0)
    found = np.int64(0)
    start = np.int64(0)
    # one word of signs stays in a register: going through memory for every bit would be a chain of stores and loads
    word = np.uint64(0)
    for g in range(group.size):
        begin = found
        own_old = old[start : start + group[g]]
        own_new = new[start : start + group[g]]
        for i in range(group[g]):
            step = np.uint16(line(own_new[i]) - line(own_old[i]))
            negative = np.uint16(step > np.uint16(0x8000))
            magnitude = np.uint16((step ^ np.uint16(-negative)) + negative)
            bit = (start + i) & 63
            word |= np.uint64(negative) << np.uint64(bit)
            if bit == 63:
                signs[(start + i) >> 6] = word
                word = np.uint64(0)
            top_bits += np.int64(63) - np.int64(leading_zeros(np.uint64(magnitude)))
            # no branches on the data: every element is written, and overwritten unless it counts
            first[found] = i
            rest[found] = magnitude
            found += np.int64(magnitude > 1)
        counts[g, 0] = found - begin
        start += group[g]
    signs[size >> 6] = word
    levels = np.empty(top_bits + 1, dtype=like.dtype)
    raw = np.zeros((size + top_bits + 63) // 64, dtype=np.uint64)
    raw[: (size + 63) // 64] = signs[: (size + 63) // 64]
    _encode_levels(first, rest, counts, levels, raw, size)
    return counts, levels[:top_bits], raw


@jit
def _encode_levels(first, rest, counts, levels, raw, raw_bits):
    """Levels above the first; `first` and `rest` hold the survivors of that one, group by group."""
    at = np.int64(0)
    start = np.int64(0)
    for g in range(counts.shape[0]):
        current = rest[start : start + counts[g, 0]]
        levels[at : at + current.size] = first[start : start + current.size]
        start += current.size
        at += current.size
        for level in range(1, 16):
            if current.size == 0:
                break
            survivors = np.empty(current.size + 1, dtype=np.uint16)
            kept = np.int64(0)
            mask = np.uint64((1 << level) - 1)
            word = raw[raw_bits >> 6] if raw_bits & 63 else np.uint64(0)
            for i in range(current.size):
                higher = np.int64((np.uint32(current[i]) >> np.uint32(level + 1)) != 0)
                levels[at + kept] = i
                survivors[kept] = current[i]
                kept += higher
                value = (np.uint64(current[i]) & mask) * np.uint64(1 - higher)
                shift = np.uint64(raw_bits & 63)
                word |= value << shift
                raw_bits += level * (1 - higher)
                if shift + np.uint64(level * (1 - higher)) >= np.uint64(64):
                    raw[(raw_bits >> 6) - 1] = word
                    word = value >> (np.uint64(64) - shift)
            if raw_bits & 63:
                raw[raw_bits >> 6] = word
            counts[g, level] = kept
            at += kept
            current = survivors[:kept]


@jit
def decode_steps(levels, group, counts, raw, step):
    """Inverse of [`encode_steps`]: `step` is uint16 `[K]`, modulo 2^16. The last word of `raw` is not part of the
    stream. Returns the end in `raw`, −1 where it is too short."""
    end = np.int64(raw.size - 1) * 64
    raw_bits = np.int64(step.size)
    if raw_bits > end:
        return np.int64(-1)
    # nearly all magnitudes are 1, whose level has no raw bits: only those above it are visited again
    for place in range((step.size + 63) // 64):
        word = raw[place]
        own = step[place * 64 : place * 64 + 64]
        for i in range(own.size):
            own[i] = np.uint16(1) - np.uint16(2) * np.uint16((word >> np.uint64(i)) & np.uint64(1))
    at = np.int64(0)
    start = np.int64(0)
    for g in range(group.size):
        member = start + levels[at : at + counts[g, 0]].astype(np.int64)
        at += counts[g, 0]
        start += group[g]
        for level in range(1, 16):
            if member.size == 0:
                break
            kept = counts[g, level]
            if raw_bits + level * (member.size - kept) > end:
                return np.int64(-1)
            # no branches on the data: survivors are written too, and again at their own level
            survives = np.zeros(member.size, dtype=np.uint8)
            for i in range(kept):
                survives[levels[at + i]] = 1
            survivors = np.empty(kept + 1, dtype=np.int64)
            found = np.int64(0)
            top = np.uint64(1) << np.uint64(level)
            for i in range(member.size):
                higher = np.int64(survives[i])
                element = member[i]
                survivors[found] = element
                found += higher
                negative = np.uint16((raw[element >> 6] >> np.uint64(element & 63)) & np.uint64(1))
                step[element] = (np.uint16(top | read_bits(raw, raw_bits, level)) ^ np.uint16(-negative)) + negative
                raw_bits += level * (1 - higher)
            at += kept
            member = survivors[:kept]
    return raw_bits


@jit
def moved(bits, step):
    """The pattern that lies a step (uint16, modulo 2^16) from another on the monotone line."""
    return line(np.uint16(line(bits) + step))


@jit
def apply_steps(old, step, new):
    """`new` = `old` moved by `step` (uint16, modulo 2^16) along the monotone line. Inverse of [`encode_steps`]."""
    for i in range(old.size):
        new[i] = moved(old[i], step[i])


@jit
def merge_relative(first, new_1, relative_1, second, new_2, relative_2, indices, new, relative):
    """Compose two sparse changes of one tensor whose values may be steps: a step after bits moves them, a step after a
    step adds to it, bits replace whatever was there. Returns the number written."""
    i = j = at = 0
    while i < first.size or j < second.size:
        take_first = i < first.size and (j >= second.size or np.int64(first[i]) <= np.int64(second[j]))
        take_second = j < second.size and (i >= first.size or np.int64(second[j]) <= np.int64(first[i]))
        indices[at] = np.int64(first[i]) if take_first else np.int64(second[j])
        if not take_second:
            new[at] = new_1[i]
            relative[at] = relative_1[i]
        elif not take_first or not relative_2[j]:
            new[at] = new_2[j]
            relative[at] = relative_2[j]
        elif relative_1[i]:
            new[at] = new_1[i] + new_2[j]
            relative[at] = True
        else:
            new[at] = moved(new_1[i], new_2[j])
            relative[at] = False
        i += take_first
        j += take_second
        at += 1
    return at


@jit
def level_counts(old, new, group):
    """The `counts` of [`encode_steps`] alone."""
    counts = np.zeros((group.size, 16), dtype=np.int64)
    start = np.int64(0)
    for g in range(group.size):
        own_old = old[start : start + group[g]]
        own_new = new[start : start + group[g]]
        for i in range(group[g]):
            step = np.uint16(line(own_new[i]) - line(own_old[i]))
            negative = np.uint16(step > np.uint16(0x8000))
            magnitude = np.uint16((step ^ np.uint16(-negative)) + negative)
            counts[g, 63 - leading_zeros(np.uint64(magnitude))] += 1
        start += group[g]
        # so far, how many top bits are at each level; now, how many are above it
        above = np.int64(0)
        for level in range(15, -1, -1):
            above, counts[g, level] = above + counts[g, level], above
    return counts


@jit
def level_segments(group, counts):
    """Universe and count (int64 each) of the segment of each level, the empty ones left out."""
    universes = np.empty(counts.size, dtype=np.int64)
    sizes = np.empty(counts.size, dtype=np.int64)
    at = 0
    for g in range(group.size):
        universe = group[g]
        for level in range(16):
            if counts[g, level] == 0:
                break
            universes[at] = universe
            sizes[at] = counts[g, level]
            universe = counts[g, level]
            at += 1
    return universes[:at], sizes[:at]


@jit
def step_bits(group, counts):
    """Upper bound of the bits that the steps of each group take (`[G]`, int64)."""
    bits = np.empty(group.size, dtype=np.int64)
    n = np.empty(1, dtype=np.int64)
    count = np.empty(1, dtype=np.int64)
    for g in range(group.size):
        total = group[g]
        n[0] = group[g]
        for level in range(16):
            count[0] = counts[g, level]
            low_bits, high_bits = stream_bounds(n, count)
            total += low_bits + high_bits + count[0]
            n[0] = count[0]
        bits[g] = total
    return bits
