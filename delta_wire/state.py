# SPDX-License-Identifier: Apache-2.0
"""What a state is made of: the table of its tensors, and sparse changes between two states.

Letters: `K` changed elements of one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from delta_wire.digest import Digest, digest_change
from delta_wire.errors import FormatError, ModelMismatchError
from delta_wire.strict import dump, load_object

# element sizes of what a version can carry; everything is compared and moved as 16-bit patterns
DTYPE = "BF16"
MAX_NAME_BYTES = 1024
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 46
# a model with one tensor per expert has some 50,000; parsed JSON takes ten times its size
MAX_TENSORS = 1 << 19
MAX_TABLE_BYTES = 64 << 20
_INT32_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One checkpoint tensor: its name, shape and safetensors dtype (always `BF16` in format 1)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = DTYPE

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class TensorTable(Mapping[str, TensorSpec]):
    """All tensors of a model, in name order; what both sides compare to know that they speak of the same model.

    Args:
        specs: the tensors, in any order, each name once.
    """

    def __init__(self, specs: Iterable[TensorSpec]):
        ordered = sorted(specs, key=lambda spec: spec.name)
        self._specs = {spec.name: spec for spec in ordered}
        if len(self._specs) != len(ordered):
            raise FormatError("a tensor table names a tensor twice")
        self._raw: bytes | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in order; a tensor's number is its place here."""
        return tuple(self._specs)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of every tensor."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def sizes(self) -> np.ndarray:
        """Elements of every tensor by its number, int64."""
        return np.array([spec.num_elements for spec in self._specs.values()], dtype=np.int64)

    def __getitem__(self, name: str) -> TensorSpec:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def num_params(self) -> int:
        """Elements of all tensors."""
        return sum(spec.num_elements for spec in self._specs.values())

    @property
    def full_bytes(self) -> int:
        """Size of all weights in bf16."""
        return 2 * self.num_params

    def to_bytes(self) -> bytes:
        """Canonical JSON: one object, names in order, each `{"dtype", "shape"}`."""
        if self._raw is None:
            table = {spec.name: {"dtype": spec.dtype, "shape": list(spec.shape)} for spec in self._specs.values()}
            self._raw = dump(table)
        return self._raw

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> TensorTable:
        """Parse and bound a table; `source` names the object in errors."""
        table = load_object(raw, source, MAX_TABLE_BYTES)
        if len(table) > MAX_TENSORS:
            raise FormatError(f"{source}: a tensor table has at most {MAX_TENSORS} tensors, found {len(table)}")
        return cls(_parse_spec(name, entry, source) for name, entry in table.items())

    def require_same(self, found: TensorTable, expected_source: str, found_source: str) -> None:
        """Raise [`ModelMismatchError`] with the differing names unless both tables agree in every entry."""
        missing = [name for name in self if name not in found]
        extra = [name for name in found if name not in self]
        other = [name for name in self if name in found and found[name] != self[name]]
        if not (missing or extra or other):
            return
        parts = []
        if missing:
            parts.append(f"{len(missing)} missing in {found_source}: {_some(missing)}")
        if extra:
            parts.append(f"{len(extra)} only in {found_source}: {_some(extra)}")
        if other:
            shapes = [
                f"{n} {list(self[n].shape)} {self[n].dtype} ≠ {list(found[n].shape)} {found[n].dtype}" for n in other
            ]
            parts.append(f"{len(other)} of other shape or dtype: {_some(shapes)}")
        raise ModelMismatchError(
            f"{found_source} is not the model of {expected_source}: {'; '.join(parts)}. Use the checkpoint the run "
            "was started from, or another bucket."
        )


