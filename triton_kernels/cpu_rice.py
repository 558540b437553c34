# SPDX-License-Identifier: Apache-2.0
"""Segmented Rice codes on the CPU. Compiled by numba, GIL released.

A *segment* is a strictly ascending list of `K` positions in a universe of `n`. It is coded as the gaps of whichever of
the set and its complement is smaller: the low `k` bits of every gap go to one bit stream, the quotient in unary
(zeros, then a one) to another. `k` follows from `(n, K)` in integers, so it is never stored. All segments of a file
share the two streams.

Source: Golomb, "Run-length encodings" (1966); Rice and Plaunt (1971); the parameter rule is the golden-ratio threshold
of Gallager and van Voorhis (1975), with −ln(1 − K/n) taken as 2K / (2n − K).
"""

import numpy as np

from delta_wire.kernels.cpu import jit
from delta_wire.kernels.cpu_bits import count_ones, trailing_zeros


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
    place = at >> 6
    word = np.uint64(0)
    for i in range(positions.size):
        position = np.int64(positions[i])
        if position >= end:
            break
        bit = at + position
        if bit >> 6 != place:
            words[place] ^= word
            place = bit >> 6
            word = np.uint64(0)
        word |= np.uint64(1) << np.uint64(bit & 63)
    if word:
        words[place] ^= word


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
        here = np.int64(count_ones(word))
        if ones + here >= coded:
            # the segment ends inside of this word: what follows belongs to the next one
            rest = word
            for _ in range(coded - ones - 1):
                rest &= rest - np.uint64(1)
            size = np.int64(trailing_zeros(rest)) + 1
            keep = ~np.uint64(0) >> np.uint64(64 - size)
            word &= keep
            here = coded - ones
        members = word
        if complement:
            members = ~word
            if size < 64:
                members &= (np.uint64(1) << np.uint64(size)) - np.uint64(1)
            # a torn stream has fewer holes than its counts say, hence more members than there is room for
            if at + np.int64(count_ones(members)) > positions.size:
                return np.int64(-1)
        while members:
            positions[at] = base + np.int64(trailing_zeros(members))
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
        one = (word_index << 6) + np.int64(trailing_zeros(word))
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
