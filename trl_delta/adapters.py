# SPDX-License-Identifier: Apache-2.0
"""PEFT models: which tensors belong to adapters, and the weights with the adapters in them.

Found by the types of the modules and not by names: adapters are called what the user calls them, and a model may have
a module of its own whose name contains `lora_`.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from delta_wire.errors import SetupError
from trl_delta.dtensors import is_sharded
from trl_delta.wrappers import WRAPPER_SEGMENTS, checkpoint_name, is_peft_model

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

# of a product's rows, computed in one go
_BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class Factors:
    """What one adapter adds to a weight of `N` rows: the product of two thin matrices.

    Args:
        high, low (`torch.Tensor`): `[N, r]` and `[r, columns]`, or `[columns, r]` and `[r, N]` if it is `transposed`.
        scaling (`float`): of the product.
        transposed (`bool`): the weight's rows are the product's columns.
    """

    high: torch.Tensor
    low: torch.Tensor
    scaling: float
    transposed: bool

    def add_to(self, merged: torch.Tensor, first_row: int) -> None:
        """Add it to some of the weight's rows.

        The product is computed in blocks of rows that lie where they lie in the whole weight, each scaled, then added,
        every step rounded by itself. So the bits of an element do not depend on which rows a process has.

        Args:
            merged (`torch.Tensor`): rows of the weight in fp32.
            first_row (`int`): where they begin.
        """
        import torch

        high, low = self.high.detach().to(torch.float32), self.low.detach().to(torch.float32)
        num_rows, stop_row = low.shape[1] if self.transposed else high.shape[0], first_row + merged.shape[0]
        for begin in range(first_row - first_row % _BLOCK_ROWS, stop_row, _BLOCK_ROWS):
            end = min(begin + _BLOCK_ROWS, num_rows)
            update = (high @ low[:, begin:end]).T if self.transposed else high[begin:end] @ low
            first, last = max(begin, first_row), min(end, stop_row)
            merged[first - first_row : last - first_row].add_(update.mul_(self.scaling)[first - begin : last - begin])


@dataclass(frozen=True, slots=True)
class Merge:
    """The LoRA adapters of one layer.

    Args:
        layer: a LoRA layer of PEFT, linear or embedding.
        path (`str`): where it stands, for errors.
        factors (tuple of [`Factors`], *optional*): of the active adapters, if they have been gathered.
        first_row (`int`, *optional*, defaults to `0`): the row of the layer's weight that those given to
            [`Merge.apply`] begin with.
    """

    layer: Any
    path: str
    factors: tuple[Factors, ...] | None = None
    first_row: int = 0

    def sharded(self) -> list[DTensor]:
        """What of the active adapters is spread over processes, in an order that is the same on each."""
        found = (tensor for _, low, high, _ in self._parts() for tensor in (low, high))
        return [tensor for tensor in found if is_sharded(tensor)]  # type: ignore[misc]

    def with_whole(self, whole: Mapping[int, torch.Tensor]) -> Merge:
        """With the factors as they are now.

        Args:
            whole (`dict`): what [`Merge.sharded`] lists, gathered, by `id`.
        """
        return replace(self, factors=tuple(self._factors(whole)))

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """The layer's weight, or rows of it, with the active adapters in it.

        Args:
            weight (`torch.Tensor`): of the base layer, in any float type; not touched, so that it cannot drift.

        Returns:
            `torch.Tensor`: a new tensor in fp32, `W + scaling · B · A`, to be rounded once.
        """
        import torch

        merged = weight.detach().to(torch.float32, copy=True)
        for factors in self._factors({}) if self.factors is None else self.factors:
            factors.add_to(merged, self.first_row)
        return merged

    def _factors(self, whole: Mapping[int, torch.Tensor]) -> Iterator[Factors]:
        for name, low, high, transposed in self._parts():
            low, high = whole.get(id(low), low), whole.get(id(high), high)
            yield Factors(high, low, self.layer.scaling[name], transposed)

    def _parts(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, bool]]:
        """Name, factors as they lie here, and whether they are transposed, of each active adapter."""
        layer = self.layer
        if layer.merged_adapters:
            raise SetupError(
                f"{self.path}: the adapters {', '.join(layer.merged_adapters)} are merged into the base weight in "
                "place, so that publishing would count them twice; call unmerge_adapter() before training"
            )
        for name in active_adapters(layer):
            if name in layer.lora_A:
                yield name, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.fan_in_fan_out
            elif name in layer.lora_embedding_A:
                yield name, layer.lora_embedding_A[name], layer.lora_embedding_B[name], True
            # any other adapter does not target this layer


def active_adapters(module: Any) -> list[str]:
    """Names of the adapters that take part in the forward pass of a module of PEFT."""
    return [] if module.disable_adapters else list(module.active_adapters)


@dataclass
class AdapterMap:
    """Where adapters stand in a model; empty for a model without.

    Attributes:
        transparent (`set[str]`): paths of modules whose last segment is no part of a checkpoint's names.
        hidden (`set[str]`): paths of modules with tensors that no merged checkpoint has.
        merges (`dict[str, Merge]`): adapters by the path of the weight that they change.
    """

    transparent: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    merges: dict[str, Merge] = field(default_factory=dict)

    @classmethod
    def of(cls, model: torch.nn.Module, *, base_only: bool = False) -> AdapterMap:
        """Look for adapters; [`SetupError`] for kinds that cannot be merged.

        Args:
            base_only (`bool`, *optional*, defaults to `False`): leave all of them out.
        """
        found = cls()
        # whoever has made such a module has imported it
        if "peft" not in sys.modules:
            return found
        from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        for live_path, module in model.named_modules(remove_duplicate=False):
            path = checkpoint_name(live_path)
            if is_peft_model(module):
                _refuse_prompts(module)
                found.transparent.add(_join(path, "base_model"))
            elif isinstance(module, BaseTuner):
                found.transparent.add(_join(path, "model"))
            elif isinstance(module, BaseTunerLayer):
                if not base_only:
                    _require_plain_lora(module, path)
                    found.merges[_join(path, "base_layer.weight")] = Merge(module, path)
                found.transparent.add(_join(path, "base_layer"))
                found.hidden.update(_join(path, name) for name in module.adapter_layer_names)
            elif isinstance(module, ModulesToSaveWrapper):
                found._add_saved(module, path, [] if base_only else active_adapters(module))
            elif isinstance(module, AuxiliaryTrainingWrapper):
                raise SetupError(
                    f"{path}: {type(module).__name__} of PEFT cannot be published; use target_modules or "
                    "modules_to_save"
                )
        return found

    def clean(self, live_name: str, known: Container[str]) -> str | None:
        """Name without wrappers and without PEFT's segments; `None` for tensors of adapters.

        Args:
            live_name (`str`): in the live model.
            known (container of `str`): names of the checkpoint; one of them is never changed.
        """
        if live_name in known:
            return live_name
        path: list[str] = []
        with_wrappers: list[str] = []
        for segment in live_name.split("."):
            if segment in WRAPPER_SEGMENTS:
                with_wrappers.append(segment)
                continue
            path.append(segment)
            joined = ".".join(path)
            if joined in self.hidden:
                return None
            if joined not in self.transparent:
                with_wrappers.append(segment)
        # a module of the model that happens to be called like a wrapper
        return checkpoint_name(".".join(with_wrappers), known)

    def merge_of(self, live_name: str) -> Merge | None:
        """Adapters that the tensor's checkpoint contains and the tensor does not."""
        return self.merges.get(checkpoint_name(live_name))

    def _add_saved(self, module: Any, path: str, adapters: list[str]) -> None:
        active = next((name for name in adapters if name in module.modules_to_save), None)
        if active is None:
            self.hidden.add(_join(path, "modules_to_save"))
            self.transparent.add(_join(path, "original_module"))
            return
        self.hidden.add(_join(path, "original_module"))
        saved = _join(path, "modules_to_save")
        self.transparent.update((saved, _join(saved, active)))
        self.hidden.update(_join(saved, name) for name in module.modules_to_save if name != active)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse_prompts(model: Any) -> None:
    for name in model.active_adapters:
        if model.peft_config[name].is_prompt_learning:
            raise SetupError(
                f"adapter {name} is {type(model.peft_config[name]).__name__}, which changes prompts and not weights, "
                "so there is nothing to publish; use LoRA"
            )


def _require_plain_lora(layer: Any, path: str) -> None:
    from peft.tuners.lora.layer import Embedding, Linear

    order = type(layer).__mro__
    # FSDP2 puts a class of its own and FSDPModule in front of the class of what it shards
    kind = order[2] if order[1].__name__ == "FSDPModule" else order[0]
    if kind not in (Linear, Embedding):
        raise SetupError(
            f"{path}: adapters of type {type(layer).__module__}.{type(layer).__name__} cannot be published merged; "
            "supported is LoRA on linear and embedding layers"
        )
    for name in layer.scaling:
        if name in layer.lora_variant or layer.lora_bias.get(name):
            what = type(layer.lora_variant[name]).__name__ if name in layer.lora_variant else "lora_bias"
            raise SetupError(
                f"{path}: adapter {name} uses {what}, which cannot be published merged; supported is plain LoRA"
            )
