# SPDX-License-Identifier: Apache-2.0
"""From live tensors to checkpoint names."""

import pytest
import torch
from torch import nn

from delta_wire.errors import ModelMismatchError, SetupError
from delta_wire.state import TensorSpec, TensorTable
from trl_delta.names import live_tensors, table_of
from trl_delta.wrappers import checkpoint_name


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4, bias=False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def names_of(model: nn.Module, base: TensorTable | None = None) -> list[tuple[str, ...]]:
    return [entry.names for entry in live_tensors(model, base)]


@pytest.mark.parametrize(
    "live",
    [
        "model.layers.0.mlp.weight",
        "module.model.layers.0.mlp.weight",
        "_orig_mod.model.layers.0.mlp.weight",
        "model.layers.0._checkpoint_wrapped_module.mlp.weight",
        "module._orig_mod.model.layers._checkpoint_wrapped_module.0._fsdp_wrapped_module.mlp._orig_mod.weight",
    ],
)
def test_wrapper_segments_are_stripped_wherever_they_stand(live):
    assert checkpoint_name(live) == "model.layers.0.mlp.weight"


def test_a_name_that_only_contains_a_wrapper_word_is_kept():
    assert checkpoint_name("model.module_list.submodule.weight") == "model.module_list.submodule.weight"


def test_a_checkpoint_name_that_looks_wrapped_is_kept():
    assert checkpoint_name("model.module.weight", {"model.module.weight"}) == "model.module.weight"


def test_a_compiled_module_inside_the_model_keeps_its_checkpoint_name():
    model = nn.ModuleDict({"block": torch.compile(nn.Linear(2, 2, bias=False))})
    assert names_of(model) == [("block.weight",)]


def test_tied_tensors_go_once_under_the_name_the_checkpoint_has():
    assert names_of(Tied()) == [("embed.weight",), ("norm.weight",)]
    base = TensorTable([TensorSpec("head.weight", (6, 4)), TensorSpec("norm.weight", (4,))])
    assert names_of(Tied(), base) == [("head.weight",), ("norm.weight",)]


def test_a_tied_tensor_that_the_checkpoint_stores_twice_goes_under_both_names():
    base = TensorTable(
        [TensorSpec(n, (6, 4)) for n in ("embed.weight", "head.weight")] + [TensorSpec("norm.weight", (4,))]
    )
    live = live_tensors(Tied(), base)
    assert [entry.names for entry in live] == [("embed.weight", "head.weight"), ("norm.weight",)]
    base.require_same(table_of(live), "the checkpoint", "the model")


def test_frozen_parameters_and_persistent_buffers_belong_to_the_state():
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    model.register_buffer("scale", torch.ones(2))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    assert names_of(model) == [("bias",), ("scale",), ("weight",)]


def test_two_tensors_for_one_checkpoint_name_are_refused_with_both():
    model = nn.ModuleDict({"a": nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)})})
    model["a"].register_parameter("weight", nn.Parameter(torch.zeros(2, 2)))
    with pytest.raises(ModelMismatchError, match=r"a\.weight and a\.module\.weight both map to a\.weight"):
        live_tensors(model)


def test_missing_and_extra_names_are_listed():
    base = TensorTable([TensorSpec("embed.weight", (6, 4)), TensorSpec("rotary.scale", (2,))])
    with pytest.raises(ModelMismatchError) as refused:
        base.require_same(table_of(live_tensors(Tied(), base)), "the checkpoint", "the model")
    assert "rotary.scale" in str(refused.value)
    assert "norm.weight" in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.uint8])
def test_dtypes_without_a_bf16_checkpoint_are_refused_by_name(dtype):
    model = nn.Linear(2, 2)
    model.register_buffer("counter", torch.zeros(2, dtype=dtype))
    with pytest.raises(SetupError, match=rf"counter is {dtype}"):
        live_tensors(model)


def test_parameters_without_data_are_refused():
    with pytest.raises(SetupError, match=r"weight has no data"):
        live_tensors(nn.Linear(2, 2, device="meta"))


def test_zero_3_placeholders_are_refused():
    model = nn.Linear(2, 2, bias=False)
    model.weight.ds_id = 0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(SetupError, match=r"weight is partitioned by DeepSpeed"):
        live_tensors(model)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "llama-tied"])
def test_a_loaded_model_has_exactly_the_names_of_its_checkpoint(tiny_model, kind):
    from transformers import AutoModelForCausalLM

    from delta_wire.checkpoint import Checkpoint

    folder = tiny_model(kind)
    base = Checkpoint(folder).table()
    live = live_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), base)
    assert table_of(live).to_bytes() == base.to_bytes()
