# SPDX-License-Identifier: Apache-2.0
"""Fast CPU forms of the bulk coding: segmented Rice codes and bf16 steps. Compiled by numba, GIL released.

A *segment* is a strictly ascending list of `K` positions in a universe of `n`. It is coded as the gaps of whichever of
the set and its complement is smaller: the low `k` bits of every gap go to one bit stream, the quotient in unary
(zeros, then a one) to another. `k` follows from `(n, K)` in integers, so it is never stored. All segments of a file
share the two streams. Bit `i` of a stream is bit `i % 64` of its little-endian 64-bit word `i // 64`.

Source: Golomb, "Run-length encodings" (1966); Rice and Plaunt (1971); the parameter rule is the golden-ratio threshold
of Gallager and van Voorhis (1975), with −ln(1 − K/n) taken as 2K / (2n − K).
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from delta_wire.kernels.cpu import jit


def _count_trailing_zeros(typing_context, word):
    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen


def _count_leading_zeros(typing_context, word):
    def codegen(context, builder, signature, args):
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen


def _population(typing_context, word):
    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


_count_ones: Any = intrinsic(_population)
# index of the lowest set bit, and 63 minus that of the highest one, of a non-zero uint64
_trailing_zeros: Any = intrinsic(_count_trailing_zeros)
_leading_zeros: Any = intrinsic(_count_leading_zeros)


@jit
def rice_parameter(n, count):
    """Low bits for `count` coded elements out of `n`: the smallest `k` with 2000 · 2^k · K ≥ 481 (2n − K)."""
    k = 0
    if count == 0:
        return k
    bound = 481 * (2 * n - count)
    while 2000 * count * (1 << k) < bound:
        k += 1
    return k


@jit
def stream_bounds(n, count):
    """Upper bounds of the bits that [`rice_encode`] uses in its two streams."""
    low_bits = np.int64(0)
    high_bits = np.int64(0)
    for s in range(n.size):
        coded = min(count[s], n[s] - count[s])
        if coded:
            k = rice_parameter(n[s], coded)
            low_bits += coded * k
            high_bits += coded + ((n[s] - coded) >> k)
    return low_bits, high_bits


@jit
def rice_encode(positions, n, count, low, high):
    """Code all segments.

    Args:
        positions: int32 or int64, the segments one after another.
        n, count: int64 `[S]`, universe and number of positions of each segment.
        low, high: uint64 words, zeroed, large enough.

    Returns:
        Bits used in `low` and in `high`.
    """
    low_bits = np.int64(0)
    high_bits = np.int64(0)
    start = np.int64(0)
    for s in range(n.size):
        size = count[s]
        own = positions[start : start + size]
        start += size
        if 2 * size > n[s]:
            if size == n[s]:
                continue
            k = rice_parameter(n[s], n[s] - size)
            if k == 0:
                # unary gaps of parameter 0 are a bitmap: all ones up to the last hole, the members taken out
                end = _last_hole(own, n[s]) + 1
                _set_ones(high, high_bits, end)
                _flip(own, end, high, high_bits)
                high_bits += end
            else:
                low_bits, high_bits = _encode_gaps(_holes(own, n[s]), k, low, low_bits, high, high_bits)
        elif size:
            k = rice_parameter(n[s], size)
            if k == 0:
                end = np.int64(own[size - 1]) + 1
                _flip(own, end, high, high_bits)
                high_bits += end
            else:
                low_bits, high_bits = _encode_gaps(own, k, low, low_bits, high, high_bits)
    return low_bits, high_bits


@jit
def _last_hole(positions, n):
    """Largest number below `n` that is not among the positions, of which there are fewer than `n`."""
    hole = n - 1
    for at in range(positions.size - 1, -1, -1):
        if np.int64(positions[at]) != hole:
            break
        hole -= 1
    return hole


@jit
def _holes(positions, n):
    """All numbers below `n` that are not among the positions."""
    holes = np.empty(n - positions.size, dtype=positions.dtype)
    found = 0
    following = np.int64(0)
    for at in range(positions.size + 1):
        position = np.int64(positions[at]) if at < positions.size else n
        for hole in range(following, position):
            holes[found] = hole
            found += 1
        following = position + 1
    return holes


@jit
def _set_ones(words, at, size):
    """Set `size` bits from bit `at` on."""
    end = at + size
    first = at >> 6
    last = end >> 6
    head = ~np.uint64(0) << np.uint64(at & 63)
    tail = (np.uint64(1) << np.uint64(end & 63)) - np.uint64(1)
    if first == last:
        words[first] |= head & tail
        return
    words[first] |= head
    for word in range(first + 1, last):
        words[word] = ~np.uint64(0)
    if tail:
        words[last] |= tail


@jit
def _flip(positions, end, words, at):
    """Flip the bits `at + position` of all positions below `end`."""
    for i in range(positions.size):
        position = np.int64(positions[i])
        if position >= end:
            break
        bit = at + position
        words[bit >> 6] ^= np.uint64(1) << np.uint64(bit & 63)


@jit
def _encode_gaps(positions, k, low, low_bits, high, high_bits):
    """Gaps of a segment with parameter `k` ≥ 1; words under construction stay in registers."""
    shift_k = np.uint64(k)
    mask = (np.uint64(1) << shift_k) - np.uint64(1)
    low_word = low[low_bits >> 6] if low_bits & 63 else np.uint64(0)
    high_word = high[high_bits >> 6] if high_bits & 63 else np.uint64(0)
    previous = np.int64(-1)
    for i in range(positions.size):
        position = np.int64(positions[i])
        gap = np.uint64(position - previous - 1)
        previous = position
        one = high_bits + np.int64(gap >> shift_k)
        if one >> 6 != high_bits >> 6:
            if high_bits & 63:
                high[high_bits >> 6] = high_word
            high_word = np.uint64(0)
        high_word |= np.uint64(1) << np.uint64(one & 63)
        high_bits = one + 1
        if high_bits & 63 == 0:
            high[one >> 6] = high_word
            high_word = np.uint64(0)
        value = gap & mask
        shift = np.uint64(low_bits & 63)
        low_word |= value << shift
        if shift + shift_k >= np.uint64(64):
            low[low_bits >> 6] = low_word
            low_word = value >> (np.uint64(64) - shift) if shift else np.uint64(0)
        low_bits += k
    if low_bits & 63:
        low[low_bits >> 6] = low_word
    if high_bits & 63:
        high[high_bits >> 6] = high_word
    return low_bits, high_bits


@jit
def rice_decode(low, high, n, count, positions):
    """Inverse of [`rice_encode`]. Returns the bits of `high` read, −1 where the streams do not fit the segments."""
    low_bits = np.int64(0)
    high_bits = np.int64(0)
    start = np.int64(0)
    for s in range(n.size):
        size = count[s]
        own = positions[start : start + size]
        start += size
        complement = 2 * size > n[s]
        coded = n[s] - size if complement else size
        if coded == 0:
            for i in range(size):
                own[i] = i
            continue
        k = rice_parameter(n[s], coded)
        if low_bits + coded * k > np.int64(low.size) * 64 or coded > np.int64(high.size) * 64 - high_bits:
            return np.int64(-1)
        if k == 0:
            high_bits = _decode_bitmap(high, high_bits, n[s], coded, complement, own)
        else:
            holes = np.empty(coded if complement else 0, dtype=positions.dtype)
            high_bits = _decode_gaps(low, low_bits, high, high_bits, k, n[s], holes if complement else own)
            low_bits += coded * k
            if complement and high_bits >= 0:
                _fill_between(holes, n[s], own)
        if high_bits < 0:
            return np.int64(-1)
    return high_bits


@jit
def _decode_bitmap(high, high_bits, n, coded, complement, positions):
    """One segment of parameter 0, whose unary gaps are a bitmap that ends with its last one; as [`_decode_gaps`]."""
    at = np.int64(0)
    ones = np.int64(0)
    base = np.int64(0)
    while ones < coded:
        # 64 bits of the stream from wherever the segment stands
        word_index = (high_bits + base) >> 6
        shift = np.uint64((high_bits + base) & 63)
        if word_index >= high.size:
            return np.int64(-1)
        word = high[word_index] >> shift
        if shift and word_index + 1 < high.size:
            word |= high[word_index + 1] << (np.uint64(64) - shift)
        size = min(np.int64(64), n - base)
        if size <= 0:
            return np.int64(-1)
        if size < 64:
            word &= (np.uint64(1) << np.uint64(size)) - np.uint64(1)
        here = np.int64(_count_ones(word))
        if ones + here >= coded:
            # the segment ends inside of this word: what follows belongs to the next one
            rest = word
            for _ in range(coded - ones - 1):
                rest &= rest - np.uint64(1)
            size = np.int64(_trailing_zeros(rest)) + 1
            keep = ~np.uint64(0) >> np.uint64(64 - size)
            word &= keep
            here = coded - ones
        members = word
        if complement:
            members = ~word
            if size < 64:
                members &= (np.uint64(1) << np.uint64(size)) - np.uint64(1)
            # a torn stream has fewer holes than its counts say, hence more members than there is room for
            if at + np.int64(_count_ones(members)) > positions.size:
                return np.int64(-1)
        while members:
            positions[at] = base + np.int64(_trailing_zeros(members))
            at += 1
            members &= members - np.uint64(1)
        ones += here
        base += size
    if complement:
        for member in range(base, n):
            positions[at] = member
            at += 1
    return high_bits + base


@jit
def _fill_between(holes, n, positions):
    """All numbers below `n` that are not holes."""
    at = np.int64(0)
    following = np.int64(0)
    for i in range(holes.size + 1):
        hole = holes[i] if i < holes.size else n
        for member in range(following, hole):
            positions[at] = member
            at += 1
        following = hole + 1


@jit
def _decode_gaps(low, low_bits, high, high_bits, k, n, positions):
    """Positions of one segment with parameter `k` ≥ 1; returns the end in `high`, −1 where it ends first or a position
    leaves `[0, n)`."""
    word_index = high_bits >> 6
    if word_index >= high.size:
        return np.int64(-1)
    word = high[word_index] & (~np.uint64(0) << np.uint64(high_bits & 63))
    before = high_bits - 1
    shift_k = np.uint64(k)
    mask = (np.uint64(1) << shift_k) - np.uint64(1)
    position = np.int64(-1)
    longest = n >> k
    for i in range(positions.size):
        while word == 0:
            word_index += 1
            if word_index >= high.size:
                return np.int64(-1)
            word = high[word_index]
        one = (word_index << 6) + np.int64(_trailing_zeros(word))
        word &= word - np.uint64(1)
        quotient = one - before - 1
        gap = quotient << k
        before = one
        at_word = low_bits >> 6
        shift = np.uint64(low_bits & 63)
        value = low[at_word] >> shift
        if shift + shift_k > np.uint64(64):
            value |= low[at_word + 1] << (np.uint64(64) - shift)
        gap |= np.int64(value & mask)
        low_bits += k
        position += 1 + gap
        # the quotient is bounded, too, so that no gap wraps
        if quotient > longest or position >= n:
            return np.int64(-1)
        positions[i] = position
    return before + 1


@jit
def line(bits):
    """Position of a bf16 pattern on the monotone integer line: −0 right below +0, everything in numeric order."""
    return bits ^ np.uint16(0x7FFF) if bits & np.uint16(0x8000) else bits


@jit
def steps_between(old, new, magnitude, raw):
    """Steps from `old` to `new` (`[K]`, uint16, different) on the monotone line, modulo 2^16.

    Writes their magnitudes (1 to 32768) and their signs, one bit each, to the front of zeroed words. Returns the sum
    of the positions of the magnitudes' top bits.
    """
    top_bits = np.int64(0)
    word = np.uint64(0)
    for i in range(old.size):
        step = np.uint16(line(new[i]) - line(old[i]))
        negative = np.uint16(step > np.uint16(0x8000))
        word |= np.uint64(negative) << np.uint64(i & 63)
        if i & 63 == 63:
            raw[i >> 6] = word
            word = np.uint64(0)
        size = np.uint16((step ^ np.uint16(-negative)) + negative)
        magnitude[i] = size
        top_bits += np.int64(63) - np.int64(_leading_zeros(np.uint64(size)))
    if old.size & 63:
        raw[old.size >> 6] = word
    return top_bits


@jit
def apply_steps(old, step, new):
    """`new` = `old` moved by `step` (uint16, modulo 2^16) along the monotone line. Inverse of [`steps_between`]."""
    for i in range(old.size):
        moved = np.uint16(line(old[i]) + step[i])
        new[i] = moved ^ np.uint16(0x7FFF) if moved & np.uint16(0x8000) else moved


@jit
def write_bits(words, at, value, size):
    """Put the low `size` bits (at most 63) of `value` (uint64) at bit `at` of zeroed uint64 words. Returns the end."""
    word = at >> 6
    shift = np.uint64(at & 63)
    words[word] |= value << shift
    if shift + np.uint64(size) > np.uint64(64):
        words[word + 1] |= value >> (np.uint64(64) - shift)
    return at + size


@jit
def read_bits(words, at, size):
    """Inverse of [`write_bits`]; the caller has checked that the bits exist."""
    word = at >> 6
    shift = np.uint64(at & 63)
    value = words[word] >> shift
    if shift + np.uint64(size) > np.uint64(64):
        value |= words[word + 1] << (np.uint64(64) - shift)
    return value & ((np.uint64(1) << np.uint64(size)) - np.uint64(1))


@jit
def golomb_write(values, order, words, at):
    """Exp-Golomb codes of `values` (int64 ≥ 0, below 2^47), each of its own `order` (int64): with x = value + 2^order
    of `b` bits, b − order − 1 zeros, a one, then the b − 1 low bits of x. Returns the end."""
    for i in range(values.size):
        x = np.uint64(values[i]) + (np.uint64(1) << np.uint64(order[i]))
        size = np.int64(64) - np.int64(_leading_zeros(x))
        at += size - order[i] - 1
        at = write_bits(words, at, np.uint64(1), 1)
        at = write_bits(words, at, x & ((np.uint64(1) << np.uint64(size - 1)) - np.uint64(1)), size - 1)
    return at


@jit
def golomb_read(words, at, order, values):
    """Inverse of [`golomb_write`] for `values.size` codes. Returns the end, −1 where the words end first."""
    end = np.int64(words.size) * 64
    for i in range(values.size):
        zeros = np.int64(0)
        while at < end and not (words[at >> 6] >> np.uint64(at & 63)) & np.uint64(1):
            zeros += 1
            at += 1
        size = zeros + order[i]
        if size > 62 or at + 1 + size > end:
            return np.int64(-1)
        value = read_bits(words, at + 1, size) if size else np.uint64(0)
        at += 1 + size
        values[i] = np.int64((np.uint64(1) << np.uint64(size)) + value) - (np.int64(1) << order[i])
    return at


@jit
def merge_relative(first, new_1, relative_1, second, new_2, relative_2, indices, new, relative):
    """Compose two sparse changes of one tensor whose values may be steps: a step after bits moves them, a step after a
    step adds to it, bits replace whatever was there. Returns the number written."""
    i = j = at = 0
    moved = np.empty(1, dtype=np.uint16)
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
            apply_steps(new_1[i : i + 1], new_2[j : j + 1], moved)
            new[at] = moved[0]
            relative[at] = False
        i += take_first
        j += take_second
        at += 1
    return at


@jit
def split_magnitudes(magnitude, group, levels, counts, raw, raw_bits):
    """Code magnitudes by the position of their top bit, level by level, in groups with statistics of their own.

    Level `j` asks, of the elements whose top bit is at least `j`, whose is higher: the answers are the positions of a
    segment. The bits below the top one follow in `raw`, in the order in which the elements drop out.

    Args:
        magnitude: uint16 `[K]`, 1 to 32768.
        group: int64 `[G]`, sizes of the groups.
        levels: int32 or int64, one longer than needed, receives the segments one after another, group by group.
        counts: int64 `[G, 16]`, receives how many top bits are above each level.
        raw, raw_bits: uint64 words and the bit to start at.

    Returns:
        The number of entries in `levels` and the end in `raw`.
    """
    at = np.int64(0)
    start = np.int64(0)
    for g in range(group.size):
        current = magnitude[start : start + group[g]]
        start += group[g]
        for level in range(16):
            # no branches on the data: every element is written, and overwritten unless it counts
            survivors = np.empty(current.size + 1, dtype=np.uint16)
            kept = np.int64(0)
            mask = np.uint64((1 << level) - 1)
            word = raw[raw_bits >> 6] if raw_bits & 63 else np.uint64(0)
            for i in range(current.size):
                higher = np.int64((np.uint32(current[i]) >> np.uint32(level + 1)) != 0)
                levels[at + kept] = i
                survivors[kept] = current[i]
                kept += higher
                size = level * (1 - higher)
                value = (np.uint64(current[i]) & mask) * np.uint64(1 - higher)
                shift = np.uint64(raw_bits & 63)
                word |= value << shift
                if shift + np.uint64(size) >= np.uint64(64):
                    raw[raw_bits >> 6] = word
                    word = value >> (np.uint64(64) - shift)
                raw_bits += size
            if raw_bits & 63:
                raw[raw_bits >> 6] = word
            counts[g, level] = kept
            at += kept
            if kept == 0:
                break
            current = survivors[:kept]
    return at, raw_bits


@jit
def join_steps(levels, group, counts, raw, raw_bits, step):
    """Inverse of [`split_magnitudes`], signs (the first `K` bits of `raw`) applied: `step` is uint16, modulo 2^16.
    The last word of `raw` is not part of the stream. Returns the end in `raw`, −1 where it is too short."""
    end = np.int64(raw.size - 1) * 64
    at = np.int64(0)
    start = np.int64(0)
    for i in range(step.size):
        step[i] = 1
    for g in range(group.size):
        # nearly all magnitudes are 1, whose level has no raw bits: only those above it are visited
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
            survivors = np.empty(kept + 1, dtype=np.int64)
            found = np.int64(0)
            top = np.uint64(1) << np.uint64(level)
            for i in range(member.size):
                higher = np.int64(found < kept) & np.int64(levels[at + min(found, kept - 1)] == i)
                survivors[found] = member[i]
                found += higher
                step[member[i]] = np.uint16(top | read_bits(raw, raw_bits, level))
                raw_bits += level * (1 - higher)
            at += kept
            member = survivors[:kept]
    for i in range(step.size):
        negative = np.uint16((raw[i >> 6] >> np.uint64(i & 63)) & np.uint64(1))
        step[i] = (step[i] ^ np.uint16(-negative)) + negative
    return raw_bits


@jit
def count_order(universe):
    """Order of the exp-Golomb code for a count within `universe`, which is not empty."""
    return max(np.int64(0), np.int64(61) - np.int64(_leading_zeros(np.uint64(universe))))


@jit
def write_level_counts(group, counts, words, at):
    """Code the level counts of all groups; a group's list ends with its first zero. Returns the end."""
    value = np.empty(1, dtype=np.int64)
    order = np.empty(1, dtype=np.int64)
    for g in range(group.size):
        universe = group[g]
        for level in range(16):
            if universe == 0:
                break
            value[0] = counts[g, level]
            order[0] = count_order(universe)
            at = golomb_write(value, order, words, at)
            universe = counts[g, level]
    return at


@jit
def read_level_counts(words, at, group, counts):
    """Inverse of [`write_level_counts`]. Returns the end, −1 where the words end or a count exceeds its group."""
    value = np.empty(1, dtype=np.int64)
    order = np.empty(1, dtype=np.int64)
    for g in range(group.size):
        universe = group[g]
        for level in range(16):
            if universe == 0:
                break
            order[0] = count_order(universe)
            at = golomb_read(words, at, order, value)
            # top bits go up to 15, so nothing is above the last level
            if at < 0 or value[0] > universe or (level == 15 and value[0]):
                return np.int64(-1)
            counts[g, level] = value[0]
            universe = value[0]
    return at


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
