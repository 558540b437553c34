# SPDX-License-Identifier: Apache-2.0
"""Where the elements of each checkpoint tensor live on this rank, found by tracing the model's own `load_weights`.

The loader is run over untouched tensors while every write to a live parameter is intercepted and not carried out. A
`copy_` between views of a checkpoint tensor and of a parameter is a block of elements that moves as it is: fused
projections, tensor parallelism and replicated heads come out of it without a line about any model. A copy into float32
is one, too: the checkpoint's bits are the upper half of each element there, and the lower half is zero. Whatever else
a loader does to a parameter (arithmetic, permutations, other casts) is not such a block and is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from delta_wire.state import TensorTable
from vllm_delta.blocks import Block, coverage, merge_axes
from vllm_delta.orders import Order

if TYPE_CHECKING:
    from vllm_delta.computed import Computed

_aten = torch.ops.aten
# tensors of modules that hold what a request needs
_NO_WEIGHTS = {"kv_cache"}
_FILLS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


@dataclass(frozen=True, slots=True)
class Region:
    """A block of a checkpoint tensor and the block of a live storage that holds it, axis by axis.

    Args:
        tensor (`str`): checkpoint name.
        param (`str`): name of the live parameter.
        storage (`int`): which of the rank's storages.
        source (`Block`): in flat checkpoint indices.
        target (`Block`): in 16-bit elements of the storage; its steps belong to the axes of `source` and may have any
            order.
        widened (`bool`): the live elements are float32; `target` is their upper halves.
    """

    tensor: str
    param: str
    storage: int
    source: Block
    target: Block
    widened: bool = False

    @property
    def lower(self) -> Block:
        """The lower halves of widened elements, all of them zero."""
        return Block(self.target.start - 1, self.target.sizes, self.target.steps)

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray]:
        """Find the elements of a sparse change that lie in this region.

        Args:
            indices (`np.ndarray`): `[K]`, strictly ascending flat checkpoint indices.

        Returns:
            `(chosen, positions)`: which of the `K` entries (`[M]` or a slice), and their places in the storage, int64
            `[M]`.
        """
        first, last = np.searchsorted(indices, [self.source.start, self.source.stop])
        if self.source.steps == self.target.steps == (1,):
            # whole rows of a whole tensor, by far the most
            shift = self.target.start - self.source.start
            return slice(int(first), int(last)), np.add(indices[first:last], shift, dtype=np.int64)
        rest = indices[first:last].astype(np.int64)
        rest -= self.source.start
        positions = np.full(rest.size, self.target.start, dtype=np.int64)
        inside = np.ones(rest.size, dtype=np.bool_)
        for size, step, target_step in zip(self.source.sizes, self.source.steps, self.target.steps, strict=True):
            along, rest = (rest, np.zeros_like(rest)) if step == 1 else np.divmod(rest, step)
            inside &= along < size
            positions += along * target_step
        # what is left over lies in a gap of the last axis
        inside &= rest == 0
        if inside.all():
            return slice(int(first), int(last)), positions
        return np.flatnonzero(inside) + first, positions[inside]


@dataclass
class Trace:
    """What tracing found on this rank.

    Args:
        regions: in the order of the loader's writes.
        storages: one flat int16 view per live storage that a region points to.
        problems: checkpoint or parameter name → why it cannot be patched.
        orders: storage → how its slabs have been permuted since loading; the targets of regions know nothing of it.
        computed: storage → the part of the model that is computed from it, if it is no live one but in host memory.
    """

    regions: list[Region] = field(default_factory=list)
    storages: list[torch.Tensor] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    orders: dict[int, Order] = field(default_factory=dict)
    computed: dict[int, Computed] = field(default_factory=dict)


def trace(model: torch.nn.Module, table: TensorTable) -> Trace:
    """Trace `model.load_weights` over the tensors of a table. Nothing is written to the model.

    Args:
        model (`torch.nn.Module`): a live vLLM model.
        table (`TensorTable`): what the checkpoint holds.
    """
    tracer = _Tracer(model)
    # sources stay alive until the end: a storage that is freed and reused would be taken for another tensor
    with torch.no_grad(), tracer:
        try:
            model.load_weights(tracer.sources(table))  # type: ignore[operator]
        except Exception as error:
            tracer.result.problems[tracer.current] = (
                f"the model's loader failed on it: {type(error).__name__}: {error}"
            )
    return tracer.finish()


class _Tracer(TorchDispatchMode):
    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.result = Trace()
        self._model = model
        self.current = "(start)"
        self._live: dict[int, tuple[str, torch.Tensor]] = {}
        self._params: dict[str, int] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self._live.setdefault(_storage_key(tensor), (name, tensor))
        for name, param in model.named_parameters(remove_duplicate=False):
            self._params[name] = _storage_key(param)
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}
        self._storage_of: dict[int, int] = {}
        self._opaque: set[int] = set()
        self._fills: set[tuple[int, Block]] = set()

    def sources(self, table: TensorTable) -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in table.items():
            self.current = name
            source = torch.empty(spec.shape, dtype=torch.bfloat16)
            self._sources[_storage_key(source)] = (name, source)
            yield name, source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = [tensor for tensor in _written(func, args, kwargs or {}) if _storage_key(tensor) in self._live]
        if not written:
            return func(*args, **(kwargs or {}))
        if func is _aten.copy_.default:
            self._copy(args[0], args[1])
        elif func in _FILLS:
            self._fill(args[0])
        else:
            self._refuse(written[0], f"its loader computes with {func} instead of copying")
        return args[0]

    def _refuse(self, live: torch.Tensor, reason: str, tensor: str | None = None) -> None:
        key = _storage_key(live)
        self._opaque.add(key)
        param = self._live[key][0]
        self.result.problems.setdefault(tensor or self.current, f"{reason} (into {param})")

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        known = self._sources.get(_storage_key(source))
        if known is None:
            self._refuse(target, "its loader computes a new tensor instead of copying a view of the checkpoint's")
            return
        name = known[0]
        # a bf16 value is the upper half of the same value in float32, which lies second in memory
        widened = target.dtype == torch.float32 and sys.byteorder == "little"
        if not (target.dtype == torch.bfloat16 or widened) or source.dtype != torch.bfloat16:
            self._refuse(target, f"the server holds it as {target.dtype}, format 1 carries torch.bfloat16", name)
            return
        if target.numel() == 0:
            return
        try:
            from_block, to_block = _blocks_of([source.expand(target.shape), target])
        except ValueError as error:
            self._refuse(target, str(error), name)
            return
        key = _storage_key(target)
        param, live = self._live[key]
        if key not in self._storage_of:
            self._storage_of[key] = len(self.result.storages)
            self.result.storages.append(flat_bits(live))
        if widened:
            to_block = to_block.halves(upper=True)
        self.result.regions.append(Region(name, param, self._storage_of[key], from_block, to_block, widened))

    def _fill(self, target: torch.Tensor) -> None:
        # padding rows; harmless unless a checkpoint element lives there
        if target.numel():
            (block,) = _blocks_of([target])
            wide = target.element_size() == 4
            for part in [block.halves(upper) for upper in (False, True)] if wide else [block]:
                self._fills.add((_storage_key(target), part))

    def finish(self) -> Trace:
        """Find live parameters that no checkpoint tensor feeds, and writes that collide."""
        result = self.result
        for name, key in self._params.items():
            if key in self._storage_of or key in self._opaque:
                continue
            shape = tuple(self._live[key][1].shape) if key in self._live else ()
            result.problems.setdefault(
                name,
                f"no tensor of the checkpoint is copied into this live parameter {list(shape)}: it is derived, "
                "repacked after loading, or loaded by other means",
            )
        for name, reason in self._derived():
            result.problems.setdefault(name, reason)
        targets: dict[int, list[Block]] = {}
        for region in result.regions:
            targets.setdefault(region.storage, []).append(region.target)
        for key, fill in self._fills:
            if key in self._storage_of:
                targets[self._storage_of[key]].append(fill)
        for storage, blocks in targets.items():
            flat = result.storages[storage]
            if coverage(flat.numel(), blocks).overlaps:
                for region in result.regions:
                    if region.storage == storage:
                        result.problems.setdefault(
                            region.tensor, f"several writes of the loader meet in {region.param}"
                        )
        return result

    def _derived(self) -> Iterator[tuple[str, str]]:
        """Numbers that hang on a module and are neither parameter nor buffer nor a view of one, as the factors that
        latent attention makes of its projections or what a CPU kernel has packed."""
        for prefix, module in self._model.named_modules():
            if vars(module).get("cpu_linear", linear) is not linear:
                yield f"{prefix}.weight", "a kernel keeps a packed copy of it, which would keep the old weights"
            for name, value in vars(module).items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.is_floating_point()
                    and value.numel() > 1
                    and name not in _NO_WEIGHTS
                    and _storage_key(value) not in self._live
                ):
                    reason = (
                        f"a tensor {list(value.shape)} beside the parameters: what the server computes from weights "
                        "after loading would keep the old ones"
                    )
                    yield f"{prefix}.{name}" if prefix else name, reason


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as int16; zeros in host memory for one that has no contents."""
    storage = tensor.untyped_storage()
    with _disable_current_modes():
        if tensor.is_meta:
            return torch.zeros(storage.nbytes() // 2, dtype=torch.int16)
        flat = torch.empty(0, dtype=torch.int16, device=tensor.device)
        return flat.set_(storage, 0, (storage.nbytes() // 2,), (1,))  # type: ignore[call-overload]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an operator writes to."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        found += [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
    return found


def _blocks_of(views: Sequence[torch.Tensor]) -> list[Block]:
    """Blocks of views of one shape, with common axes in the order of the first view's steps."""
    shape = views[0].shape
    strides = [view.stride() for view in views]
    axes = [(shape[d], tuple(stride[d] for stride in strides)) for d in range(len(shape)) if shape[d] != 1]
    axes = merge_axes(sorted(axes, key=lambda axis: axis[1], reverse=True)) or [(1, (1,) * len(views))]
    sizes = tuple(size for size, _ in axes)
    blocks = [
        Block(int(view.storage_offset()), sizes, tuple(steps[at] for _, steps in axes))
        for at, view in enumerate(views)
    ]
    for block in blocks:
        reach = 0
        for step, size in sorted(zip(block.steps, block.sizes, strict=True)):
            if step <= reach:
                raise ValueError("its loader repeats or folds elements")
            reach += (size - 1) * step
    return blocks
