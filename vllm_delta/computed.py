# SPDX-License-Identifier: Apache-2.0
"""Parts of the model that vLLM computes from the checkpoint's weights: quantised while loading, or derived from such.

No element of a checkpoint has a place of its own in them. The weights of a part, as its loader takes them, are kept in
host memory instead: changes are planned, written, digested and taken back there like everywhere else, and then vLLM's
own layerwise reload computes the part anew, between two steps. At the start that must reproduce, bit for bit, what the
server had loaded; a part for which it does not is refused. After each time the live tensors are sealed by a hash, so
that what somebody else writes into them is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from delta_wire import kernels
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest, tensor_keys
from delta_wire.state import TensorTable
from vllm_delta.blocks import Block
from vllm_delta.pace import Pace
from vllm_delta.regions import Region, Trace, flat_bits, trace

# how far from a layer the objects are that work for it: its method, the method's kernel, the kernel's own
_DEPTH = 3


class Computed:
    """One part: its live tensors, and its weights in host memory.

    Args:
        name (`str`): of the module.
        module (`torch.nn.Module`): in the live model.
        regions (list of [`Region`]): where elements of the checkpoint lie in the host's copy.
        storages (list of `torch.Tensor`): of the trace; those that `regions` points to are the host's copy.
        table (`TensorTable`): the checkpoint's tensors.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        regions: Sequence[Region],
        storages: Sequence[torch.Tensor],
        table: TensorTable,
    ):
        self.name = name
        self._module = module
        self._regions = regions
        self._storages = storages
        self._table = table
        self.seal: Digest | None = None

    @property
    def tensors(self) -> list[str]:
        """Checkpoint names of its weights."""
        return list(dict.fromkeys(region.tensor for region in self._regions))

    def fill(self, folder: Path) -> None:
        """Read the host's copy from a checkpoint."""
        checkpoint = Checkpoint(folder)
        for region in self._regions:
            # what a mapped file holds is only read
            bits = torch.from_numpy(checkpoint.bits(region.tensor).reshape(-1).view("int16").copy())
            _view(self._storages[region.storage], region.target).copy_(_view(bits, region.source))

    def prove(self, model: Any, vllm_config: Any) -> str | None:
        """Compute it anew from what the server has loaded. Main thread, between two steps.

        Returns:
            `str`, *optional*: why it cannot be kept up to date; its live tensors are as they were then.
        """
        kept = [(tensor, tensor.detach().clone()) for tensor in _tensors(self._module)]
        loaded, places = self._hash(), _places(self._module)
        try:
            self.rebuild(model, vllm_config)
            if self.seal == loaded and _places(self._module) == places:
                return self._hidden()
            reason = "vLLM's layerwise reload makes other live tensors of it than its loader did"
        except Exception as error:
            reason = f"vLLM's layerwise reload failed on it: {type(error).__name__}: {error}"
        for tensor, copy in kept:
            tensor.detach().copy_(copy)
        self.seal = None
        return reason

    def rebuild(self, model: Any, vllm_config: Any) -> None:
        """Compute the live tensors from the host's copy and seal them. Main thread, between two steps."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self.seal = None
        with torch.no_grad(), set_current_vllm_config(vllm_config), _put_back([self._module]) as modules:
            try:
                initialize_layerwise_reload(self._module)
                model.load_weights(self._weights())
                finalize_layerwise_reload(self._module, vllm_config.model_config)
            finally:
                # what failed half way is not gone on with the next time
                for module in modules:
                    get_layerwise_info(module).reset()
        self.seal = self._hash()

    def intact(self, pace: Pace) -> bool:
        """Whether the live tensors are what `rebuild` left."""
        return self.seal is not None and self._hash(pace) == self.seal

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.tensors:
            # the elements that this rank's loader does not look at are not in the regions
            weight = torch.zeros(self._table[name].shape, dtype=torch.bfloat16)
            flat = flat_bits(weight)
            for region in self._regions:
                if region.tensor == name:
                    _view(flat, region.source).copy_(_view(self._storages[region.storage], region.target))
            yield name, weight

    def _hash(self, pace: Pace | None = None) -> Digest:
        total = Digest()
        for number, storage in enumerate(_storages(self._module)):
            total = total + Digest(*kernels.digest_dense(storage, tensor_keys(f"{number}")))
            if pace is not None:
                pace.rest()
        return total

    def _hidden(self) -> str | None:
        """What keeps numbers of this part where no seal and no reload finds them."""
        known = {_key(tensor) for tensor in _tensors(self._module)}
        seen: set[int] = set()
        pending: list[tuple[str, Any, int]] = [(self.name, module, 0) for module in self._module.modules()]
        while pending:
            path, owner, depth = pending.pop()
            for name, value in vars(owner).items():
                where = f"{path}.{name}"
                if isinstance(value, torch.Tensor):
                    if value.numel() > 1 and name != "kv_cache" and _key(value) not in known:
                        return f"{where} {list(value.shape)} holds numbers beside its parameters"
                elif type(value).__name__.endswith("Handler"):
                    return f"{where} is a {type(value).__name__}, which keeps a copy that nobody can read"
                elif _works_for_it(value) and id(value) not in seen and depth < _DEPTH:
                    seen.add(id(value))
                    pending.append((where, value, depth + 1))
        return None


def trace_with_computed(model: Any, table: TensorTable) -> Trace:
    """[`~vllm_delta.regions.trace`] of a model that may have computed parts. Main thread, between two steps.

    Args:
        model: a live vLLM model.
        table (`TensorTable`): what the checkpoint holds.
    """
    parts = _find(model)
    with _as_loaded(module for _, module in parts):
        found = trace(model, table)
        names = {id(param): name for name, param in model.named_parameters()}
        of_part = [{names[id(p)] for p in module.parameters() if p.is_meta} for _, module in parts]
    for (name, module), params in zip(parts, of_part, strict=True):
        regions = [region for region in found.regions if region.param in params]
        if not regions:
            found.problems.setdefault(
                name,
                "its live tensors are computed after loading, and the weights that they come from lie outside of it",
            )
        else:
            part = Computed(name, module, regions, found.storages, table)
            found.computed |= dict.fromkeys((region.storage for region in regions), part)
    return found


def _find(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The outermost modules whose live tensors are of another kind than those that were loaded."""
    found = [(name, module) for name, module in model.named_modules() if _is_computed(module)]
    inside = {id(below) for _, module in found for below in module.modules() if below is not module}
    return [(name, module) for name, module in found if id(module) not in inside]


