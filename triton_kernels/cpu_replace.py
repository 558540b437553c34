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

# elements of a commit that are written and then read back, and how far ahead their lines are fetched
_PIECE = 64
_AHEAD = 128


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


@jit
def prepare(bases, sizes, bounds, indices, relative, keys, addresses, old, new, lanes):
    """Make of the positions of `P` changes what [`replace`] takes, read what is there now, and hash the difference.

    Reads 26 K bytes and a line an element, writes 20 K.

    Args:
        bases, sizes: uint64 `[P]`, address and number of the elements of each storage.
        bounds: int64 `[P + 1]`, first element of each change, and `K`.
        indices: int32 or int64 `[K]`, flat checkpoint indices; empty if nothing is to be hashed.
        relative: bool `[K]`, where `new` are steps; empty if nowhere.
        keys: uint64 `[P, 2]`.
        addresses: uint64 `[K]`, positions, which become addresses.
        old: uint16 `[K]`, for the bits that are there now.
        new: uint16 `[K]`, bits, or steps, which become bits.
        lanes: uint64 `[P, 2]`, for what each change adds to the digest.

    Returns:
        The first change with a position outside of its storage, before anything is read; −1 if there is none.
    """
    for part in range(sizes.size):
        for i in range(bounds[part], bounds[part + 1]):
            if addresses[i] >= sizes[part]:
                return part
            # two bytes an element
            addresses[i] = bases[part] + (addresses[i] << np.uint64(1))
    for i in range(min(_AHEAD, addresses.size)):
        _prefetch(addresses[i])
    for part in range(sizes.size):
        lane_0 = lane_1 = np.uint64(0)
        for i in range(bounds[part], bounds[part + 1]):
            if i + _AHEAD < addresses.size:
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
    return -1


@jit
def replace(addresses, old, new, bounds, counts, start, stop):
    """Write `new` to `addresses`, compare what was there with `old`, and read back what was written.

    A piece's lines stay in the cache until they are read back: each is fetched from memory once. Reads 12 K bytes and
    a line an element, writes the lines.

    Args:
        addresses: uint64 `[K]`, of 16-bit elements. Nothing checks them: whoever makes them has.
        old, new: uint16 `[K]`; what was not `old` becomes what was there.
        bounds: int64 `[P + 1]`, first element of each of `P` parts, and `K`.
        counts: int64 `[P, 2]`; to it are added the elements that did not hold `old`, and those that do not hold `new`
            afterwards.
        start, stop: range of elements to do.
    """
    for i in range(start, min(start + _AHEAD, stop)):
        _prefetch(addresses[i])
    for piece in range(start, stop, _PIECE):
        end = min(piece + _PIECE, stop)
        for i in range(piece + _AHEAD, min(end + _AHEAD, stop)):
            _prefetch(addresses[i])
        for i in range(piece, end):
            found = _load(addresses[i])
            if found != old[i]:
                counts[np.searchsorted(bounds, i, side="right") - 1, 0] += 1
                old[i] = found
            _store(addresses[i], new[i])
        for i in range(piece, end):
            if _load(addresses[i]) != new[i]:
                counts[np.searchsorted(bounds, i, side="right") - 1, 1] += 1
