# SPDX-License-Identifier: Apache-2.0
"""From the tensors of a live training model to the names of its checkpoint."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_wire.errors import ModelMismatchError, SetupError
from delta_wire.state import TensorSpec, TensorTable

if TYPE_CHECKING:
    import torch

# path segments that wrappers put between a module and its parameters: DDP and FSDP1, torch.compile, activation
# checkpointing
WRAPPER_SEGMENTS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One tensor of the training model.

    Args:
        names (`tuple[str, ...]`): its checkpoint names; more than one where the checkpoint stores a tied tensor twice.
        tensor (`torch.Tensor`): the parameter or persistent buffer itself.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def checkpoint_name(name: str, known: Container[str] = ()) -> str:
    """Strip the segments of wrappers from a parameter's path, wherever they stand.

    Args:
        name (`str`): name in the live model.
        known (container of `str`, *optional*): names of the checkpoint; one of them is never changed.
    """
    if name in known:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def live_tensors(model: torch.nn.Module, base: TensorTable | None = None) -> list[LiveTensor]:
    """All parameters (trained or frozen) and persistent buffers of a model, each once, in checkpoint-name order.

    Args:
        model (`torch.nn.Module`): the training model, prepared or not, on one process.
        base ([`~delta_wire.state.TensorTable`], *optional*): table of the checkpoint the model was loaded from. It
            decides under which name, or names, a tied tensor goes.

    Raises:
        [`~delta_wire.errors.SetupError`]: for models this release cannot read, in one sentence.
        [`~delta_wire.errors.ModelMismatchError`]: when two tensors claim one checkpoint name.
    """
    refuse_unsupported(model)
    known = base if base is not None else ()
    groups: dict[int, tuple[torch.Tensor, list[str]]] = {}
    owners: dict[str, tuple[int, str]] = {}
    # with keep_vars tied parameters are one object under several names
    for live_name, tensor in model.state_dict(keep_vars=True).items():
        _refuse_tensor(live_name, tensor)
        name = checkpoint_name(live_name, known)
        owner = owners.setdefault(name, (id(tensor), live_name))
        if owner[0] != id(tensor):
            raise ModelMismatchError(
                f"the model's tensors {owner[1]} and {live_name} both map to the checkpoint name {name}; delta sync "
                "cannot tell them apart. Train without the wrapper that adds the segment, or rename the module."
            )
        names = groups.setdefault(id(tensor), (tensor, []))[1]
        if name not in names:
            names.append(name)
    live = []
    for tensor, names in groups.values():
        stored = [name for name in names if name in known]
        # under a name that the checkpoint does not have: kept, so that the comparison of the tables names it
        live.append(LiveTensor(tuple(stored or names[:1]), tensor))
    return sorted(live, key=lambda entry: entry.name)


def table_of(live: list[LiveTensor]) -> TensorTable:
    """The table that the model's checkpoint in bf16 has."""
    return TensorTable(TensorSpec(name, tuple(entry.tensor.shape)) for entry in live for name in entry.names)


def refuse_unsupported(model: torch.nn.Module, world_size: int = 1) -> None:
    """Raise [`SetupError`] for ways of training that a later release will read."""
    if world_size > 1:
        raise SetupError(
            f"delta weight sync of {world_size} training processes is not supported yet in this release; train on one "
            "process, or without delta sync"
        )
    if any(base.__name__ == "PeftModel" for base in type(model).__mro__) or getattr(
        model, "_hf_peft_config_loaded", False
    ):
        raise SetupError(
            "delta weight sync of PEFT adapters is not supported yet in this release; train the full model, or merge "
            "the adapter into it first"
        )


def _refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    from delta_wire.kernels.reference import ROUNDABLE

    # DeepSpeed marks what it has partitioned; the tensor itself is an empty placeholder
    if hasattr(tensor, "ds_id"):
        raise SetupError(f"parameter {name} is partitioned by DeepSpeed ZeRO-3, which is not supported yet")
    if type(tensor).__name__ == "DTensor" or hasattr(tensor, "to_local"):
        raise SetupError(f"parameter {name} is sharded (a DTensor, as under FSDP2), which is not supported yet")
    if tensor.device.type == "meta":
        raise SetupError(f"parameter {name} has no data (device meta, as when offloaded), which is not supported yet")
    if tensor.dtype not in ROUNDABLE:
        raise SetupError(
            f"tensor {name} is {tensor.dtype}; delta weight sync carries tensors that a bf16 checkpoint holds "
            f"(float32, bfloat16 or float16 in the trainer), and nothing else yet"
        )
