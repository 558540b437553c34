# SPDX-License-Identifier: Apache-2.0
"""From the tensors of a live training model to the names of its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delta_wire.errors import ModelMismatchError, SetupError
from delta_wire.shards import Shard
from delta_wire.state import TensorSpec, TensorTable
from trl_delta.adapters import AdapterMap
from trl_delta.conversions import Part, in_tower, saved_parts, tower_names
from trl_delta.merging import Merge
from trl_delta.wrappers import unwrap

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One tensor of the training model's checkpoint, as a way to read it from the live model.

    Args:
        names (`tuple[str, ...]`): its checkpoint names; more than one where the checkpoint stores a tied tensor twice.
        source (`torch.Tensor`): the parameter or persistent buffer that holds it.
        part ([`~trl_delta.conversions.Part`], *optional*): where in the source it lies, if it is not all of it.
        merge ([`~trl_delta.merging.Merge`], *optional*): adapters that belong into it and are not in the source.
        start (`int`, *optional*, defaults to `0`): flat checkpoint index of its first element, where this is only what
            one of several processes owns.
        shard ([`~delta_wire.shards.Shard`], *optional*): rows that this process owns.
    """

    names: tuple[str, ...]
    source: torch.Tensor
    part: Part | None = None
    merge: Merge | None = None
    start: int = 0
    shard: Shard | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape) if self.part is None else self.part.shape

    @property
    def tensor(self) -> torch.Tensor:
        """The values as they are now, detached: a view of the source, or a merged copy in fp32 with adapters."""
        values = self.source.detach() if self.merge is None else self.merge.apply(self.source)
        if self.part is None:
            return values
        return values.reshape(-1)[self.part.start : self.part.stop].view(self.part.shape)


@dataclass
class _Entry:
    """What the checkpoint has of one live tensor, or of a part of it."""

    live_names: list[str]
    part: Part | None
    names: list[str] = field(default_factory=list)
    merge: Merge | None = None


