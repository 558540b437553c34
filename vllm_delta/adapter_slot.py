# SPDX-License-Identifier: Apache-2.0
"""One rank's slot for the adapter of a run: load a version beside the steps, exchange it between two, prove it.

vLLM holds an adapter as copies: factors of fused layers side by side, cut for tensor parallelism, `B` multiplied by
the scaling. So what is live is not the version's bits but follows from them, and the proof is a comparison of every
live element with what the version's file gives here, worked out anew from the file and its configuration.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from delta_wire.checkpoint import ADAPTER_CONFIG, Checkpoint
from delta_wire.errors import FormatError, LayoutError, SetupError
from vllm_delta.adapter_label import ADAPTER_ID


@dataclass(slots=True)
class AdapterPlan:
    """A version of the adapter, read into host memory."""

    loaded: Any
    folder: Path
    # what was live before, once it has been exchanged
    before: tuple[Any, Path | None] | None = field(default=None)


class AdapterSlot:
    """The place of one adapter among those that vLLM serves.

    Args:
        lora: vLLM's manager of adapters on this worker; `None` if the server was started without them.
    """

    def __init__(self, lora: Any):
        self._lora = lora
        self._folder: Path | None = None

    def plan(self, folder: Path, name: str) -> tuple[AdapterPlan, dict[str, Any]]:
        """Read a version. Touches nothing that a step reads.

        Args:
            folder (`Path`): adapter as PEFT saves it, in bf16.
            name (`str`): of the adapter.

        Returns:
            The plan, and what this rank says about it: `digest` of the file, `used`: names of the tensors that have a
            place on this rank.
        """
        from vllm.lora.request import LoRARequest

        self._require_room()
        try:
            loaded = self._lora._load_adapter(LoRARequest(name, ADAPTER_ID, str(folder)))
        except Exception as error:
            raise LayoutError(
                f"vLLM does not load the adapter {name} with this configuration: {error} (start the server with "
                "--max-lora-rank of at least the adapter's rank; what vLLM cannot serve as an adapter can be "
                "published with delta_sync_adapter=merged)"
            ) from error
        factors = [factors for factors in self._factors(folder) if factors.tensors]
        for one in factors:
            one.require_provable()
        used = [tensor for one in factors for tensor in one.tensors]
        return AdapterPlan(loaded, folder), {"digest": str(Checkpoint(folder).digest()), "used": used}

    def commit(self, plan: AdapterPlan) -> None:
        """Exchange the adapter and compare every live element. Main thread, between two steps."""
        manager = self._manager
        if plan.before is not None:
            raise LayoutError("this plan was already begun; stage the version again")
        # somebody may have loaded another one meanwhile
        self._require_room()
        plan.before = (manager.get_adapter(ADAPTER_ID), self._folder)
        self._put(plan.loaded)
        self._require_live(plan.folder)
        self._folder = plan.folder

    def undo(self, plan: AdapterPlan) -> bool:
        """Put the adapter back that was there before. Returns whether every element of it is live again."""
        if plan.before is None:
            return True
        loaded, self._folder = plan.before
        if loaded is None or self._folder is None:
            self._manager.remove_adapter(ADAPTER_ID)
            return ADAPTER_ID not in self._manager.list_adapters()
        self._put(loaded)
        self._require_live(self._folder)
        return True

    def check(self) -> dict[str, Any]:
        """Compare every live element with the file of the version, and say what that is. Only reads."""
        if self._folder is None:
            raise LayoutError("this rank holds no adapter")
        digest = str(Checkpoint(self._folder).digest())
        try:
            self._require_live(self._folder)
        except LayoutError as error:
            return {"digest": digest, "problem": str(error)}
        return {"digest": digest, "problem": None}

    @property
    def _manager(self) -> Any:
        return self._lora._adapter_manager

    def _require_room(self) -> None:
        if self._lora is None:
            raise SetupError(
                "the run publishes an adapter, and this server was started without --enable-lora; add it, with "
                "--max-lora-rank of at least the adapter's rank"
            )
        others = set(self._manager.list_adapters()) - {ADAPTER_ID}
        # a step may need all others at once, and the run's keeps its slot
        if len(others) >= self._manager.lora_slots:
            raise SetupError(
                f"all {self._manager.lora_slots} slots for adapters are taken by others (--lora-modules); the run's "
                f"adapter needs one for itself: start with --max-loras {len(others) + 1} or more, or unload one"
            )
        if self._lora.lora_config.lora_dtype != torch.bfloat16:
            raise SetupError(
                f"the server holds adapters as {self._lora.lora_config.lora_dtype}, format 1 carries torch.bfloat16; "
                "serve with --dtype bfloat16 and without --lora-dtype"
            )

    def _put(self, loaded: Any) -> None:
        manager = self._manager
        manager.remove_adapter(ADAPTER_ID)
        if len(manager) + 1 > manager.capacity:
            manager.remove_oldest_adapter()
        manager.add_adapter(loaded)
        manager.activate_adapter(ADAPTER_ID)
        # an adapter that vLLM may drop would be loaded again from wherever a request says
        manager.pin_adapter(ADAPTER_ID)

    def _require_live(self, folder: Path) -> None:
        """Raise [`LayoutError`] unless every element of the slot is what a version's file gives."""
        manager = self._manager
        if ADAPTER_ID not in manager.lora_index_to_id:
            raise LayoutError("the run's adapter is in none of the server's slots; something has removed it")
        slot = manager.lora_index_to_id.index(ADAPTER_ID)
        for factors in self._factors(folder):
            for live, wanted in factors.buffers(slot):
                if not torch.equal(live.cpu().view(torch.int16), wanted.view(torch.int16)):
                    raise LayoutError(
                        f"{factors.name}: the live adapter is not what {', '.join(factors.tensors) or 'no tensor'} "
                        "of the version gives; something else writes to it, or vLLM loads it in another way"
                    )

    def _factors(self, folder: Path) -> Iterator[_Factors]:
        """What a version gives for each layer that can have an adapter."""
        found = _read(folder, getattr(self._manager.model, "hf_to_vllm_mapper", None))
        for name, layer in self._manager.modules.items():
            fused = self._manager.packed_modules.get(name)
            yield _Factors(name, layer, [found.get(part, {}) for part in fused or [name]], fused is not None)


