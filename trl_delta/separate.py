# SPDX-License-Identifier: Apache-2.0
"""Publishing a PEFT adapter by itself: its tensors under the names PEFT saves them by, and proof of the base below."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_wire.adapter import Adapter
from delta_wire.checkpoint import ADAPTER_FILE, Checkpoint
from delta_wire.container import write_tensors
from delta_wire.digest import Digest, digest_tensor
from delta_wire.errors import BaseMismatchError, SetupError
from delta_wire.state import DTYPE
from trl_delta.base import require_base
from trl_delta.config import DeltaSyncConfig
from trl_delta.detector import digest_now
from trl_delta.joint import agreed_digest, owned
from trl_delta.names import LiveTensor, Naming, refuse_tensor, table_of
from trl_delta.ranks import Ranks
from trl_delta.wrappers import checkpoint_name, is_peft_model

if TYPE_CHECKING:
    import torch


class SeparateAdapter:
    """The active adapter of a PEFT model; stands in for [`~trl_delta.names.Naming`] where only it is published.

    Args:
        model (`torch.nn.Module`): the training model, prepared or not.
        config ([`DeltaSyncConfig`]): settings.
        reference (`str`, *optional*): where the base model was loaded from.
        base ([`~delta_wire.checkpoint.Checkpoint`], *optional*): that checkpoint, if it is at hand and in bf16.
        ranks ([`~trl_delta.ranks.Ranks`], *optional*): of a training on several processes, which all make this alike.

    Attributes:
        described ([`~delta_wire.adapter.Adapter`]): what servers must know; once [`SeparateAdapter.require_base`] has
            returned.
        kept (`tuple`): empty: an adapter has no tensors that the model does not hold.

    Raises:
        [`~delta_wire.errors.SetupError`]: for models without one active adapter, and adapters that cannot be read.
    """

    kept: tuple[str, ...] = ()
    described: Adapter

    def __init__(
        self,
        model: torch.nn.Module,
        config: DeltaSyncConfig,
        reference: str | None,
        base: Checkpoint | None,
        ranks: Ranks | None = None,
    ):
        peft = _peft_model(model)
        self._adapter = _active_adapter(peft)
        self._entries = _entries(peft, self._adapter)
        self._name, self._rank = config.delta_sync_adapter_name, _largest_rank(peft, self._adapter)
        self._ranks = ranks or Ranks()
        self._reference = reference
        self._base = base
        base_table = None if base is None else base.table()
        self._naming = Naming(model, base_table, base_only=True)
        kept = [] if base_table is None else [base_table[name] for name in self._naming.kept]
        self._base_table = table_of(self._naming.live(model), kept)
        if base_table is not None:
            require_base(base_table, self._base_table, reference)
        # of what this process owns
        self._base_digest = self._digest_base(model)

    def agree_on_base(self) -> Digest:
        """Digest of the weights below the adapter; all processes call this."""
        return agreed_digest(self._ranks, self._base_table, self._base_digest)

    def require_base(self, digest: Digest) -> None:
        """Raise [`~delta_wire.errors.BaseMismatchError`] if the weights below the adapter, which have this digest, are
        not those of their checkpoint."""
        if self._base is not None and digest != self._base.digest():
            raise BaseMismatchError(
                f"the weights below the adapter {self._adapter} have digest {digest}, the checkpoint "
                f"{self._reference} has {self._base.digest()}, so servers would add the adapter to another model than "
                "the one it is trained on. Something has changed them since they were loaded (init_lora_weights such "
                "as pissa or olora, or a merge): save the base model and start from there, or use "
                "delta_sync_adapter=merged."
            )
        self.described = Adapter(self._name, self._rank, digest, self._reference)

    def live(self, model: torch.nn.Module) -> list[LiveTensor]:
        """The adapter's tensors as they are now, under the names they are saved by.

        Args:
            model (`torch.nn.Module`): the same model; its tensors may have become other objects.
        """
        peft = _peft_model(model)
        if _active_adapter(peft) != self._adapter:
            raise SetupError(
                f"the active adapter is {_active_adapter(peft)}, it was {self._adapter} when training began; a run "
                "publishes one adapter"
            )
        state = _state(peft)
        live = []
        for live_name, names in self._entries.items():
            if live_name not in state:
                raise SetupError(f"the tensor {live_name} of the adapter is gone; a model must keep its tensors")
            refuse_tensor(live_name, state[live_name])
            live.append(LiveTensor(names, state[live_name]))
        return live

    def require_base_unmoved(self, model: torch.nn.Module) -> None:
        """Raise [`BaseMismatchError`] if the weights below the adapter are not what they were at the start; each of
        several processes looks at those that it owns."""
        found = self._digest_base(model)
        if found != self._base_digest:
            raise BaseMismatchError(
                f"the weights below the adapter {self._adapter} have digest {found}, they had {self._base_digest} "
                "when training began: something has trained or merged into them, and the adapter that was published "
                "is not the policy that was trained. Train the adapter only, or use delta_sync_adapter=merged."
            )

    def save(self, folder: Path, bits: dict[str, np.ndarray], model: torch.nn.Module) -> None:
        """Write a folder that PEFT and vLLM open: the adapter in bf16 and its configuration.

        Args:
            bits (`dict`): of the adapter's tensors, uint16 in their shapes.
        """
        tensors = {name: (DTYPE, array.shape, array) for name, array in bits.items()}
        write_tensors(folder / ADAPTER_FILE, tensors, {"format": "pt"})
        self.save_files(folder, model)

    def save_files(self, folder: Path, model: torch.nn.Module) -> None:
        """Write the configuration alone, as `save_pretrained` does."""
        config = copy.deepcopy(_peft_model(model).peft_config[self._adapter])
        config.inference_mode = True
        if not config.base_model_name_or_path:
            config.base_model_name_or_path = self.described.base_reference
        config.save_pretrained(folder)

    def _digest_base(self, model: torch.nn.Module) -> Digest:
        total = digest_now(owned(self._naming.live(model), self._ranks))
        if self._base is not None and self._ranks.is_first:
            total = sum((digest_tensor(name, self._base.bits(name)) for name in self._naming.kept), total)
        return total


def _largest_rank(peft: Any, adapter: str) -> int:
    config = peft.peft_config[adapter]
    return max([config.r, *(config.rank_pattern or {}).values()])


def _peft_model(model: torch.nn.Module) -> Any:
    found = next((module for module in model.modules() if is_peft_model(module)), None)
    if found is None:
        raise SetupError(
            "delta_sync_adapter is 'separate', but the model is none of PEFT's (get_peft_model, or peft_config of the "
            "trainer), so there is no adapter to publish; use delta_sync_adapter=merged"
        )
    return found


def _active_adapter(peft: Any) -> str:
    active = list(peft.active_adapters)
    if len(active) != 1:
        raise SetupError(
            f"delta_sync_adapter is 'separate', which needs one active adapter, found {', '.join(active) or 'none'}; "
            "use delta_sync_adapter=merged"
        )
    kind = peft.peft_config[active[0]]
    if kind.peft_type != "LORA":
        raise SetupError(
            f"adapter {active[0]} is {type(kind).__name__}; only LoRA can be published as a separate adapter"
        )
    return active[0]


def _state(peft: Any) -> dict[str, torch.Tensor]:
    # by the modules' own paths, in which PEFT looks for its layers: a state dict leaves out segments of some wrappers
    return {**dict(peft.named_buffers(remove_duplicate=False)), **dict(peft.named_parameters(remove_duplicate=False))}


def _entries(peft: Any, adapter: str) -> dict[str, tuple[str, ...]]:
    """Name in the live model → names in `adapter_model.safetensors`, by asking PEFT what it would save."""
    # whoever has made the model has imported it
    save = sys.modules["peft"].get_peft_model_state_dict
    state = _state(peft)
    live_names = {id(tensor): name for name, tensor in reversed(state.items())}
    entries: dict[str, tuple[str, ...]] = {}
    for saved, tensor in save(peft, state_dict=state, adapter_name=adapter, save_embedding_layers=False).items():
        live_name = live_names.get(id(tensor))
        if live_name is None:
            raise SetupError(
                f"PEFT computes {saved} of adapter {adapter} when it is saved, so it cannot be published as a "
                "separate adapter; use delta_sync_adapter=merged"
            )
        refuse_tensor(live_name, tensor)
        entries[live_name] = (*entries.get(live_name, ()), checkpoint_name(saved))
    return dict(sorted(entries.items(), key=lambda entry: entry[1][0]))