class Naming:
    """Which tensor of a model goes under which checkpoint name; found out once, at the start of a training.

    Args:
        model (`torch.nn.Module`): the training model, prepared or not.
        base ([`~delta_wire.state.TensorTable`], *optional*): table of the checkpoint the model was loaded from. It
            decides under which name, or names, a tied tensor goes, and whether fused experts are stored one by one.
        base_only (`bool`, *optional*, defaults to `False`): as if there were no adapters.

    Attributes:
        kept (`tuple[str, ...]`): tensors of the base checkpoint that the model does not hold, so that training never
            changes them: the other towers of a multimodal checkpoint whose text tower is trained, and what the model's
            class declares as not its own (heads that only other programs use).

    Raises:
        [`~delta_wire.errors.SetupError`]: for models this release cannot read, in one sentence.
        [`~delta_wire.errors.ModelMismatchError`]: when several tensors claim one checkpoint name.
    """

    def __init__(self, model: torch.nn.Module, base: TensorTable | None = None, *, base_only: bool = False):
        self._base: TensorTable | dict[str, TensorSpec] = {} if base is None else base
        self._adapters = AdapterMap.of(model, base_only=base_only)
        self._tower = tower_names(self._base)
        self._uses_tower = False
        # with keep_vars tied parameters are one object under several names
        state = model.state_dict(keep_vars=True)
        self._live_names = list(state)
        clean = {name: self._adapters.clean(name, self._base) for name in state}
        self._entries = self._locate(model, state, clean)
        self._require_one_owner()
        self.kept = self._find_kept(unwrap(model))

    def live(self, model: torch.nn.Module) -> list[LiveTensor]:
        """All parameters (trained or frozen) and persistent buffers as they are now, in checkpoint-name order.

        Args:
            model (`torch.nn.Module`): the same model; its tensors may have become other objects.
        """
        state = model.state_dict(keep_vars=True)
        if len(state) != len(self._live_names) or any(name not in state for name in self._live_names):
            changed = sorted(set(self._live_names) ^ set(state))
            raise SetupError(
                f"the model has other tensors than when training began: {', '.join(changed[:8])}; a model must keep "
                "its tensors while its weights are published"
            )
        live = []
        for entry in self._entries:
            source = state[entry.live_names[0]]
            refuse_tensor(entry.live_names[0], source)
            if any(state[name] is not source for name in entry.live_names[1:]):
                raise SetupError(
                    f"the tensors {' and '.join(entry.live_names)} were tied when training began and are not any more"
                )
            live.append(LiveTensor(tuple(entry.names), source, entry.part, entry.merge))
        return live

    def _locate(
        self, model: torch.nn.Module, state: dict[str, torch.Tensor], clean: dict[str, str | None]
    ) -> list[_Entry]:
        converted: dict[str, list[tuple[str, Part]]] = {}
        shapes = {name: tuple(state[live].shape) for live, name in clean.items() if name is not None}
        if any(self._stored(name) is None for name in shapes):
            converted = saved_parts(unwrap(model), shapes)
        entries: dict[tuple[int, Part | None], _Entry] = {}
        for live_name, name in clean.items():
            if name is None:
                continue
            tensor = state[live_name]
            refuse_tensor(live_name, tensor)
            for saved_name, part in self._places(name, shapes[name], converted.get(name, [])):
                entry = entries.setdefault((id(tensor), part), _Entry([], part))
                if live_name not in entry.live_names:
                    entry.live_names.append(live_name)
                if saved_name not in entry.names:
                    entry.names.append(saved_name)
        for entry in entries.values():
            stored = [name for name in entry.names if name in self._base]
            # under a name that the checkpoint does not have: kept, so that the comparison of the tables names it
            entry.names = stored or entry.names[:1]
            entry.merge = self._merge_of(entry.live_names)
        return sorted(entries.values(), key=lambda entry: entry.names[0])

    def _places(
        self, name: str, shape: tuple[int, ...], converted: list[tuple[str, Part]]
    ) -> list[tuple[str, Part | None]]:
        """Checkpoint names of a tensor with the parts they hold; `None` is all of it."""
        stored = self._stored(name)
        if stored is not None:
            return [(stored, None)]
        places = [(self._stored(saved) or saved, part) for saved, part in converted]
        if not places or (self._base and not any(saved in self._base for saved, _ in places)):
            return [(name, None)]
        return [(saved, None if part == Part(0, shape) else part) for saved, part in places]

    def _stored(self, name: str) -> str | None:
        """The name under which the base checkpoint stores a tensor that it may hold in its text tower."""
        if name in self._base:
            return name
        in_base = self._tower.get(name, [])
        if len(in_base) != 1:
            return None
        self._uses_tower = True
        return in_base[0]

    def _merge_of(self, live_names: list[str]) -> Merge | None:
        merges = [self._adapters.merge_of(name) for name in live_names]
        if any(merge is not merges[0] for merge in merges):
            raise SetupError(
                f"the tensors {' and '.join(live_names)} are tied, and an adapter changes one of them only; train "
                "without the adapter on it, or with ensure_weight_tying"
            )
        return merges[0]

    def _require_one_owner(self) -> None:
        owners: dict[str, list[str]] = {}
        for entry in self._entries:
            for name in entry.names:
                owners.setdefault(name, []).append(entry.live_names[0])
        double = [f"{' and '.join(live)} both map to {name}" for name, live in owners.items() if len(live) > 1]
        if double:
            raise ModelMismatchError(
                f"{len(double)} checkpoint names are claimed by several of the model's tensors: "
                f"{'; '.join(double[:8])}. Delta sync cannot tell them apart: train without the wrapper that adds the "
                "segment, or rename the module."
            )

    def _find_kept(self, model: torch.nn.Module) -> tuple[str, ...]:
        held = {name for entry in self._entries for name in entry.names}
        ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        return tuple(
            name
            for name in self._base
            if name not in held
            and ((self._uses_tower and not in_tower(name)) or any(pattern.search(name) for pattern in ignored))
        )


def live_tensors(model: torch.nn.Module, base: TensorTable | None = None) -> list[LiveTensor]:
    """A model's tensors under their checkpoint names, each once; see [`Naming`]."""
    return Naming(model, base).live(model)


def table_of(live: Iterable[LiveTensor], kept: Iterable[TensorSpec] = ()) -> TensorTable:
    """The table that the model's checkpoint in bf16 has.

    Args:
        live: the model's tensors.
        kept (*optional*): tensors of the checkpoint that the model does not hold.
    """
    specs = [TensorSpec(name, entry.shape) for entry in live for name in entry.names]
    return TensorTable([*specs, *kept])


def refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise [`SetupError`] for tensors that this release cannot read."""
    from delta_wire.kernels.reference import ROUNDABLE

    # DeepSpeed marks what it has partitioned; the tensor itself is an empty placeholder
    if hasattr(tensor, "ds_id"):
        raise SetupError(
            f"parameter {name} is partitioned by DeepSpeed ZeRO-3, which delta sync cannot read; train with FSDP2 or "
            "with ZeRO-2"
        )
    if tensor.device.type == "meta":
        raise SetupError(f"parameter {name} has no data (device meta, as when offloaded), which is not supported yet")
    if tensor.dtype not in ROUNDABLE:
        raise SetupError(
            f"tensor {name} is {tensor.dtype}; delta weight sync carries tensors that a bf16 checkpoint holds "
            f"(float32, bfloat16 or float16 in the trainer), and nothing else yet"
        )
