# SPDX-License-Identifier: Apache-2.0
"""How a delta becomes a file and a file a delta; one module per encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from delta_wire.errors import UnsupportedFormatError
from delta_wire.shards import WHOLE, Shard
from delta_wire.state import Delta, OldBits, TensorTable


class Encoding(Protocol):
    """One way to write a delta into a safetensors file.

    Attributes:
        name (`str`): what manifests call it.
        needs_old_weights (`bool`): whether coding takes whole tensors of the state that the delta applies to.
    """

    name: str
    needs_old_weights: bool

    def check_table(self, table: TensorTable) -> None:
        """Raise [`~delta_wire.errors.ModelMismatchError`] if the encoding cannot carry a model with these names."""
        ...

    def max_bytes(self, table: TensorTable, num_objects: int = 1) -> int:
        """No honest delta of this model takes more in so many files."""
        ...

    def encode(
        self,
        delta: Delta,
        table: TensorTable,
        path: Path,
        seq: int,
        old_bits: OldBits | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        """Write one file; the delta has been checked against the table and has old bits where steps are coded.

        All changes lie in the rows of `shard`, and `old_bits` returns those rows only.
        """
        ...

    def decode(self, path: Path, table: TensorTable, source: str, old_bits: OldBits | None = None) -> Delta:
        """Read and check one file; the arrays returned do not need the file any more, and `old` is `None`.

        `old_bits` returns whole tensors, whatever rows the file speaks of.
        """
        ...


def get(name: str) -> Encoding:
    """The encoding of that name."""
    from delta_wire.encodings.context import ContextEncoding
    from delta_wire.encodings.packed import PackedEncoding
    from delta_wire.encodings.plain import PlainEncoding

    known: tuple[Encoding, ...] = (PlainEncoding(), PackedEncoding(), ContextEncoding())
    for encoding in known:
        if encoding.name == name:
            return encoding
    names = ", ".join(encoding.name for encoding in known)
    raise UnsupportedFormatError(
        f"the encoding {name!r} is not known, this release reads {names}; upgrade delta-weight-sync here"
    )
