# SPDX-License-Identifier: Apache-2.0
"""A live model without the wrappers that vLLM puts around its layers for LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """For the block, let a model have the layers that its own loader knows; on the thread that runs its steps.

    With `--enable-lora` every linear layer lies one level deeper, below a wrapper that holds the adapters' buffers. A
    loader does not know those names, and what it loads, the base weights, are the same tensors in both places.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    wrappers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    try:
        for parent, name, wrapper in wrappers:
            parent._modules[name] = wrapper.base_layer
        yield model
    finally:
        for parent, name, wrapper in wrappers:
            parent._modules[name] = wrapper