def _some(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _parse_spec(name: str, entry: object, source: str) -> TensorSpec:
    # a lone surrogate is not printable and must not reach encode()
    if not name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise FormatError(f"{source}: {name[:80]!r} is no tensor name (printable, 1 to {MAX_NAME_BYTES} bytes)")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape"} or entry["dtype"] != DTYPE:
        raise FormatError(f"{source}: tensor {name}: expected dtype {DTYPE} and a shape, found {entry!r:.200}")
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or any(type(d) is not int or d < 0 for d in shape):
        raise FormatError(f"{source}: tensor {name}: {shape!r:.200} is no shape")
    if any(dim > MAX_ELEMENTS for dim in shape) or prod(shape) > MAX_ELEMENTS:
        raise FormatError(f"{source}: tensor {name}: {shape!r:.200} has more than {MAX_ELEMENTS} elements")
    return TensorSpec(name, tuple(shape))


# not frozen: a delta has one for every tensor, and freezing triples what making one costs
@dataclass(slots=True)
class TensorDelta:
    """The changed elements of one tensor.

    Args:
        name (`str`): checkpoint name.
        indices (`np.ndarray`): `[K]`, int32 (int64 from 2^31 elements on), flat, strictly ascending.
        new (`np.ndarray`): `[K]`, uint16, bits after the change; steps where `relative` is set.
        old (`np.ndarray`, *optional*): `[K]`, uint16, bits before it; the trainer has them, a reader may not.
        relative (`np.ndarray`, *optional*): `[K]`, bool, marks elements whose `new` is a step on the monotone bf16
            line, to be added to the old value, instead of a bit pattern. `None`: none is.
    """

    name: str
    indices: np.ndarray
    new: np.ndarray
    old: np.ndarray | None = None
    relative: np.ndarray | None = None

    @property
    def num_changed(self) -> int:
        return int(self.indices.size)


# sparse change of a whole state: tensors without a change are absent
Delta = dict[str, TensorDelta]
# all bits of a tensor in the state that a delta applies to, by name: uint16
OldBits = Callable[[str], np.ndarray]


def index_dtype(num_elements: int) -> np.dtype:
    """Type of the flat indices of a tensor: int32, int64 from 2^31 elements on."""
    return np.dtype(np.int32 if num_elements < _INT32_LIMIT else np.int64)


def check_part(part: TensorDelta, spec: TensorSpec, source: str) -> None:
    """Raise [`FormatError`] unless a change fits its tensor: types, lengths, indices in range and ascending."""
    from delta_wire.kernels import cpu

    arrays = [part.new] if part.old is None else [part.new, part.old]
    if part.indices.dtype not in (np.int32, np.int64) or any(array.dtype != np.uint16 for array in arrays):
        raise FormatError(
            f"{source}: tensor {spec.name}: expected int32 or int64 indices and uint16 bits, found "
            f"{part.indices.dtype} and {', '.join(str(array.dtype) for array in arrays)}"
        )
    if part.indices.ndim != 1 or any(array.shape != part.indices.shape for array in arrays):
        raise FormatError(
            f"{source}: tensor {spec.name}: expected one value per index, found {part.indices.shape} indices and "
            f"{', '.join(str(array.shape) for array in arrays)} values"
        )
    wrong = int(cpu.check_indices(part.indices, spec.num_elements))
    if wrong >= 0:
        before = f" after {part.indices[wrong - 1]}" if wrong else ""
        raise FormatError(
            f"{source}: tensor {spec.name}: index {part.indices[wrong]}{before} at position {wrong} is out of range "
            f"or not ascending; expected strictly ascending indices below {spec.num_elements}"
        )


def whole(part: TensorDelta, new_bits: np.ndarray) -> TensorDelta:
    """The same change with every element of the tensor listed, which encodings store without indices.

    Args:
        part ([`TensorDelta`]): the change.
        new_bits (`np.ndarray`): all bits of the tensor after the change, flat, uint16; copied.
    """
    new = new_bits.reshape(-1).copy()
    old = None
    if part.old is not None:
        old = new.copy()
        old[part.indices] = part.old
    return TensorDelta(part.name, np.arange(new.size, dtype=index_dtype(new.size)), new, old)


def resolve(part: TensorDelta, old: np.ndarray) -> TensorDelta:
    """The same change with bits in place of steps.

    Args:
        part ([`TensorDelta`]): the change.
        old (`np.ndarray`): uint16 `[K]`, bits at its indices in the state that it applies to.
    """
    if part.relative is None:
        return TensorDelta(part.name, part.indices, part.new, old)
    from delta_wire.kernels import cpu_steps

    moved = np.empty_like(part.new)
    cpu_steps.apply_steps(old, part.new, moved)
    return TensorDelta(part.name, part.indices, np.where(part.relative, moved, part.new), old)


def num_changed(delta: Delta) -> int:
    """Changed elements of a delta. Where old bits are at hand, listed elements that keep their bits do not count."""
    return sum(
        part.num_changed if part.old is None else int(np.count_nonzero(part.old != part.new))
        for part in delta.values()
    )


def change_of_digest(delta: Delta) -> Digest:
    """What a delta (with old bits) adds to the digest of its base."""
    total = Digest()
    for part in delta.values():
        if part.old is None:
            raise ValueError(f"change_of_digest: {part.name} has no old bits")
        total = total + digest_change(part.name, part.indices, part.old, part.new)
    return total


def after(bits: np.ndarray, part: TensorDelta | None) -> np.ndarray:
    """A whole tensor after a change to new bits, in its own shape; the same array where there is none."""
    if part is None:
        return bits
    moved = bits.copy()
    moved.reshape(-1)[part.indices] = part.new
    return moved


def inverse(delta: Delta) -> Delta:
    """What takes a delta with old bits back."""
    return {
        name: TensorDelta(name, part.indices, new=part.old, old=part.new)
        for name, part in delta.items()
        if part.old is not None
    }


def compose(first: Delta, second: Delta) -> Delta:
    """The change that equals `first` followed by `second`.

    Where both touch an element the second's bits win. With old bits on both sides, elements that end where they began
    are dropped; without, all are kept. Steps add up, and move bits that they follow.
    """
    merged = dict(first)
    for name, after in second.items():
        before = merged.get(name)
        merged[name] = after if before is None else _compose_tensor(before, after)
    return {name: part for name, part in merged.items() if part.num_changed}


def _compose_tensor(first: TensorDelta, second: TensorDelta) -> TensorDelta:
    from delta_wire.kernels import cpu

    size = int(cpu.merge_count(first.indices, second.indices))
    indices = np.empty(size, dtype=np.promote_types(first.indices.dtype, second.indices.dtype))
    if first.relative is not None or second.relative is not None:
        return _compose_relative(first, second, indices)
    old, new = np.empty(size, dtype=np.uint16), np.empty(size, dtype=np.uint16)
    old_1, old_2 = first.old, second.old
    has_old = old_1 is not None and old_2 is not None
    if old_1 is None or old_2 is None:
        # any array of the right size: without old bits nothing is compared with it
        old_1, old_2 = first.new, second.new
    written = int(
        cpu.merge_fill(first.indices, old_1, first.new, second.indices, old_2, second.new, has_old, indices, old, new)
    )
    return TensorDelta(first.name, indices[:written], new[:written], old[:written] if has_old else None)


def _compose_relative(first: TensorDelta, second: TensorDelta, indices: np.ndarray) -> TensorDelta:
    from delta_wire.kernels import cpu_steps

    new, relative = np.empty(indices.size, dtype=np.uint16), np.empty(indices.size, dtype=bool)
    absolute = np.zeros(max(first.num_changed, second.num_changed), dtype=bool)
    relative_1 = absolute[: first.num_changed] if first.relative is None else first.relative
    relative_2 = absolute[: second.num_changed] if second.relative is None else second.relative
    cpu_steps.merge_relative(
        first.indices, first.new, relative_1, second.indices, second.new, relative_2, indices, new, relative
    )
    return TensorDelta(first.name, indices, new, relative=relative)
