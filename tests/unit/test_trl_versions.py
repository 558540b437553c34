# SPDX-License-Identifier: Apache-2.0
"""What differs between the releases of TRL that AsyncGRPO is supported with: the mode for CPUs. `make trl-versions`
runs these and the tests of the trainers with each of them."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from attention import put_attention_back

from delta_wire.errors import SetupError
from trl_delta.cpu import cpu_training


@pytest.fixture
def trainers():
    yield importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    put_attention_back()


def test_samples_in_one_row_do_not_see_each_other(tiny_model, trainers):
    """The model that the constructor makes computes for samples end to end what it computes for each alone."""
    try:
        importlib.import_module("trl.experimental.async_grpo.packing")
    except ImportError:
        pass
    else:
        pytest.skip("this TRL folds samples into a tree, see test_cpu_attention.py")
    with cpu_training():
        model = trainers.create_model_from_path(
            str(tiny_model("qwen3")), device_map=None, attn_implementation="of the hub", dtype="float32"
        )
    samples = [torch.randint(4, 500, (length,)) for length in (5, 9, 1, 6)]
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])
    with torch.no_grad():
        row = model(input_ids=torch.cat(samples)[None], position_ids=positions[None], use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=sample[None]).logits[0] for sample in samples])
    assert torch.allclose(row, alone, atol=2e-4)


def test_what_is_replaced_on_a_cpu_lasts_for_the_constructor_only(trainers):
    before = dict(vars(trainers))
    with pytest.raises(RuntimeError, match="the constructor"), cpu_training():
        assert vars(trainers) != before
        raise RuntimeError("the constructor fails")
    assert vars(trainers) == before


def test_a_head_that_needs_triton_is_refused_with_what_to_set(trainers, monkeypatch):
    before = dict(vars(trainers))
    # as in TRL 1.15: it does not look where the tensors are
    monkeypatch.setitem(sys.modules, "trl.kernels.chunked_logprob", ModuleType("trl.kernels.chunked_logprob"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SetupError, match="TRITON_INTERPRET=1"), cpu_training():
        pytest.fail("the body must not run")
    assert vars(trainers) == before
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with cpu_training():
        pass
