# SPDX-License-Identifier: Apache-2.0
"""What lies between a training model and the model of its checkpoint."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# path segments that wrappers put between a module and its parameters: DDP and FSDP1, torch.compile, activation
# checkpointing
WRAPPER_SEGMENTS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def checkpoint_name(name: str, known: Container[str] = ()) -> str:
    """Strip the segments of wrappers from a parameter's path, wherever they stand.

    Args:
        name (`str`): name in the live model.
        known (container of `str`, *optional*): names of the checkpoint; one of them is never changed.
    """
    if name in known:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, without the wrappers around the whole of it (PEFT's included)."""
    while True:
        inner = [child for name, child in model.named_children() if name in WRAPPER_SEGMENTS]
        if len(inner) == 1 and not model._parameters and len(model._modules) == 1:
            model = inner[0]
        elif is_peft_model(model):
            model = model.get_base_model()  # pyright: ignore[reportCallIssue]
        else:
            return model


def is_peft_model(model: torch.nn.Module) -> bool:
    """Without importing peft, which a model that is none of its needs not."""
    return any(base.__name__ == "PeftModel" for base in type(model).__mro__)
