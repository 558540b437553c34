# SPDX-License-Identifier: Apache-2.0
"""Weights that vLLM permutes after loading: where each element of the loader's layout really lies.

The permutation is not known here but found, by running vLLM's own transform over numbered elements. Whether it is the
right one is decided afterwards like for every other weight, by samples and by the digest of all live bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from delta_wire.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Order:
    """One permutation of every slab of a storage.

    Args:
        places (`np.ndarray`): `[S]`, for each element of a slab as the loader sees it, where it lies in the slab.
        width (`int`, *optional*, defaults to `1`): how many positions an element takes, which stay together.
    """

    places: np.ndarray
    width: int = 1

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """From positions in the loader's layout to positions in the storage."""
        elements, part = (positions, 0) if self.width == 1 else np.divmod(positions, self.width)
        slabs, inside = np.divmod(elements, self.places.size)
        return (slabs * self.places.size + self.places[inside]) * self.width + part


def order_of(
    transform: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
) -> Order:
    """Find what a transform of one slab does to its elements.

    Args:
        transform (`Callable`): opaque.
        shape (`tuple`): of a slab.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`): of a slab.

    Raises:
        LayoutError: it is no permutation.
    """
    size = math.prod(shape)
    numbers = torch.arange(size, dtype=torch.int64)
    found = torch.zeros(size, dtype=torch.int64)
    # bf16 counts exactly to 256
    for shift in range(0, max(size - 1, 1).bit_length(), 8):
        plane = ((numbers >> shift) & 255).to(dtype).reshape(shape)
        found |= transform(plane).reshape(-1).to(torch.int64) << shift
    # which loaded element lies at each place
    if not torch.equal(found.sort().values, numbers):
        raise LayoutError("vLLM's transform of the weights does more than to permute them")
    places = torch.empty_like(numbers)
    places[found] = numbers
    return Order(places.to(torch.int32 if size < 1 << 31 else torch.int64).numpy(), dtype.itemsize // 2)


def find_orders(model: torch.nn.Module, storages: list[torch.Tensor]) -> dict[int, Order]:
    """Orders of the storages whose weights vLLM's CPU kernels for experts have repacked.

    Args:
        model (`torch.nn.Module`): a live vLLM model.
        storages: see [`~vllm_delta.regions.Trace`].
    """
    number = {flat.data_ptr(): at for at, flat in enumerate(storages)}
    known: dict[Any, Order] = {}
    orders: dict[int, Order] = {}
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        isa = _packed_for(getattr(kernel, "fused_experts", None))
        if isa is None:
            continue
        weights: list[Any] = [module.w13_weight, module.w2_weight]
        for weight in weights:
            at = number.get(weight.untyped_storage().data_ptr())
            if at is None:
                continue
            shape: tuple[int, ...] = (1, *weight.shape[1:])
            key = (isa, shape, weight.dtype)
            if key not in known:
                known[key] = order_of(lambda slab, isa=isa: _repack(slab, isa), shape, weight.dtype)
            orders[at] = known[key]
    return orders


def _packed_for(experts: Any) -> str | None:
    if experts is None or not hasattr(experts, "isa"):
        return None
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    return experts.isa if isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch else None


def _repack(slab: torch.Tensor, isa: str) -> torch.Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(slab, isa)
