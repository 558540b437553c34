# SPDX-License-Identifier: Apache-2.0
"""Changes of live parameters on a CPU: addresses and bits prepared while generation goes on, and the write itself.

Lines are asked for long before they are needed, so that the processor fetches many of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from delta_wire.kernels.cpu import jit, mix
from delta_wire.kernels.cpu_steps import moved

# elements of a commit that are written and then read back, how far ahead their lines are fetched, and room for the
# addresses between. Unsigned, like all that counts here: an index that may be negative costs a comparison
_PIECE = np.uint64(64)
_AHEAD = np.uint64(256)
_RING = np.uint64(512)


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.extending.intrinsic`: what the function generates takes the place of calls to it."""
    return intrinsic(function)


@instruction
def _prefetch(typing, address):
    """Fetch the line at an address into the second-level cache, which has room for more fetches at a time than the
    first."""

    def generate(context, builder, signature, args):
        number = ir.IntType(32)
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        form = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", (pointer.type,), form)
        # to read, into the second level, data
        builder.call(fetch, [pointer, number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(address), generate


@instruction
def _load(typing, address):
    def generate(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.IntType(16).as_pointer()))

    return types.uint16(address), generate


@instruction
def _store(typing, address, bits):
    def generate(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(16).as_pointer()))
        return context.get_dummy_value()

    return types.void(address, types.uint16), generate


