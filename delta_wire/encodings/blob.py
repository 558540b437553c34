# SPDX-License-Identifier: Apache-2.0
"""The file of the entropy-coded encodings: one safetensors tensor `delta` of bytes, and the usual metadata."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from delta_wire.container import TensorFile, write_tensors
from delta_wire.encodings.plain import check_metadata, own_metadata
from delta_wire.errors import FormatError
from delta_wire.state import Delta, TensorTable, check_part, num_changed

TENSOR = "delta"
_FIXED_BYTES = 64 << 10
# directory entry and level counts of a tensor
_BYTES_PER_TENSOR = 128


def max_bytes(table: TensorTable) -> int:
    """Upper bound of a file: all values at 16 bits, their positions as a bitmap."""
    return _FIXED_BYTES + sum(
        2 * spec.num_elements + spec.num_elements // 8 + _BYTES_PER_TENSOR for spec in table.values()
    )


def write(path: Path, encoding: str, blob: np.ndarray, delta: Delta, seq: int) -> None:
    """Write a blob of streams."""
    write_tensors(path, {TENSOR: ("U8", blob.shape, blob)}, own_metadata(encoding, seq, num_changed(delta)))


def read(path: Path, encoding: str, source: str) -> np.ndarray:
    """Read a blob of streams: uint8, in memory."""
    file = TensorFile(path, source)
    check_metadata(file.metadata, encoding, source)
    if list(file.names()) != [TENSOR] or file.spec(TENSOR)[0] != "U8" or len(file.spec(TENSOR)[1]) != 1:
        raise FormatError(f"{source}: expected one tensor {TENSOR!r} of bytes, found {list(file.names())!r:.200}")
    return file.array(TENSOR).copy()


def checked(delta: Delta, table: TensorTable, source: str) -> Delta:
    """The delta, each part fitting its tensor."""
    for name, part in delta.items():
        check_part(part, table[name], source)
    return delta
