# SPDX-License-Identifier: Apache-2.0
"""Every changed bit, and no other, whatever the numbers are."""

import numpy as np
import pytest
import torch
from torch import nn

from delta_wire import kernels
from delta_wire.digest import Digest, digest_tensor
from delta_wire.errors import SetupError
from delta_wire.state import compose, num_changed
from trl_delta.detector import Detector, tensor_digests
from trl_delta.names import LiveTensor, live_tensors

# patterns that value comparison, or a detector that looks at a byte only, gets wrong
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1.0, -1.0, 2.0**-126, 3.38e38, 65504.0]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def oracle_bits(tensor: torch.Tensor) -> np.ndarray:
    """bf16 patterns by PyTorch's own conversion, which agrees with integer rounding on everything but NaN."""
    rounded = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.bfloat16:
        return rounded.copy()
    wide = tensor.detach().to(torch.float32).contiguous().view(torch.int32).numpy().view(np.uint32)
    return np.where(tensor.isnan().numpy(), (wide >> 16) | 0x40, rounded).astype(np.uint16)


def random_model(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"a": nn.Linear(33, 17), "b": nn.Embedding(50, 8), "c": nn.LayerNorm(5)}).to(dtype)
    with torch.no_grad():
        model["a"].weight.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return model


def perturb(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for param in model.parameters():
            where = torch.rand(param.shape, generator=generator) < 0.1
            param.add_(torch.where(where, 0.01 * torch.randn(param.shape, generator=generator), 0.0).to(param.dtype))
        # sign of zero, a NaN where a number was and the reverse, a power of two
        flat = model["a"].weight.view(-1)  # pyright: ignore[reportIndexIssue]
        special = torch.tensor(SPECIAL)
        flat[: len(SPECIAL)] = special.roll(step)


def state_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {entry.name: oracle_bits(entry.tensor).reshape(-1) for entry in live_tensors(model)}


def digest_of(state: dict[str, np.ndarray]) -> Digest:
    return sum((digest_tensor(name, bits) for name, bits in state.items()), Digest())


def apply(state: dict[str, np.ndarray], delta) -> None:
    for name, part in delta.items():
        assert np.array_equal(state[name][part.indices], part.old)
        state[name][part.indices] = part.new


@pytest.mark.parametrize("dtype", DTYPES)
def test_recall_and_precision_are_one_over_many_steps(dtype):
    model = random_model(dtype)
    detector = Detector(live_tensors(model))
    before = state_of(model)
    assert detector.digest == digest_of(before)
    for step in range(1, 6):
        perturb(model, step)
        after = state_of(model)
        delta = detector.extract(live_tensors(model))
        expected = {name: np.flatnonzero(before[name] != after[name]) for name in before}
        assert set(delta) == {name for name, where in expected.items() if where.size}
        for name, part in delta.items():
            assert np.array_equal(part.indices, expected[name])
            assert np.array_equal(part.new, after[name][expected[name]])
        apply(before, delta)
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert detector.digest == digest_of(after)


def test_extractions_that_are_skipped_are_part_of_the_next_one():
    dense, sparse = random_model(torch.float32), random_model(torch.float32)
    every_step, at_the_end = Detector(live_tensors(dense)), Detector(live_tensors(sparse))
    composed = {}
    for step in range(1, 8):
        perturb(dense, step)
        perturb(sparse, step)
        composed = compose(composed, every_step.extract(live_tensors(dense)))
    once = at_the_end.extract(live_tensors(sparse))
    assert set(composed) == set(once)
    for name, part in once.items():
        assert np.array_equal(part.indices, composed[name].indices)
        assert np.array_equal(part.new, composed[name].new)
        assert np.array_equal(part.old, composed[name].old)
    assert every_step.digest == at_the_end.digest


def test_changes_below_half_a_bf16_step_are_not_changes():
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    detector = Detector(live_tensors(model))
    with torch.no_grad():
        model.weight.add_(1e-3)
    assert detector.extract(live_tensors(model)) == {}
    with torch.no_grad():
        model.weight.add_(2e-2)
    assert num_changed(detector.extract(live_tensors(model))) == 16


def test_unchanged_weights_give_an_empty_delta():
    model = random_model(torch.bfloat16)
    detector = Detector(live_tensors(model))
    before = detector.digest
    assert detector.extract(live_tensors(model)) == {}
    assert detector.digest == before


def test_non_contiguous_parameters_are_read_in_checkpoint_order():
    model = nn.Linear(6, 4, bias=False)
    model.weight = nn.Parameter(torch.randn(6, 4).t())
    detector = Detector(live_tensors(model))
    with torch.no_grad():
        model.weight[1, 3] += 1.0
    delta = detector.extract(live_tensors(model))
    assert delta["weight"].indices.tolist() == [1 * 6 + 3]


def test_the_delta_is_a_copy_that_later_steps_do_not_change():
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    detector = Detector(live_tensors(model))
    with torch.no_grad():
        model.weight.add_(1.0)
    delta = detector.extract(live_tensors(model))
    kept = delta["weight"].new.copy()
    with torch.no_grad():
        model.weight.add_(1.0)
    detector.extract(live_tensors(model))
    assert np.array_equal(delta["weight"].new, kept)


def test_an_error_half_way_loses_no_change():
    model = random_model(torch.float32)
    detector = Detector(live_tensors(model))
    before = state_of(model)
    perturb(model, 1)
    live = live_tensors(model)
    broken = [*live[:-1], LiveTensor(live[-1].names, torch.zeros(3, 3))]
    with pytest.raises(SetupError, match="was not part of the model"):
        detector.extract(broken)
    apply(before, detector.extract(live))
    after = state_of(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_tied_tensor_stored_twice_changes_under_both_names():
    weight = nn.Parameter(torch.zeros(4))
    live = [LiveTensor(("embed.weight", "head.weight"), weight)]
    detector = Detector(live)
    with torch.no_grad():
        weight[2] = 1.0
    delta = detector.extract(live)
    assert set(delta) == {"embed.weight", "head.weight"}
    assert detector.digest == sum(tensor_digests(live).values(), Digest())


def test_the_snapshot_costs_two_bytes_per_parameter():
    model = random_model(torch.float32)
    assert Detector(live_tensors(model)).num_bytes == 2 * sum(param.numel() for param in model.parameters())


def test_digests_read_from_the_weights_are_those_of_the_oracle():
    model = random_model(torch.float16)
    assert tensor_digests(live_tensors(model)) == {
        name: digest_tensor(name, bits) for name, bits in state_of(model).items()
    }


def test_rounding_matches_the_oracle_on_special_values():
    for dtype in DTYPES:
        values = torch.tensor(SPECIAL, dtype=dtype)
        assert np.array_equal(kernels.round_bits(values).numpy().view(np.uint16), oracle_bits(values))
