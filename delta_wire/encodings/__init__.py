# SPDX-License-Identifier: Apache-2.0
"""How a delta becomes a file and a file a delta; one module per encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from delta_wire.errors import UnsupportedFormatError
from delta_wire.state import Delta, TensorTable


class Encoding(Protocol):
    """One way to write a delta into a safetensors file.

    Attributes:
        name (`str`): what manifests call it.
    """

    name: str

    def check_table(self, table: TensorTable) -> None:
        """Raise [`~delta_wire.errors.ModelMismatchError`] if the encoding cannot carry a model with these names."""
        ...

    def max_bytes(self, table: TensorTable) -> int:
        """No honest file of a delta of this model is larger."""
        ...

    def encode(self, delta: Delta, table: TensorTable, path: Path, seq: int) -> None:
        """Write one file; the delta has been checked against the table."""
        ...

    def decode(self, path: Path, table: TensorTable, source: str) -> Delta:
        """Read and check one file; the arrays returned do not need the file any more, and `old` is `None`."""
        ...


def get(name: str) -> Encoding:
    """The encoding of that name."""
    from delta_wire.encodings.plain import PlainEncoding

    encodings: dict[str, Encoding] = {PlainEncoding.name: PlainEncoding()}
    if name not in encodings:
        raise UnsupportedFormatError(
            f"the encoding {name!r} is not known, this release reads {', '.join(encodings)}; upgrade "
            "delta-weight-sync here"
        )
    return encodings[name]
