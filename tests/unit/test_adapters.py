# SPDX-License-Identifier: Apache-2.0
"""PEFT's real adapters: what is published is the policy that trains, and the base weights never move."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, VeraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from wrapping import all_at_once

from delta_wire.bucket import BucketReader
from delta_wire.checkpoint import Checkpoint
from delta_wire.errors import SetupError
from delta_wire.replay import materialise
from delta_wire.shards import Shard
from delta_wire.stores import open_store
from trl_delta import DeltaSyncCallback
from trl_delta.detector import live_bits
from trl_delta.merging import Factors
from trl_delta.names import Naming, table_of

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def adapt(model: PreTrainedModel, name: str = "default", **settings: Any) -> PeftModel:
    """A LoRA whose `B` is not zero, so that it changes what the model says."""
    torch.manual_seed(1)
    config = LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": LINEAR} | settings))
    adapted = get_peft_model(model, config, adapter_name=name)
    randomise(adapted)
    assert isinstance(adapted, PeftModel)
    return adapted


def randomise(model: nn.Module) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                param.normal_(std=0.02)
            elif "lora_magnitude_vector" in name:
                param.mul_(1 + 0.1 * torch.randn_like(param))


def published(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor by its checkpoint name, complete or refused."""
    base = Checkpoint(folder).table()
    live = Naming(model, base).live(model)
    base.require_same(table_of(live), "the checkpoint", "the model")
    return {name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in live_bits(live)}


def reference(folder: Path, adapted: PeftModel, adapter: str = "default") -> dict[str, torch.Tensor]:
    """The same by PEFT's own merge of a second copy, in float32, rounded once by PyTorch."""
    twin = get_peft_model(load(folder), adapted.peft_config[adapter], adapter_name=adapter)
    twin.load_state_dict(adapted.state_dict(), strict=False)
    merged = twin.merge_and_unload()
    return {name: value.to(torch.bfloat16) for name, value in merged.state_dict().items()}