@instruction
def _add(typing, address, number):
    """Add to the number at an address, which comes back as it was, in one access that no other thread comes between.
    Who reads it sees what was written before it was added to."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.uint64(address, types.uint64), generate


@jit
def place(bases, sizes, bounds, positions, every, gaps, jumps, firsts):
    """Where the elements of `P` changes lie, in two bytes each wherever one follows the last within 64 Ki elements.

    Reads 8 K bytes, writes 10 K.

    Args:
        bases, sizes: uint64 `[P]`, address and number of the elements of each storage.
        bounds: int64 `[P + 1]`, first element of each change, and `K`.
        positions: uint64 `[K]`, which become addresses.
        every: as many elements can be found without those before them.
        gaps: uint16 `[K]`, for the elements between this one and the last; 0 where the next of the jumps says where
            this one is.
        jumps: uint64 `[K]`, for addresses; as many as there are zeros are used.
        firsts: int64 `[⌈K / every⌉]`, for the first jump of each stretch of `every` elements.

    Returns:
        `(outside, num_jumps)`: the first change with a position outside of its storage, −1 if there is none.
    """
    count, before = 0, np.uint64(0)
    for part in range(sizes.size):
        for i in range(bounds[part], bounds[part + 1]):
            position = positions[i]
            if position >= sizes[part]:
                return part, count
            # two bytes an element
            address = bases[part] + (position << np.uint64(1))
            positions[i] = address
            gap = (address - before) >> np.uint64(1)
            before = address
            stretch = i % every == 0
            if stretch:
                firsts[i // every] = count
            if stretch or i == bounds[part] or gap == 0 or gap > 0xFFFF:
                gaps[i] = 0
                jumps[count] = address
                count += 1
            else:
                gaps[i] = gap
    return -1, count


@jit
def prepare(addresses, bounds, indices, relative, keys, old, new, lanes):
    """Read what `P` changes are going to replace, make bits of steps, and hash the difference.

    Reads 16 K bytes and a line an element, writes 4 K.

    Args:
        addresses: uint64 `[K]`.
        bounds: int64 `[P + 1]`, first element of each change, and `K`.
        indices: int32 or int64 `[K]`, flat checkpoint indices; empty if nothing is to be hashed.
        relative: bool `[K]`, where `new` are steps; empty if nowhere.
        keys: uint64 `[P, 2]`.
        old: uint16 `[K]`, for the bits that are there now.
        new: uint16 `[K]`, bits, or steps, which become bits.
        lanes: uint64 `[P, 2]`, for what each change adds to the digest.
    """
    size = np.uint64(addresses.size)
    for i in range(min(_AHEAD, size)):
        _prefetch(addresses[i])
    for part in range(bounds.size - 1):
        lane_0 = lane_1 = np.uint64(0)
        for i in range(np.uint64(bounds[part]), np.uint64(bounds[part + 1])):
            if i + _AHEAD < size:
                _prefetch(addresses[i + _AHEAD])
            found = _load(addresses[i])
            if relative.size and relative[i]:
                new[i] = moved(found, new[i])
            old[i] = found
            if indices.size:
                index = np.uint64(indices[i]) << np.uint64(16)
                before, after = index | np.uint64(found), index | np.uint64(new[i])
                lane_0 += mix(after ^ keys[part, 0]) - mix(before ^ keys[part, 0])
                lane_1 += mix(after + keys[part, 1]) - mix(before + keys[part, 1])
        lanes[part, 0], lanes[part, 1] = lane_0, lane_1


@jit
def replace(gaps, jumps, firsts, every, old, new, bounds, counts, progress, looks):
    """Write `new` to where `gaps` lead, compare what was there with `old`, and read back what was written.

    Threads that are given the same `progress` share the work, a stretch at a time. A piece's lines stay in the cache
    until they are read back: each is fetched from memory once. Reads 6 K bytes and a line an element, writes the
    lines.

    Args:
        gaps, jumps, firsts, every: as [`place`] leaves them, of 16-bit elements. Nothing checks them: whoever makes
            them has.
        old, new: uint16 `[K]`; what was not `old` becomes what was there.
        bounds: int64 `[P + 1]`, first element of each of `P` parts, and `K`.
        counts: int64 `[P, 2]`; to it are added the elements that did not hold `old`, and those that do not hold `new`
            afterwards.
        progress: uint64 `[3]`, stretches that are taken, those that are done, and what was counted in these.
        looks: how often to look whether the others are done, too: some nanoseconds each, while going to sleep and
            waking up would take longer than what is left.

    Returns:
        What was counted in all stretches; −1 if the others were not done.
    """
    taken = np.uint64(progress.ctypes.data)
    done, wrong = taken + np.uint64(8), taken + np.uint64(16)
    ring = np.empty(_RING, dtype=np.uint64)
    size, every = np.uint64(gaps.size), np.uint64(every)
    while True:
        stretch = _add(taken, np.uint64(1))
        start = stretch * every
        if start >= size:
            break
        num_wrong = np.uint64(0)
        stop = min(start + every, size)
        ahead, jump = np.uint64(0), np.uint64(firsts[stretch])
        # the lines of the first pieces, and then those of a piece more at a time: between loads, those that wait for
        # a page table would hold the loads up
        fetched, piece = start, start
        while piece < stop:
            end = min(piece + _PIECE, stop)
            upto = min(end + _AHEAD, stop)
            for i in range(fetched, upto):
                if gaps[i]:
                    ahead += np.uint64(gaps[i]) << np.uint64(1)
                else:
                    ahead = jumps[jump]
                    jump += np.uint64(1)
                _prefetch(ahead)
                ring[i % _RING] = ahead
            for i in range(piece, end):
                found = _load(ring[i % _RING])
                if found != old[i]:
                    counts[np.searchsorted(bounds, i, side="right") - 1, 0] += 1
                    num_wrong += np.uint64(1)
                    old[i] = found
                _store(ring[i % _RING], new[i])
            for i in range(piece, end):
                if _load(ring[i % _RING]) != new[i]:
                    counts[np.searchsorted(bounds, i, side="right") - 1, 1] += 1
                    num_wrong += np.uint64(1)
            fetched, piece = upto, end
        _add(wrong, num_wrong)
        _add(done, np.uint64(1))
    for _ in range(looks):
        # who sees this sees all that was done before
        if _add(done, np.uint64(0)) == np.uint64(firsts.size):
            return np.int64(_add(wrong, np.uint64(0)))
    return np.int64(-1)
