# SPDX-License-Identifier: Apache-2.0
"""A server without vLLM: a small model with loaders like vLLM's, the real ranks over it, and an engine that obeys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from delta_wire.checkpoint import Checkpoint
from delta_wire.container import write_tensors
from vllm_delta.worker import DeltaWorkerExtension

HIDDEN, VOCAB, VOCAB_PADDED, QUERY, SHARED, INNER, EXPERTS = 8, 10, 12, 16, 4, 12, 3
SHAPES = {
    "embed.weight": (VOCAB, HIDDEN),
    "q.weight": (QUERY, HIDDEN),
    "k.weight": (SHARED, HIDDEN),
    "v.weight": (SHARED, HIDDEN),
    "o.weight": (HIDDEN, QUERY),
    "gate.weight": (INNER, HIDDEN),
    "up.weight": (INNER, HIDDEN),
    "down.weight": (HIDDEN, INNER),
    "norm.weight": (HIDDEN,),
    "scale": (),
    "router.weight": (EXPERTS, HIDDEN),
}


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A checkpoint of random finite bits."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    bits = {name: random.integers(0, 0x7F00, shape).astype(np.uint16) for name, shape in SHAPES.items()}
    bits = {name: np.asarray(array, dtype=np.uint16) for name, array in bits.items()}
    write_tensors(folder / "model.safetensors", {n: ("BF16", a.shape, a) for n, a in bits.items()}, {"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class FakeModel(torch.nn.Module):
    """One rank's share: fused query/key/value with shared heads, fused gate/up, row and column splits, a padded table.

    Args:
        rank, ranks (`int`): of the tensor-parallel group.
    """

    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.embed = parameter(VOCAB_PADDED // ranks, HIDDEN)
        self.qkv = parameter(QUERY // ranks + 2 * SHARED, HIDDEN)
        self.o = parameter(HIDDEN, QUERY // ranks)
        self.gate_up = parameter(2 * INNER // ranks, HIDDEN)
        # stored the other way round
        self.down = parameter(INNER // ranks, HIDDEN)
        self.norm = parameter(HIDDEN)
        self.scale = parameter()
        # held in another type than the checkpoint's
        self.router = parameter(EXPERTS, HIDDEN, dtype=torch.float32)

    def share(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        size = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * size, size)

    def flip(self, name: str) -> None:
        """Change the lowest bit of a parameter's first element, as a broken machine does."""
        getattr(self, name).data.view(torch.int16).view(-1)[0] ^= 1

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        query, inner = QUERY // self.ranks, INNER // self.ranks
        if name == "embed.weight":
            first = self.rank * self.embed.shape[0]
            rows = min(VOCAB - first, self.embed.shape[0])
            self.embed.data[:rows].copy_(tensor.narrow(0, first, rows))
            self.embed.data[rows:].fill_(0)
        elif name == "q.weight":
            self.qkv.data[:query].copy_(self.share(tensor, 0))
        elif name == "k.weight":
            self.qkv.data.narrow(0, query, SHARED).copy_(tensor)
        elif name == "v.weight":
            self.qkv.data.narrow(0, query + SHARED, SHARED).copy_(tensor)
        elif name == "o.weight":
            self.o.data.copy_(self.share(tensor, 1))
        elif name == "gate.weight":
            self.gate_up.data[:inner].copy_(self.share(tensor, 0))
        elif name == "up.weight":
            self.gate_up.data[inner:].copy_(self.share(tensor, 0))
        elif name == "down.weight":
            self.down.data.copy_(self.share(tensor, 1).t())
        elif name == "norm.weight":
            self.norm.data.copy_(tensor)
        elif name == "scale":
            self.scale.data.copy_(tensor)
        elif name == "router.weight":
            self.router.data.copy_(tensor)
        else:
            raise KeyError(name)


def as_loaded(bits: dict[str, np.ndarray], rank: int = 0, ranks: int = 1, model: Any = FakeModel) -> Any:
    """A fresh model with these weights loaded in full: what every patched model must equal."""
    fresh = model(rank, ranks)
    fresh.load_weights(
        (name, torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16).reshape(SHAPES[name]))
        for name, array in bits.items()
    )
    return fresh


def parameters_of(model: torch.nn.Module) -> dict[str, list[int]]:
    """All bits of a model."""
    return {name: param.detach().view(torch.int16).flatten().tolist() for name, param in model.named_parameters()}


class FakeWorker(DeltaWorkerExtension):
    """What vLLM's worker offers the extension.

    Args:
        folder (`Path`): the checkpoint.
    """

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1, model: Any = FakeModel):
        checkpoint = Checkpoint(folder)
        self.model_config = SimpleNamespace(model=str(folder), revision=None)
        self.vllm_config = None
        self.model = as_loaded({name: checkpoint.bits(name) for name in checkpoint.table()}, rank, ranks, model)

    def get_model(self) -> torch.nn.Module:
        return self.model


class FakeEngine:
    """Runs everything at once in the caller's thread and keeps a record.

    Attributes:
        hooks: remote method → function of (rank, call) in place of the call; may raise.
        label, paused: what a real engine would have.
    """

    def __init__(self, workers: list[FakeWorker]):
        self.workers = workers
        self.hooks: dict[str, Callable[[int, Callable[[], dict[str, Any]]], dict[str, Any]]] = {}
        self.cache_error: Exception | None = None
        self.label = "default"
        self.paused = False
        self.renewed: list[tuple[str, str]] = []
        self._inside = False

    def between_steps(self, action: Callable[[], Any]) -> Any:
        assert not self._inside
        self._inside = True
        try:
            return action()
        finally:
            self._inside = False

    def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        assert self._inside, "ranks were called while a step may run"
        hook = self.hooks.get(method, lambda rank, call: call())
        calls = [lambda worker=worker: getattr(worker, method)(*args) for worker in self.workers]
        return [hook(rank, call) for rank, call in enumerate(calls)]

    def drain(self) -> None:
        assert self._inside

    def set_label(self, label: str) -> None:
        assert self._inside
        self.label = label

    def renew_caches(self, policy: str, label: str) -> None:
        assert self._inside
        if self.cache_error is not None:
            raise self.cache_error
        self.renewed.append((policy, label))

    def pause(self) -> None:
        assert self._inside
        self.paused = True

    def resume(self) -> None:
        assert self._inside
        self.paused = False
