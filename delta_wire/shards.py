# SPDX-License-Identifier: Apache-2.0
"""Which rows of every tensor one of several writers of a delta speaks of.

Fully sharded training cuts tensors along their first dimension. A part that names its cut codes positions in the rows
it owns and not in the whole tensor, which saves `log2(count)` bits for every change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from delta_wire.errors import FormatError
from delta_wire.state import Delta, OldBits, TensorDelta, TensorSpec, TensorTable, index_dtype

MAX_SHARDS = 10_000
_SHARD = re.compile(r"(0|[1-9][0-9]{0,3})/([1-9][0-9]{0,4})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Share `index` of `count`: of `n` rows those from `index * ceil(n / count)` on, `ceil(n / count)` at most.

    That is how `torch.chunk` and FSDP2 cut. A tensor without dimensions counts as one row.

    Args:
        index (`int`): from 0 to `count - 1`.
        count (`int`): number of shares, 1 for everything.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self):
        if not (0 <= self.index < self.count <= MAX_SHARDS):
            raise FormatError(
                f"a shard is one of 1 to {MAX_SHARDS}, numbered from 0, found {self.index} of {self.count}"
            )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str, source: str) -> Shard:
        """Read what `str()` writes; `source` names the object in errors."""
        match = _SHARD.fullmatch(text)
        if not match:
            raise FormatError(f"{source}: expected a shard of the form index/count, found {text!r:.40}")
        try:
            return cls(int(match[1]), int(match[2]))
        except FormatError as error:
            raise FormatError(f"{source}: {error}") from None

    def rows(self, num_rows: int) -> tuple[int, int]:
        """First row and the one behind the last."""
        step = -(-num_rows // self.count)
        return min(self.index * step, num_rows), min((self.index + 1) * step, num_rows)

    def span(self, spec: TensorSpec) -> tuple[int, int]:
        """Flat indices of a tensor that belong to the shard: the first, and the one behind the last."""
        num_rows = spec.shape[0] if spec.shape else 1
        row_elements = spec.num_elements // num_rows if num_rows else 0
        start, stop = self.rows(num_rows)
        return start * row_elements, stop * row_elements

    def table(self, table: TensorTable) -> TensorTable:
        """The same tensors with the rows of this shard only."""
        if self.count == 1:
            return table
        return TensorTable(self._cut(spec) for spec in table.values())

    def _cut(self, spec: TensorSpec) -> TensorSpec:
        start, stop = self.rows(spec.shape[0] if spec.shape else 1)
        return TensorSpec(spec.name, (stop - start, *spec.shape[1:]))

    def to_local(self, delta: Delta, table: TensorTable) -> Delta:
        """Positions counted from the shard's first element; [`FormatError`] if one lies elsewhere."""
        if self.count == 1:
            return delta
        local: Delta = {}
        for name, part in delta.items():
            start, stop = self.span(table[name])
            if part.num_changed and not start <= part.indices[0] <= part.indices[-1] < stop:
                raise FormatError(
                    f"tensor {name}: shard {self} has elements {start} to {stop - 1}, found changes from "
                    f"{part.indices[0]} to {part.indices[-1]}"
                )
            indices = (part.indices - start).astype(index_dtype(stop - start))
            local[name] = TensorDelta(name, indices, part.new, part.old, part.relative)
        return local

    def to_global(self, delta: Delta, table: TensorTable) -> Delta:
        """Inverse of [`Shard.to_local`]."""
        if self.count == 1:
            return delta
        moved: Delta = {}
        for name, part in delta.items():
            indices = part.indices.astype(index_dtype(table[name].num_elements))
            indices += self.span(table[name])[0]
            moved[name] = TensorDelta(name, indices, part.new, part.old, part.relative)
        return moved

    def old_bits(self, old_bits: OldBits, table: TensorTable) -> OldBits:
        """Old bits of the shard's rows, flat, given those of whole tensors."""

        def cut(name: str) -> np.ndarray:
            start, stop = self.span(table[name])
            return old_bits(name).reshape(-1)[start:stop]

        return cut


WHOLE = Shard()
