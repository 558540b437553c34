# SPDX-License-Identifier: Apache-2.0
"""These tests run in processes of their own, started by `tests/kernels/test_triton.py`: Triton decides when it is
imported whether kernels are interpreted, and the servers that other tests start must not inherit that."""

import os
from collections.abc import Callable

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is garbage."""

    def poison(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args, **kwargs) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.numel():
                tensor.reshape(-1).view(torch.uint8).fill_(0xA5)
            return tensor

        return allocate_poisoned

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions take the Triton form, although the tensors are on the CPU."""
    from delta_wire.kernels import coding, dispatch, replacement

    for module in (coding, dispatch, replacement):
        monkeypatch.setattr(module, "uses_triton", lambda tensor: True)
    monkeypatch.setattr(replacement, "is_on_host", lambda tensor: False)


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every time the host asks for a tensor's values."""
    reads: list[str] = []

    def spy(name: str) -> None:
        real = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args):
            reads.append(name)
            return real(self, *args)

        monkeypatch.setattr(torch.Tensor, name, read)

    for name in ("tolist", "item", "cpu", "nonzero", "__int__", "__bool__"):
        spy(name)
    return reads
