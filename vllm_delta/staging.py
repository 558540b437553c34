# SPDX-License-Identifier: Apache-2.0
"""The staged file: one composed delta on this machine's disk, which all ranks of the host map and plan from.

A private format between two processes of one server: for tensor number `i` of the table, `i.indices`, `i.values` and,
where some values are steps on the bf16 line and not bits, `i.relative`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from delta_wire.container import Source, TensorFile, write_tensors
from delta_wire.errors import FormatError
from delta_wire.state import DTYPE, Delta, TensorDelta, TensorTable, check_part, index_dtype


def write_staged(path: Path, delta: Delta, table: TensorTable) -> None:
    """Write a delta that has been checked."""
    tensors: dict[str, tuple[str, tuple[int, ...], Source]] = {}
    for number, name in enumerate(table):
        part = delta.get(name)
        if part is None:
            continue
        shape = (part.num_changed,)
        positions = index_dtype(table[name].num_elements)
        tensors[f"{number}.indices"] = (
            "I32" if positions.itemsize == 4 else "I64",
            shape,
            part.indices.astype(positions),
        )
        tensors[f"{number}.values"] = (DTYPE, shape, part.new)
        if part.relative is not None:
            tensors[f"{number}.relative"] = ("U8", shape, part.relative.view(np.uint8))
    write_tensors(path, tensors, {"table": table.sha256})


def read_staged(path: Path, table: TensorTable) -> Delta:
    """Map a staged file; every index is checked again before it is used as an address."""
    file = TensorFile(path, str(path))
    if file.metadata.get("table") != table.sha256:
        raise FormatError(f"{path}: was staged for another model than the one this rank serves")
    delta: Delta = {}
    stored = set(file.names())
    for number, name in enumerate(table):
        if f"{number}.indices" not in stored:
            continue
        relative = file.array(f"{number}.relative").view(bool) if f"{number}.relative" in stored else None
        part = TensorDelta(name, file.array(f"{number}.indices"), file.array(f"{number}.values"), relative=relative)
        check_part(part, table[name], str(path))
        delta[name] = part
    return delta
