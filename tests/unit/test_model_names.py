# SPDX-License-Identifier: Apache-2.0
"""Names and values of real models behind real wrappers: what is read from the live model is its checkpoint."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from wrapping import all_at_once, checkpointed, compiled, compiled_inside, ddp

from delta_wire.bucket import BucketReader
from delta_wire.checkpoint import Checkpoint
from delta_wire.errors import ModelMismatchError, SetupError
from delta_wire.replay import materialise
from delta_wire.stores import open_store
from trl_delta import DeltaSyncSession
from trl_delta.detector import Detector, live_bits
from trl_delta.names import Naming, table_of

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    """Qwen3-MoE as transformers 5 saves it: one tensor per expert and projection."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, tie_word_embeddings=False
    )
    return save(Qwen3MoeForCausalLM(config), tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory) -> Path:
    """LLaVA: a vision tower, a projector and a Llama as the text tower."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(text_config=LlamaConfig(**TEXT, tie_word_embeddings=False), vision_config=vision)
    return save(LlavaForConditionalGeneration(config), tmp_path_factory.mktemp("llava"))


def text_tower(folder: Path) -> LlamaForCausalLM:
    """The text tower alone, as who trains only that makes it."""
    whole = LlavaForConditionalGeneration.from_pretrained(folder, dtype="float32")
    tower = LlamaForCausalLM(whole.config.text_config)
    tower.model.load_state_dict(whole.model.language_model.state_dict())
    tower.lm_head.load_state_dict(whole.lm_head.state_dict())
    tower.config._name_or_path = str(folder)
    return tower


def assert_is(model: nn.Module, folder: Path) -> Naming:
    """The model's tensors are those of the checkpoint, name by name and bit by bit."""
    checkpoint = Checkpoint(folder)
    base = checkpoint.table()
    naming = Naming(model, base)
    live = naming.live(model)
    base.require_same(table_of(live, [base[name] for name in naming.kept]), "the checkpoint", "the model")
    for name, bits in live_bits(live):
        assert np.array_equal(bits, checkpoint.bits(name)), name
    kept = {name: checkpoint.bits(name) for name in naming.kept}
    assert Detector(live, kept).digest == checkpoint.digest()
    return naming


@pytest.mark.parametrize("wrap", [compiled, compiled_inside, checkpointed, ddp, all_at_once])
@pytest.mark.parametrize("kind", ["qwen3", "llama-tied"])
def test_wrapped_models_have_the_names_of_their_checkpoint(tiny_model, kind: str, wrap: Callable):
    assert_is(wrap(AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype="float32")), tiny_model(kind))


def test_a_distributed_model_has_the_names_of_its_checkpoint(tiny_model, tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype="float32")
        assert_is(nn.parallel.DistributedDataParallel(model), tiny_model("qwen3"))
    finally:
        dist.destroy_process_group()


def test_frozen_parameters_are_part_of_every_version(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype="float32")
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    assert_is(model, tiny_model("qwen3"))


@pytest.mark.parametrize("wrap", [lambda model: model, all_at_once])
def test_fused_experts_are_read_expert_by_expert(moe: Path, wrap: Callable):
    model = Qwen3MoeForCausalLM.from_pretrained(moe, dtype="float32")
    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(model.named_parameters())
    assert_is(wrap(model), moe)


def test_a_change_in_a_fused_tensor_has_the_indices_of_its_expert(moe: Path):
    model = Qwen3MoeForCausalLM.from_pretrained(moe, dtype="float32")
    naming = Naming(model, Checkpoint(moe).table())
    detector = Detector(naming.live(model))
    experts = model.model.layers[1].mlp.experts
    rows = experts.gate_up_proj.shape[1] // 2
    with torch.no_grad():
        # an element of expert 2's up projection, and one of expert 3's down projection
        experts.gate_up_proj[2, rows + 1, 5] += 1
        experts.down_proj[3, 4, 7] += 1
    delta = detector.extract(naming.live(model))
    prefix = "model.layers.1.mlp.experts"
    assert {name: part.indices.tolist() for name, part in delta.items()} == {
        f"{prefix}.2.up_proj.weight": [1 * 16 + 5],
        f"{prefix}.3.down_proj.weight": [4 * 8 + 7],
    }


