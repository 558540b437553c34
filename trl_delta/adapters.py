# SPDX-License-Identifier: Apache-2.0
"""PEFT models: which tensors belong to adapters, and which weights have adapters in their checkpoint.

Found by the types of the modules and not by names: adapters are called what the user calls them, and a model may have
a module of its own whose name contains `lora_`.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delta_wire.errors import SetupError
from trl_delta.merging import Merge, active_adapters
from trl_delta.wrappers import WRAPPER_SEGMENTS, checkpoint_name, is_peft_model

if TYPE_CHECKING:
    import torch


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
                    found._add_merges(module, path)
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

    def _add_merges(self, layer: Any, path: str) -> None:
        _require_mergeable(layer, path)
        self.merges[_join(path, "base_layer.weight")] = Merge(layer, path)
        if any(layer.lora_bias.values()):
            self.merges[_join(path, "base_layer.bias")] = Merge(layer, path, of_bias=True)

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


def _require_mergeable(layer: Any, path: str) -> None:
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
        variant = type(layer.lora_variant[name]).__name__ if name in layer.lora_variant else None
        if variant not in (None, "DoraLinearVariant", "DoraEmbeddingVariant"):
            raise SetupError(
                f"{path}: adapter {name} uses {variant}, which cannot be published merged; supported are plain LoRA "
                "and DoRA"
            )
        if layer.lora_bias.get(name) and getattr(layer.get_base_layer(), "bias", None) is None:
            raise SetupError(
                f"{path}: adapter {name} has a bias (lora_bias) and the layer below has none, so that no checkpoint "
                "can hold both together; leave such layers out of target_modules"
            )
