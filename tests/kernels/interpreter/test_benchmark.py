# SPDX-License-Identifier: Apache-2.0
"""The checks of `benchmarks/gpu.py`, with interpreted kernels in the place of the GPU's."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from delta_wire.kernels import coding, dispatch, replacement, triton_pack, triton_scatter

PATH = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_benchmark", module)
    spec.loader.exec_module(module)
    on_gpu: set[int] = set()
    held: list[dict[str, torch.Tensor]] = []

    def to_device(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        # never freed, so that no address is used twice
        held.append(copies)
        on_gpu.update(tensor.data_ptr() for tensor in copies.values() if tensor.numel())
        return copies

    monkeypatch.setattr(module, "to_device", to_device)
    for family in (coding, dispatch, replacement):
        monkeypatch.setattr(family, "uses_triton", lambda tensor: tensor.data_ptr() in on_gpu)
    monkeypatch.setattr(replacement, "is_on_host", lambda tensor: tensor.data_ptr() not in on_gpu)
    return module


@pytest.mark.parametrize("size", [1, 2049])
def test_kernels_pass_the_checks_of_the_benchmark(benchmark: ModuleType, size: int):
    assert benchmark.differences(size, torch.device("cpu")) == []


def test_a_change_of_many_tensors_is_one_launch_in_the_checks(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    exchange = triton_scatter.exchange
    monkeypatch.setattr(triton_scatter, "exchange", lambda at, *rest: calls.append(at.numel()) or exchange(at, *rest))
    assert benchmark.differences(2049, torch.device("cpu")) == []
    assert len(calls) == 1 and calls[0] > 3


def test_a_wrong_kernel_does_not_pass(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch):
    encode = triton_pack.rice_encode

    def wrong(*args):
        low, high, high_bits = encode(*args)
        return low ^ 1, high, high_bits

    monkeypatch.setattr(triton_pack, "rice_encode", wrong)
    found = benchmark.differences(2049, torch.device("cpu"))
    assert found == ["rice_encode sparse, 2049 elements", "rice_encode holes, 2049 elements"]
