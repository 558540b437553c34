# SPDX-License-Identifier: Apache-2.0
"""Bit streams and exp-Golomb codes on the CPU, and the directory of the encodings. Compiled by numba, GIL released.

Bit `i` of a stream is bit `i % 64` of its little-endian 64-bit word `i // 64`.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from delta_wire.kernels.cpu import jit

# exp-Golomb orders of a directory: number of tensors, tensors skipped, changed elements
ORDER_TENSORS = 4
ORDER_SKIPPED = 0
ORDER_CHANGED = 8


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


# of a uint64: its set bits; and if it is not zero the index of the lowest one, and 63 minus that of the highest
count_ones: Any = intrinsic(_population)
trailing_zeros: Any = intrinsic(_count_trailing_zeros)
leading_zeros: Any = intrinsic(_count_leading_zeros)


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
def write_code(words, at, value, order):
    """Exp-Golomb code of a value (int64 ≥ 0, below 2^47): with x = value + 2^order of `b` bits, b − order − 1 zeros, a
    one, then the b − 1 low bits of x. Returns the end."""
    x = np.uint64(value) + (np.uint64(1) << np.uint64(order))
    size = np.int64(64) - np.int64(leading_zeros(x))
    at = write_bits(words, at + size - order - 1, np.uint64(1), 1)
    return write_bits(words, at, x & ((np.uint64(1) << np.uint64(size - 1)) - np.uint64(1)), size - 1)


@jit
def read_code(words, at, order):
    """Inverse of [`write_code`]. Returns the value and the end, which is −1 where the words end first."""
    end = np.int64(words.size) * 64
    zeros = np.int64(0)
    while at < end and not (words[at >> 6] >> np.uint64(at & 63)) & np.uint64(1):
        zeros += 1
        at += 1
    size = zeros + order
    if size > 62 or at + 1 + size > end:
        return np.int64(0), np.int64(-1)
    value = read_bits(words, at + 1, size) if size else np.uint64(0)
    return np.int64((np.uint64(1) << np.uint64(size)) + value) - (np.int64(1) << order), at + 1 + size


@jit
def write_codes(values, order, words, at):
    """[`write_code`] for all `values`, each of its own `order` (int64). Returns the end."""
    for i in range(values.size):
        at = write_code(words, at, values[i], order[i])
    return at


@jit
def read_codes(words, at, order, values):
    """Inverse of [`write_codes`] for `values.size` codes. Returns the end, −1 where the words end first."""
    for i in range(values.size):
        values[i], at = read_code(words, at, order[i])
        if at < 0:
            break
    return at


@jit
def write_entries(numbers, coded, words, at):
    """The tensors of a blob: how many, then for each the numbers skipped before it and a count. Returns the end."""
    at = write_code(words, at, numbers.size, ORDER_TENSORS)
    following = np.int64(0)
    for i in range(numbers.size):
        at = write_code(words, at, numbers[i] - following, ORDER_SKIPPED)
        at = write_code(words, at, coded[i], ORDER_CHANGED)
        following = numbers[i] + 1
    return at


@jit
def read_entries(words, num_tensors):
    """Inverse of [`write_entries`] at the begin of a directory, for a table of `num_tensors`.

    Returns:
        `(numbers, coded, end)`: int64 each; the end is −1 where the words end first, −2 for a tensor beyond the table.
    """
    size, at = read_code(words, np.int64(0), ORDER_TENSORS)
    if at < 0 or size > num_tensors:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.int64(-1) if at < 0 else np.int64(-2)
    numbers = np.empty(size, np.int64)
    coded = np.empty(size, np.int64)
    following = np.int64(0)
    for i in range(size):
        skipped, at = read_code(words, at, ORDER_SKIPPED)
        if at < 0:
            break
        # by itself first, so that no sum wraps
        if skipped >= num_tensors or following + skipped >= num_tensors:
            return numbers, coded, np.int64(-2)
        numbers[i] = following + skipped
        following = numbers[i] + 1
        coded[i], at = read_code(words, at, ORDER_CHANGED)
        if at < 0:
            break
    return numbers, coded, at


@jit
def count_order(universe):
    """Order of the exp-Golomb code for a count within `universe`, which is not empty."""
    return max(np.int64(0), np.int64(61) - np.int64(leading_zeros(np.uint64(universe))))


@jit
def write_level_counts(group, counts, words, at):
    """Code the level counts of all groups; a group's list ends with its first zero. Returns the end."""
    for g in range(group.size):
        universe = group[g]
        for level in range(16):
            if universe == 0:
                break
            at = write_code(words, at, counts[g, level], count_order(universe))
            universe = counts[g, level]
    return at


@jit
def read_level_counts(words, at, group, counts):
    """Inverse of [`write_level_counts`]. Returns the end, −1 where the words end or a count exceeds its group."""
    for g in range(group.size):
        universe = group[g]
        for level in range(16):
            if universe == 0:
                break
            value, at = read_code(words, at, count_order(universe))
            # top bits go up to 15, so nothing is above the last level
            if at < 0 or value > universe or (level == 15 and value):
                return np.int64(-1)
            counts[g, level] = value
            universe = value
    return at