@dataclass(frozen=True, slots=True)
class _Factors:
    """The factors of one layer: for each of the projections fused in it `A` and `B` with the tensors' names."""

    name: str
    layer: Any
    parts: Sequence[Mapping[str, tuple[str, torch.Tensor]]]
    is_fused: bool

    @property
    def tensors(self) -> list[str]:
        return [name for part in self.parts for name, _ in part.values()]

    def buffers(self, slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every live buffer of the layer in a slot, and what it must hold."""
        if not self.tensors:
            for buffer in _stacked(self.layer):
                yield buffer[slot], torch.zeros(buffer[slot].shape, dtype=buffer.dtype)
            return
        sides = {side: [part[side][1] if side in part else None for part in self.parts] for side in "AB"}
        cut = {"A": self.layer.slice_lora_a, "B": self.layer.slice_lora_b}
        for side, stacked in (("A", self.layer.lora_a_stacked), ("B", self.layer.lora_b_stacked)):
            whole: Any = sides[side] if self.is_fused else sides[side][0]
            own = cut[side](whole) if self.layer.tp_size > 1 else whole
            for buffer, factor in zip(stacked, own if self.is_fused else [own], strict=True):
                wanted = torch.zeros(buffer[slot, 0].shape, dtype=buffer.dtype)
                if factor is not None:
                    wanted[: factor.shape[0], : factor.shape[1]] = factor
                yield buffer[slot, 0], wanted

    def require_provable(self) -> None:
        """Raise [`LayoutError`] for layers whose buffers are not known to follow from the file as told above."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        if not isinstance(self.layer, BaseLinearLayerWithLoRA) or len(self.layer.lora_a_stacked) != len(self.parts):
            raise LayoutError(
                f"{self.name}: adapters of {type(self.layer).__name__} cannot be proven in this release; supported "
                "are linear layers. Publish with delta_sync_adapter=merged."
            )
        for part in self.parts:
            if len(part) == 1:
                raise FormatError(
                    f"{next(iter(part.values()))[0]}: the adapter has one of the layer's two factors only"
                )


def _stacked(layer: Any) -> Iterator[torch.Tensor]:
    """All buffers of a layer that hold one adapter in each slot."""
    for name, value in vars(layer).items():
        if name.endswith("_stacked"):
            yield from value if isinstance(value, (tuple, list)) else [value]


def _read(folder: Path, mapper: Any) -> dict[str, dict[str, tuple[str, torch.Tensor]]]:
    """Factors by the name of vLLM's layer: `A` as in the file, `B` with the scaling in it, rounded once to bf16."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    mapper = None if mapper is None else mapper.get_rename_mapper()
    checkpoint = Checkpoint(folder)
    found: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    for tensor in checkpoint.table():
        layer, is_low = parse_fine_tuned_lora_name(tensor, mapper)
        factor = torch.from_numpy(checkpoint.bits(tensor).view(np.int16)).view(torch.bfloat16)
        if not is_low:
            scaling = scaling_of(config, parse_fine_tuned_lora_name(tensor)[0])
            factor = factor * scaling if scaling != 1 else factor
        found.setdefault(layer, {})["A" if is_low else "B"] = (tensor, factor)
    return found


def scaling_of(config: Mapping[str, Any], layer: str) -> float:
    """What PEFT multiplies `B · A` of a layer by.

    Args:
        config (`dict`): `adapter_config.json`.
        layer (`str`): name of the layer in the trained model.
    """
    rank = _of_pattern(config.get("rank_pattern"), layer, config["r"])
    alpha = _of_pattern(config.get("alpha_pattern"), layer, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(pattern: Mapping[str, Any] | None, layer: str, otherwise: Any) -> Any:
    return next((value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", layer)), otherwise)