def _is_computed(module: torch.nn.Module) -> bool:
    if not callable(getattr(module, "process_weights_after_loading", None)) and not hasattr(module, "quant_method"):
        # nothing happens to it after loading
        return False
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    loaded = {name: param.dtype for name, param in get_layerwise_info(module).restore_metadata[0].items()}
    live = {name: p for name, p in module.named_parameters(recurse=False) if name not in SKIP_TENSORS}
    if not live or {name: param.dtype for name, param in live.items()} == loaded:
        # without live tensors it has read what it needed, as attention does with the scales of a quantised cache
        return False
    # factors that are views of a loaded weight follow it by themselves
    below = {_key(p) for name, p in module.named_parameters() if name not in live or name in loaded}
    added = [param for name, param in live.items() if name not in loaded]
    changed = any(name not in live or live[name].dtype != dtype for name, dtype in loaded.items())
    return changed or any(_key(param) not in below for param in added)


@contextmanager
def _put_back(modules: Iterable[torch.nn.Module]) -> Iterator[list[torch.nn.Module]]:
    """Modules and all below them, which afterwards hold the same tensors as before, whatever their contents."""
    every = list({id(below): below for module in modules for below in module.modules()}.values())
    kept = [(m, dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set)) for m in every]
    try:
        yield every
    finally:
        for module, params, buffers, passing in kept:
            for place in (module._parameters, module._buffers, module._non_persistent_buffers_set):
                place.clear()
            module._parameters.update(params)
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.update(passing)


@contextmanager
def _as_loaded(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Modules with the tensors that their weights are loaded into, without contents, in place of the live ones."""
    with _put_back(modules) as every:
        if every:
            from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
            from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

            for module in every:
                restore_layer_on_meta(module, get_layerwise_info(module))
                for param in module.parameters(recurse=False):
                    # where vLLM quantises while it loads, the loader that it was given lies inside of others
                    loader: Any = getattr(param, "weight_loader", None)
                    while getattr(loader, "__name__", None) == "online_process_loader":
                        loader = param.weight_loader = loader.__wrapped__  # type: ignore[attr-defined]
        yield


def _works_for_it(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (torch.nn.Module, type, Enum))
        and kind.__module__.partition(".")[0] not in ("builtins", "torch")
        and not kind.__name__.endswith("Config")
    )


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _places(module: torch.nn.Module) -> list[tuple[int, torch.Size, tuple[int, ...]]]:
    return [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in _tensors(module)]


def _storages(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """All bits of a module, each storage once, as int16."""
    for tensor in {_key(tensor): tensor for tensor in _tensors(module)}.values():
        flat = flat_bits(tensor)
        yield flat
        if tensor.untyped_storage().nbytes() % 2:
            # the last byte of an odd number of them
            yield flat.new_tensor([int(tensor.untyped_storage()[-1])])


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _view(flat: torch.Tensor, block: Block) -> torch.Tensor:
    return flat.as_strided(block.sizes, block.steps, block.start)
