# SPDX-License-Identifier: Apache-2.0
"""Where a model's tensors lie in its checkpoint, if it is not simply under their own names.

transformers 5 fuses what checkpoints store apart (experts, one tensor each) and renames modules when it loads them; it
undoes both when it saves. The way back is traced here through transformers' own code: it is run on small tensors that
hold their own positions, and what comes out says which part of which tensor is saved under which name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from delta_wire.errors import SetupError

if TYPE_CHECKING:
    import torch

# segments under which checkpoints of several towers keep the one for text
TOWER_SEGMENTS = frozenset({"language_model", "text_model"})
# every tracer's positions lie in a range of their own
_RANGE_BITS = 40


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous part of a tensor.

    Args:
        start (`int`): flat index of its first element.
        shape (`tuple[int, ...]`): of the part.
    """

    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


def saved_parts(model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[tuple[str, Part]]]:
    """Under which names transformers saves a model's tensors.

    Args:
        model (`torch.nn.Module`): without wrappers.
        shapes (`dict`): of its tensors, by name.

    Returns:
        `dict`: by name, the checkpoint names and the parts they hold. Tensors of other libraries are absent, and so
        are those that transformers saves in another order of elements than it holds them.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    names = list(shapes)
    tracers = {name: _tracer(number, shapes[name]) for number, name in enumerate(names)}
    try:
        saved = revert_weight_conversion(model, dict(tracers))
    except Exception as error:
        raise SetupError(
            f"{type(model).__name__}: cannot find out how transformers saves this model: {type(error).__name__}: "
            f"{error}"
        ) from error
    parts: dict[str, list[tuple[str, Part]]] = {}
    for saved_name, traced in saved.items():
        found = _read(traced, names, shapes)
        if found is not None:
            parts.setdefault(found[0], []).append((saved_name, found[1]))
    return parts


def _tracer(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Positions of a tensor with two elements in place of its last dimension, which nothing splits."""
    import torch

    small = _small(shape)
    first = number << _RANGE_BITS
    return torch.arange(first, first + prod(small)).reshape(small)


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], 2) if len(shape) > 1 else shape


def _read(traced: torch.Tensor, names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, Part] | None:
    flat = traced.reshape(-1)
    if not flat.numel():
        return None
    first, last = int(flat[0]), int(flat[-1])
    if last - first != flat.numel() - 1 or not bool((flat[1:] - flat[:-1] == 1).all()):
        return None
    name = names[first >> _RANGE_BITS]
    shape = shapes[name]
    start = first & ((1 << _RANGE_BITS) - 1)
    if len(shape) < 2:
        return name, Part(start, tuple(traced.shape))
    if traced.shape[-1] != 2 or start % 2:
        return None
    return name, Part(start // 2 * shape[-1], (*traced.shape[:-1], shape[-1]))


def tower_names(base: Iterable[str]) -> dict[str, list[str]]:
    """Names of a checkpoint's text tower by the names they have in a model that is the text tower alone."""
    found: dict[str, list[str]] = {}
    for name in base:
        segments = name.split(".")
        if TOWER_SEGMENTS.intersection(segments):
            alone = ".".join(segment for segment in segments if segment not in TOWER_SEGMENTS)
            found.setdefault(alone, []).append(name)
    return found


def in_tower(name: str) -> bool:
    """Whether a checkpoint's tensor belongs to its text tower."""
    return not TOWER_SEGMENTS.isdisjoint(name.split("."))
