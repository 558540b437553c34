# SPDX-License-Identifier: Apache-2.0
"""The weights of a PEFT model with its adapters in them, computed anew at every look so that no base ever drifts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from delta_wire.errors import SetupError
from trl_delta.dtensors import is_sharded

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

# of a product's rows, computed in one go
_BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class Factors:
    """What one adapter makes of a weight of `N` rows: the product of two thin matrices is added, and with DoRA each
    output's weights are then given the length that was learnt for them.

    Args:
        high, low (`torch.Tensor`): `[N, r]` and `[r, columns]`, or `[columns, r]` and `[r, N]` if it is `transposed`.
        scaling (`float`): of the product.
        transposed (`bool`): the weight's rows are the product's columns.
        lengths (`torch.Tensor`, *optional*): of DoRA, one for each row of the product.
    """

    high: torch.Tensor
    low: torch.Tensor
    scaling: float
    transposed: bool
    lengths: torch.Tensor | None = None

    def add_to(self, merged: torch.Tensor, first_row: int, base: torch.Tensor) -> None:
        """Add it to some of the weight's rows.

        The product is computed in blocks of rows that lie where they lie in the whole weight, each scaled, then added,
        every step rounded by itself, and lengths are summed up in an order of their own. So the bits of an element do
        not depend on which rows a process has.

        Args:
            merged (`torch.Tensor`): rows of the weight in fp32, with the adapters before this one.
            first_row (`int`): where they begin.
            base (`torch.Tensor`): the same rows without any adapter, in any float type.
        """
        import torch

        if self.lengths is None:
            for rows, update in self._updates(merged.shape[0], first_row):
                merged[rows].add_(update)
            return
        lengths = self.lengths.detach().to(torch.float32).reshape(-1)
        if self.transposed:
            columns = self._column_lengths(base, first_row)
            for rows, update in self._updates(merged.shape[0], first_row):
                merged[rows].add_(update).mul_(lengths / columns)
            return
        for rows, update in self._updates(merged.shape[0], first_row):
            found = _row_lengths(base[rows].detach().to(torch.float32) + update)
            wanted = lengths[first_row + rows.start : first_row + rows.stop]
            merged[rows].add_(update).mul_((wanted / found).unsqueeze(1))

    def _updates(self, num_rows: int, first_row: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the scaled product for rows of the weight, block by block, with their place among those asked for."""
        import torch

        high, low = self.high.detach().to(torch.float32), self.low.detach().to(torch.float32)
        all_rows, stop_row = low.shape[1] if self.transposed else high.shape[0], first_row + num_rows
        for begin in range(first_row - first_row % _BLOCK_ROWS, stop_row, _BLOCK_ROWS):
            end = min(begin + _BLOCK_ROWS, all_rows)
            update = (high @ low[:, begin:end]).T if self.transposed else high[begin:end] @ low
            first, last = max(begin, first_row), min(end, stop_row)
            yield slice(first - first_row, last - first_row), update.mul_(self.scaling)[first - begin : last - begin]

    def _column_lengths(self, base: torch.Tensor, first_row: int) -> torch.Tensor:
        import torch

        if base.shape[0] != self.low.shape[1]:
            raise SetupError(
                f"DoRA on a weight that is looked up or stored by columns needs all of its {self.low.shape[1]} rows, "
                f"found {base.shape[0]} on this process; train on one process, or leave embeddings out of "
                "target_modules"
            )
        squares = torch.zeros(base.shape[1], dtype=torch.float64, device=base.device)
        for rows, update in self._updates(base.shape[0], first_row):
            squares += (base[rows].detach().to(torch.float32) + update).to(torch.float64).square().sum(0)
        return squares.sqrt().to(torch.float32)


@dataclass(frozen=True, slots=True)
class BiasFactors:
    """What one adapter with `lora_bias` adds to a bias.

    Args:
        bias (`torch.Tensor`): of the thin layer that is added, `[N]`.
        scaling (`float`): of it.
    """

    bias: torch.Tensor
    scaling: float

    def add_to(self, merged: torch.Tensor, first_row: int, base: torch.Tensor) -> None:
        """As [`Factors.add_to`]."""
        import torch

        rows = self.bias.detach()[first_row : first_row + merged.shape[0]]
        merged.add_(rows.to(torch.float32) * self.scaling)


@dataclass(frozen=True, slots=True)
class Merge:
    """The LoRA adapters of one layer.

    Args:
        layer: a LoRA layer of PEFT, linear or embedding.
        path (`str`): where it stands, for errors.
        of_bias (`bool`, *optional*, defaults to `False`): what they do to the layer's bias, and not to its weight.
        factors (tuple, *optional*): of the active adapters, if they have been gathered.
        first_row (`int`, *optional*, defaults to `0`): the row of the layer's weight that those given to
            [`Merge.apply`] begin with.
    """

    layer: Any
    path: str
    of_bias: bool = False
    factors: tuple[Factors | BiasFactors, ...] | None = None
    first_row: int = 0

    def sharded(self) -> list[DTensor]:
        """What of the active adapters is spread over processes, in an order that is the same on each."""
        return [tensor for _, parts, _ in self._parts() for tensor in parts if is_sharded(tensor)]  # type: ignore[misc]

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
            factors.add_to(merged, self.first_row, weight)
        return merged

    def _factors(self, whole: Mapping[int, torch.Tensor]) -> Iterator[Factors | BiasFactors]:
        for name, parts, transposed in self._parts():
            scaling, tensors = self.layer.scaling[name], [whole.get(id(part), part) for part in parts]
            if self.of_bias:
                yield BiasFactors(tensors[0], scaling)
            else:
                yield Factors(tensors[0], tensors[1], scaling, transposed, *tensors[2:])

    def _parts(self) -> Iterator[tuple[str, list[torch.Tensor], bool]]:
        """Name, tensors as they lie here, and whether they are transposed, of each active adapter."""
        layer = self.layer
        if layer.merged_adapters:
            raise SetupError(
                f"{self.path}: the adapters {', '.join(layer.merged_adapters)} are merged into the base weight in "
                "place, so that publishing would count them twice; call unmerge_adapter() before training"
            )
        for name in active_adapters(layer):
            if self.of_bias:
                if layer.lora_bias.get(name):
                    yield name, [layer.lora_B[name].bias], False
                continue
            lengths = [layer.lora_magnitude_vector[name].weight] if name in layer.lora_magnitude_vector else []
            if name in layer.lora_A:
                yield name, [layer.lora_B[name].weight, layer.lora_A[name].weight, *lengths], layer.fan_in_fan_out
            elif name in layer.lora_embedding_A:
                yield name, [layer.lora_embedding_B[name], layer.lora_embedding_A[name], *lengths], True
            # any other adapter does not target this layer


def _row_lengths(rows: torch.Tensor) -> torch.Tensor:
    """Euclidean length of each row of a matrix, in fp32: halves are added until one column is left, so that a sum does
    not depend on the other rows."""
    squares = rows.square()
    while (width := squares.shape[1]) > 1:
        half = (width + 1) // 2
        squares[:, : width - half].add_(squares[:, half:])
        squares = squares[:, :half]
    return squares.squeeze(1).sqrt()


def active_adapters(module: Any) -> list[str]:
    """Names of the adapters that take part in the forward pass of a module of PEFT."""
    return [] if module.disable_adapters else list(module.active_adapters)