def assert_published(model: nn.Module, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = published(model, folder)
    for name, value in found.items():
        # addition in another order may round otherwise: at most one bf16 step, on almost no element
        steps = (value.view(torch.int16).int() - expected[name].view(torch.int16).int()).abs()
        assert int(steps.max()) <= 1, name
        assert float((steps > 0).float().mean()) < 0.01, name


@pytest.mark.parametrize("name", ["default", "policy_v2"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_merged_weights_are_published_under_the_checkpoint_names(tiny_model, kind, name):
    adapted = adapt(load(tiny_model(kind)), name)
    assert_published(adapted, tiny_model(kind), reference(tiny_model(kind), adapted, name))


@pytest.mark.parametrize(("rows", "columns"), [(515, 37), (50, 36), (1001, 3), (3, 5)])
@pytest.mark.parametrize(("transposed", "dora"), [(False, False), (True, False), (False, True)])
def test_rows_have_the_bits_that_they_have_in_the_whole_weight(rows, columns, transposed, dora):
    torch.manual_seed(0)
    weight = torch.randn(rows, columns)
    high, low = torch.randn(columns if transposed else rows, 5), torch.randn(5, rows if transposed else columns)
    factors = Factors(high, low, 7 / 3, transposed, torch.rand(rows) + 0.5 if dora else None)
    whole = weight.clone()
    factors.add_to(whole, 0, weight)
    update = (high.double() @ low.double()) * 7 / 3
    expected = weight + (update.T if transposed else update)
    if factors.lengths is not None:
        expected *= (factors.lengths / expected.norm(dim=1)).unsqueeze(1)
    assert torch.allclose(whole.double(), expected, rtol=1e-5, atol=1e-5)
    for count in (2, 3, 7):
        for index in range(count):
            first, stop = Shard(index, count).rows(rows)
            part = weight[first:stop].clone()
            factors.add_to(part, first, weight[first:stop])
            assert torch.equal(part.view(torch.int32), whole[first:stop].view(torch.int32)), (count, index)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reading_leaves_base_and_adapter_as_they_are(tiny_model, dtype):
    adapted = adapt(load(tiny_model("qwen3"), dtype))
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    for _ in range(3):
        published(adapted, tiny_model("qwen3"))
    for name, value in adapted.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name


def test_a_bf16_base_is_rounded_once(tiny_model):
    """W + scaling·B·A in fp32, rounded once: exactly what an fp32 copy of the base gives."""
    low, high = adapt(load(tiny_model("qwen3"), "bfloat16")), adapt(load(tiny_model("qwen3")))
    high.load_state_dict(low.state_dict())
    from_low, from_high = published(low, tiny_model("qwen3")), published(high, tiny_model("qwen3"))
    assert all(torch.equal(from_low[name], from_high[name]) for name in from_high)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "target_modules": ["embed_tokens", "down_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}},
        {"target_modules": ["embed_tokens", "down_proj"]},
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
        {"modules_to_save": ["norm", "lm_head"], "target_modules": ["v_proj"]},
    ],
)
def test_kinds_of_lora(tiny_model, settings):
    adapted = adapt(load(tiny_model("qwen3")), **settings)
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "modules_to_save" in name:
                param.add_(0.25)
    assert_published(adapted, tiny_model("qwen3"), reference(tiny_model("qwen3"), adapted))


@pytest.mark.parametrize("settings", [{"lora_bias": True}, {"use_dora": True}])
def test_biases_of_adapters_and_weights_by_columns_as_peft_merges_them(settings):
    """Layers of GPT-2 store the columns of others as rows, and have a bias."""

    def make() -> PeftModel:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=64, n_positions=8, n_embd=36, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
        targets = ["c_attn", "c_fc", "c_proj"]
        adapted = adapt(GPT2LMHeadModel(config), target_modules=targets, fan_in_fan_out=True, **settings)
        with torch.no_grad():
            for name, param in adapted.named_parameters():
                if name.endswith("bias"):
                    param.normal_(std=0.1)
        return adapted

    adapted, twin = make(), make()
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    found = {entry.name: entry.tensor.clone() for entry in Naming(adapted).live(adapted)}
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
    twin.load_state_dict(before)
    merged = dict(twin.merge_and_unload().named_parameters())
    assert set(found) == set(merged) and len(found) > 12
    for name, value in merged.items():
        assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-7), name
        if name.endswith("bias"):
            assert torch.equal(found[name], value), name


def test_of_several_adapters_the_active_ones_are_published(tiny_model):
    adapted = adapt(load(tiny_model("qwen3")), "first", modules_to_save=["lm_head"])
    adapted.add_adapter("ref", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    randomise(adapted)
    first = published(adapted, tiny_model("qwen3"))
    adapted.set_adapter("ref")
    assert_published(adapted, tiny_model("qwen3"), reference(tiny_model("qwen3"), adapted, "ref"))
    adapted.set_adapter("first")
    again = published(adapted, tiny_model("qwen3"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    with adapted.disable_adapter():
        base = published(adapted, tiny_model("qwen3"))
    checkpoint = {name: value.to(torch.bfloat16) for name, value in load(tiny_model("qwen3")).state_dict().items()}
    assert all(torch.equal(base[name], checkpoint[name]) for name in base)


def test_adapters_of_transformers_own_integration(tiny_model):
    model = load(tiny_model("qwen3"))
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "down_proj"]), adapter_name="mine")
    randomise(model)
    found = published(model, tiny_model("qwen3"))
    checkpoint = {name: value.to(torch.bfloat16) for name, value in load(tiny_model("qwen3")).state_dict().items()}
    changed = {name for name in found if not torch.equal(found[name], checkpoint[name])}
    assert changed == {name for name in found if "q_proj" in name or "down_proj" in name}


def test_a_module_of_the_model_may_be_called_like_an_adapter(tiny_model, tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_gate = nn.Linear(4, 4, bias=False)
            self.lora_A = nn.Linear(4, 4, bias=False)
            self.base_layer = nn.ModuleDict({"modules_to_save": nn.Linear(4, 4, bias=False)})

        def forward(self, x):
            return self.base_layer["modules_to_save"](self.lora_A(self.lora_gate(x)))

    torch.manual_seed(0)
    own = Own()
    names = set(own.state_dict())
    adapted = get_peft_model(own, LoraConfig(r=2, target_modules=["lora_gate"]))  # pyright: ignore[reportArgumentType]
    assert {entry.name for entry in Naming(adapted).live(adapted)} == names


def test_adapters_behind_wrappers(tiny_model):
    adapted = adapt(load(tiny_model("qwen3")))
    expected = published(adapted, tiny_model("qwen3"))
    found = published(all_at_once(adapted), tiny_model("qwen3"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LoraConfig(target_modules=["q_proj"], lora_bias=True), "has a bias .lora_bias. and the layer below has none"),
        (LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1]), "uses ALoraLinearVariant"),
        (VeraConfig(target_modules=["q_proj"]), "supported is LoRA"),
        (PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "changes prompts"),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]), "TrainableTokensWrapper"),
    ],
)
def test_what_cannot_be_merged_is_refused_in_one_sentence(tiny_model, config, said):
    adapted = get_peft_model(load(tiny_model("qwen3")), config)
    with pytest.raises(SetupError, match=said):
        Naming(adapted)


def test_an_adapter_on_one_of_two_tied_tensors_is_refused(tiny_model):
    adapted = adapt(load(tiny_model("qwen3-tied")), target_modules=["embed_tokens"])
    with pytest.raises(SetupError, match="an adapter changes one of them only"):
        published(adapted, tiny_model("qwen3-tied"))


def test_an_adapter_that_was_merged_in_place_is_refused(tiny_model):
    adapted = adapt(load(tiny_model("qwen3")))
    adapted.merge_adapter()
    with pytest.raises(SetupError, match="count them twice"):
        published(adapted, tiny_model("qwen3"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_an_adapter_ends_with_the_merged_weights_and_the_base_of_the_start(tiny_model, tmp_path, dtype):
    bucket = tmp_path / "bucket"
    adapted = adapt(load(tiny_model("qwen3"), dtype), modules_to_save=["lm_head"])
    base = {name: p.detach().clone() for name, p in adapted.named_parameters() if not p.requires_grad}
    assert base
    rows = [{"input_ids": (ids := torch.randint(3, 500, (16,)).tolist()), "labels": ids} for _ in range(16)]
    args = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model=adapted, args=args, train_dataset=rows, callbacks=[DeltaSyncCallback(str(bucket))]).train()
    for name, param in adapted.named_parameters():
        if name in base:
            assert torch.equal(param, base[name]), name
    reader = BucketReader(open_store(bucket))
    latest = reader.latest()
    assert latest is not None
    assert latest.step == 3
    expected = published(adapted, tiny_model("qwen3"))
    with materialise(reader, latest) as state:
        for name in reader.table(latest):
            assert np.array_equal(state.bits(name), expected[name].view(torch.int16).numpy().view(np.uint16)), name