def test_experts_that_the_checkpoint_stores_fused_stay_fused(moe: Path, tmp_path):
    model = Qwen3MoeForCausalLM.from_pretrained(moe, dtype="bfloat16")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in Checkpoint(tmp_path).table()
    assert_is(model.to(torch.float32), tmp_path)


def test_a_model_without_a_checkpoint_gets_the_names_it_is_saved_under(moe: Path):
    model = Qwen3MoeForCausalLM(Qwen3MoeForCausalLM.from_pretrained(moe).config)
    assert set(table_of(Naming(model).live(model))) == set(Checkpoint(moe).table())


def test_a_multimodal_model_has_the_names_of_its_checkpoint(multimodal: Path):
    model = LlavaForConditionalGeneration.from_pretrained(multimodal, dtype="float32")
    model.model.vision_tower.requires_grad_(False)
    assert set(model.state_dict()) != set(Checkpoint(multimodal).table())
    assert assert_is(model, multimodal).kept == ()


def test_a_text_tower_has_the_names_of_its_checkpoint_and_keeps_the_rest(multimodal: Path):
    kept = assert_is(text_tower(multimodal), multimodal).kept
    assert kept
    assert not any("language_model" in name for name in kept)


def test_what_a_trained_text_tower_publishes_is_the_whole_checkpoint(multimodal: Path, tmp_path):
    tower = text_tower(multimodal)
    with torch.no_grad():
        # not the checkpoint's weights any more: version 0 is uploaded
        tower.lm_head.weight[0] += 1
    session = DeltaSyncSession(str(tmp_path / "bucket"))
    session.start(tower)
    with torch.no_grad():
        tower.model.norm.weight[3] = 7.0
    session.step(1)
    assert session.finish()
    reader = BucketReader(open_store(tmp_path / "bucket"))
    latest = reader.latest()
    assert latest is not None
    assert latest.step == 1
    with materialise(reader, latest) as state:
        assert state.recompute() == latest.digest
        served = LlavaForConditionalGeneration.from_pretrained(state.checkpoint.folder)
        assert state.bits("language_model.model.norm.weight")[3] == 0x40E0
    whole = LlavaForConditionalGeneration.from_pretrained(multimodal)
    for name, value in served.model.vision_tower.state_dict().items():
        assert torch.equal(value, whole.model.vision_tower.state_dict()[name]), name
    assert torch.equal(served.lm_head.weight, tower.lm_head.weight.to(torch.bfloat16))


def test_what_neither_side_has_is_refused_with_both_lists(multimodal: Path):
    tower = text_tower(multimodal)
    tower.model.extra = nn.Linear(2, 2, bias=False)
    del tower.model.layers[0].mlp.up_proj
    with pytest.raises(ModelMismatchError) as refused:
        assert_is(tower, multimodal)
    assert "model.extra.weight" in str(refused.value)
    assert "language_model.model.layers.0.mlp.up_proj.weight" in str(refused.value)


def test_a_checkpoint_with_two_text_towers_is_not_guessed_at(tiny_model):
    from delta_wire.state import TensorSpec, TensorTable

    towers = ("text_model.norm.weight", "language_model.norm.weight")
    base = TensorTable(TensorSpec(name, (4,)) for name in towers)
    model = nn.ModuleDict({"norm": nn.LayerNorm(4, bias=False)})
    naming = Naming(model, base)
    assert naming.kept == ()
    with pytest.raises(ModelMismatchError, match=r"2 missing .* 1 only in"):
        base.require_same(table_of(naming.live(model)), "the checkpoint", "the model")


def test_a_tensor_that_comes_or_goes_during_training_is_refused_by_name():
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    naming = Naming(model)
    model["b"] = nn.Linear(2, 2)
    with pytest.raises(SetupError, match=r"b\.bias, b\.weight"):
        naming.live(model)


def test_a_tie_that_is_undone_during_training_is_refused_by_name():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    naming = Naming(model)
    model["b"].weight = nn.Parameter(model["a"].weight.detach().clone())
    with pytest.raises(SetupError, match=r"a\.weight and b\.weight were tied"):
        naming.live(model)
