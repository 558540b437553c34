# SPDX-License-Identifier: Apache-2.0
"""Which bf16 bits of the live weights differ from what was last handed to the publisher.

Letters: `N` elements of a tensor, `K` changed elements of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

import numpy as np
import torch

from delta_wire import kernels
from delta_wire.digest import Digest, digest_tensor
from delta_wire.errors import SetupError
from delta_wire.state import Delta, TensorDelta, change_of_digest, index_dtype
from trl_delta.dtensors import whole_tensor
from trl_delta.names import LiveTensor
from trl_delta.snapshot import Placement, Room, extract_staged

# elements
_CPU_BATCH = 1 << 25


class Detector:
    """Holds the bits of the last extraction, 2 bytes per parameter that this process owns, and their digest.

    The comparison is with the last extraction, not with the weights before a step: skipped steps, a sparse cadence and
    optimizers that move weights elsewhere than in `step()` lose nothing. Used by the training thread only.

    Args:
        live (list of [`LiveTensor`]): the model's tensors.
        kept (`dict[str, np.ndarray]`, *optional*): bits of tensors that belong to the state and never change; they
            count for the digest only.
        placement (`str`, *optional*, defaults to `"device"`): where the bits are held, see
            [`~trl_delta.snapshot.choose`].
    """

    def __init__(
        self,
        live: Iterable[LiveTensor],
        kept: Mapping[str, np.ndarray] | None = None,
        placement: Placement = "device",
    ):
        live = list(live)
        room = Room(placement, sum(prod(entry.shape) for entry in live))
        self._snapshot: dict[str, torch.Tensor] = {}
        self.digest = Digest()
        for name, bits in (kept or {}).items():
            self.digest = self.digest + digest_tensor(name, bits)
        for entry in live:
            bits = room.keep(kernels.round_bits(_contiguous(entry.tensor)).reshape(-1))
            self._snapshot[entry.name] = bits
            for name in entry.names:
                self.digest = self.digest + digest_tensor(name, to_numpy(bits), entry.start)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(bits.numel() * bits.element_size() for bits in self._snapshot.values())

    def copy_bits(self, live: Iterable[LiveTensor]) -> dict[str, np.ndarray]:
        """Host copy of the bits of the last extraction by checkpoint name, uint16, flat."""
        return {name: self.bits(entry) for entry in live for name in entry.names}

    def bits(self, entry: LiveTensor) -> np.ndarray:
        """Host copy of a tensor's bits of the last extraction, uint16, flat."""
        return to_numpy(self._held(entry)).copy()

    def extract(self, live: Iterable[LiveTensor]) -> Delta:
        """Find all changes since the last call (or the start) and make them the new state.

        Args:
            live (list of [`LiveTensor`]): the same tensors as at the start, as they are now.

        Returns:
            `Delta`: changed tensors only, with old bits; every element whose bits differ, and no other.
        """
        changes: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        delta: Delta = {}
        try:
            for batch in _batches(live):
                tensors = [_contiguous(entry.tensor) for entry in batch]
                found = _find(tensors, [self._held(entry) for entry in batch])
                for entry, changed in zip(batch, found, strict=True):
                    changes[entry.name] = changed
                    if changed[0].numel():
                        arrays = [to_numpy(part) for part in changed]
                        if entry.start:
                            reach = index_dtype(entry.start + prod(entry.shape))
                            arrays[0] = arrays[0].astype(reach) + reach.type(entry.start)
                        for name in entry.names:
                            delta[name] = TensorDelta(name, arrays[0], new=arrays[2], old=arrays[1])
        except BaseException:
            # what is not handed out must be found again
            for name, (indices, old, _) in changes.items():
                kernels.scatter(self._snapshot[name], indices.to(torch.int64), old)
            raise
        self.digest = self.digest + change_of_digest(delta)
        return delta

    def _held(self, entry: LiveTensor) -> torch.Tensor:
        held = self._snapshot.get(entry.name)
        size = prod(entry.shape)
        if held is None or held.numel() != size:
            raise SetupError(
                f"tensor {entry.name} of {size} elements was not part of the model when training "
                "began; a model must keep its tensors while its weights are published"
            )
        return held


def _batches(live: Iterable[LiveTensor]) -> list[list[LiveTensor]]:
    """Tensors to extract in one go: all of a GPU, which costs the host one wait for it; on a CPU so many that its
    cores share the work and copies of what is not contiguous stay small.

    Weights that are computed to be read go alone, so that no more than one of them is in memory.
    """
    by_device: dict[torch.device, list[LiveTensor]] = {}
    batches: list[list[LiveTensor]] = []
    on_cpu: list[LiveTensor] = []
    size = 0
    for entry in live:
        if entry.merge is not None:
            batches.append([entry])
        elif entry.source.device.type == "cpu":
            on_cpu.append(entry)
            size += prod(entry.shape)
            if size >= _CPU_BATCH:
                batches.append(on_cpu)
                on_cpu, size = [], 0
        else:
            by_device.setdefault(entry.source.device, []).append(entry)
    return [*batches, *([on_cpu] if on_cpu else []), *by_device.values()]


def _find(
    tensors: list[torch.Tensor], held: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    if tensors and tensors[0].device != held[0].device:
        return [extract_staged(*pair) for pair in zip(tensors, held, strict=True)]
    return kernels.extract_many(tensors, held)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Host array of a tensor of indices, or of bits (int16), which become uint16; zero-copy on a CPU."""
    array = tensor.detach().cpu().numpy()
    return array.view(np.uint16) if array.dtype == np.int16 else array


def gathered(live: Iterable[LiveTensor]) -> Iterator[LiveTensor]:
    """Yield each tensor with all of it in this process' memory, one source at a time.

    Of sharded weights all processes must read all, in the same order; the factors of sharded adapters are whole
    already.
    """
    by_source: dict[int, list[LiveTensor]] = {}
    for entry in live:
        by_source.setdefault(id(entry.source), []).append(entry)
    for entries in by_source.values():
        source = whole_tensor(entries[0].source)
        for entry in entries:
            yield replace(entry, source=source)


def live_bits(live: Iterable[LiveTensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each checkpoint name with its bf16 bits, uint16 in the tensor's shape, read from the weights just now.

    Of sharded weights see [`gathered`].
    """
    for entry in gathered(live):
        yield from entry_bits(entry).items()


def entry_bits(entry: LiveTensor) -> dict[str, np.ndarray]:
    """The same of one tensor that this process has whole."""
    bits = to_numpy(kernels.round_bits(_contiguous(entry.tensor)))
    return dict.fromkeys(entry.names, bits)


def digest_now(own: Iterable[LiveTensor]) -> Digest:
    """Digest of what a process owns, computed afresh from the weights as they are now."""
    total = Digest()
    for entry in own:
        bits = to_numpy(kernels.round_bits(_contiguous(entry.tensor)).reshape(-1))
        total = sum((digest_tensor(name, bits, entry.start) for name in entry.names), total)
    return total


def tensor_digests(live: Iterable[LiveTensor]) -> dict[str, Digest]:
    """Digest of every tensor, computed afresh from the weights as they are now."""
    return {name: digest_tensor(name, bits) for name, bits in live_bits(live)}


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()
