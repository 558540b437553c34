# SPDX-License-Identifier: Apache-2.0
"""The staged file: one composed delta on this machine's disk, which all ranks of the host map and plan from.

A private format between two processes of one server. `tensors` are the numbers of the changed tensors in the table and
`counts` how many changes each has; `indices` and `values` hold them one tensor after the other, and `relative` which
values are steps on the bf16 line and not bits, where any is.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from delta_wire.container import Source, TensorFile, write_tensors
from delta_wire.errors import FormatError
from delta_wire.state import DTYPE, Delta, TensorDelta, TensorTable, check_part


def write_staged(path: Path, delta: Delta, table: TensorTable) -> None:
    """Write a delta that has been checked."""
    numbers = table.numbers
    parts = sorted(delta.values(), key=lambda part: numbers[part.name])
    indices = np.concatenate([np.empty(0, dtype=np.int32), *(part.indices for part in parts)])
    tensors: dict[str, tuple[str, tuple[int, ...], Source]] = {}

    def put(name: str, dtype: str, array: np.ndarray) -> None:
        tensors[name] = (dtype, array.shape, array)

    put("tensors", "I64", np.array([numbers[part.name] for part in parts], dtype=np.int64))
    put("counts", "I64", np.array([part.num_changed for part in parts], dtype=np.int64))
    put("indices", "I32" if indices.itemsize == 4 else "I64", indices)
    put("values", DTYPE, np.concatenate([np.empty(0, dtype=np.uint16), *(part.new for part in parts)]))
    if any(part.relative is not None for part in parts):
        flags = [np.zeros(part.num_changed, dtype=bool) if part.relative is None else part.relative for part in parts]
        put("relative", "U8", np.concatenate(flags).view(np.uint8))
    write_tensors(path, tensors, {"table": table.sha256})


def read_staged(path: Path, table: TensorTable) -> Delta:
    """Map a staged file; every index is checked again before it is used as an address."""
    from delta_wire.kernels import cpu

    file = TensorFile(path, str(path))
    if file.metadata.get("table") != table.sha256:
        raise FormatError(f"{path}: was staged for another model than the one this rank serves")
    numbers, indices, values = file.array("tensors"), file.array("indices"), file.array("values")
    relative = file.array("relative").view(bool) if "relative" in file else None
    bounds = np.cumsum([0, *file.array("counts").tolist()])
    if (np.diff(bounds) < 0).any() or not bounds[-1] == indices.size == values.size:
        raise FormatError(f"{path}: counts {bounds[-1]} changes, holds {indices.size} indices, {values.size} values")
    if not ((numbers >= 0) & (numbers < len(table))).all():
        raise FormatError(f"{path}: names tensors that the table of {len(table)} does not have")
    names = [table.names[number] for number in numbers.tolist()]
    delta = {
        name: TensorDelta(
            name, indices[start:stop], values[start:stop], relative=None if relative is None else relative[start:stop]
        )
        for name, (start, stop) in zip(names, pairwise(bounds.tolist()), strict=True)
    }
    wrong = cpu.check_segments(indices, bounds, table.sizes[numbers])
    if wrong >= 0:
        # its message names what is wrong with it
        check_part(delta[names[wrong]], table[names[wrong]], str(path))
    return delta
