# SPDX-License-Identifier: Apache-2.0
"""An adapter published by itself: PEFT's own names and bits, what it belongs to, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from wrapping import all_at_once

from delta_wire.bucket import BucketReader
from delta_wire.checkpoint import ADAPTER_FILE, Checkpoint
from delta_wire.errors import BaseMismatchError, FormatError, ModelMismatchError, SetupError
from delta_wire.manifest import Manifest
from delta_wire.replay import checkout, verify
from delta_wire.stores import open_store
from trl_delta import DeltaSyncConfig
from trl_delta.resume import Resumed
from trl_delta.separate import SeparateAdapter
from trl_delta.session import DeltaSyncSession

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SEPARATE = {"delta_sync_adapter": "separate", "delta_sync_adapter_name": "policy"}


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def adapt(folder: Path, name: str = "default", dtype: str = "float32", **settings: Any) -> PeftModel:
    torch.manual_seed(1)
    config = LoraConfig(**({"r": 4, "lora_alpha": 6, "target_modules": LINEAR} | settings))
    adapted = get_peft_model(load(folder, dtype), config, adapter_name=name)
    assert isinstance(adapted, PeftModel)
    return adapted


def train(model: nn.Module) -> None:
    """What an optimizer step does to the adapter."""
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.01 * (torch.rand_like(param) < 0.5))


def started(model: nn.Module, bucket: Path, **settings: Any) -> DeltaSyncSession:
    session = DeltaSyncSession(str(bucket), DeltaSyncConfig(**(SEPARATE | settings)))
    session.start(model)
    return session


def newest(bucket: Path) -> Manifest:
    manifest = BucketReader(open_store(bucket)).latest()
    assert manifest is not None
    return manifest


def assert_saved(folder: Path, model: PeftModel, name: str) -> None:
    """A folder has the tensors that PEFT saves, rounded once."""
    expected = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    found = load_file(folder / ADAPTER_FILE)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value.view(torch.int16), expected[key].to(torch.bfloat16).view(torch.int16)), key


@pytest.mark.parametrize(
    ("name", "encoding", "settings"),
    [
        ("default", "packed", {}),
        ("policy_v2", "context", {"use_rslora": True}),
        ("lora_A", "packed", {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "embed_tokens"]}),
        ("default", "plain", {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 8}}),
        ("default", "packed", {"use_dora": True, "target_modules": ["v_proj"]}),
    ],
)
def test_what_a_checkout_holds_is_what_peft_saves(tiny_model, tmp_path, command, name, encoding, settings):
    model = adapt(tiny_model("qwen3"), name, **settings)
    # anchors of their own among the versions
    session = started(model, tmp_path / "bucket", delta_sync_anchor_factor=0.7, delta_sync_encoding=encoding)
    for step in range(1, 5):
        train(model)
        session.step(step)
        assert session.publisher.wait(60)
    assert session.finish()
    reader, manifest = BucketReader(open_store(tmp_path / "bucket")), newest(tmp_path / "bucket")
    assert all(check.ok for check in verify(reader))
    assert [m.anchor is not None for m in reader.walk(manifest)].count(True) >= 2
    folder = checkout(reader, manifest, tmp_path / "checkout")
    assert_saved(folder, model, name)
    assert manifest.adapter is not None
    assert manifest.adapter.name == "policy"
    assert manifest.adapter.rank == (8 if "rank_pattern" in settings else 4)
    assert manifest.adapter.base_digest == Checkpoint(tiny_model("qwen3")).digest()
    shown = command("inspect", tmp_path / "bucket").out
    assert f"for {tiny_model('qwen3')} {manifest.adapter.base_digest}" in shown
    # PEFT opens it and computes the same
    again = PeftModel.from_pretrained(load(tiny_model("qwen3")), str(folder))
    tokens = torch.arange(12).reshape(1, -1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.to(torch.bfloat16))
        assert torch.equal(model(tokens).logits, again(tokens).logits)


def test_it_is_a_few_bytes_and_the_base_stays_where_it_is(tiny_model, tmp_path):
    model = adapt(tiny_model("qwen3"), dtype="bfloat16")
    session = started(model, tmp_path / "bucket")
    before = {name: param.clone() for name, param in model.named_parameters() if not param.requires_grad}
    for step in range(1, 4):
        train(model)
        session.step(step)
    assert session.finish()
    assert before
    for name, param in model.named_parameters():
        assert name not in before or torch.equal(param, before[name]), name
    size = sum(file.stat().st_size for file in (tmp_path / "bucket").rglob("*") if file.is_file())
    assert size < Checkpoint(tiny_model("qwen3")).table().full_bytes / 2


def test_wrappers_are_no_part_of_the_names(tiny_model):
    model = adapt(tiny_model("qwen3"))
    plain = SeparateAdapter(model, DeltaSyncConfig(**SEPARATE), None, Checkpoint(tiny_model("qwen3")))
    names = {entry.names for entry in plain.live(model)}
    wrapped = all_at_once(model)
    found = SeparateAdapter(wrapped, DeltaSyncConfig(**SEPARATE), None, Checkpoint(tiny_model("qwen3")))
    assert {entry.names for entry in found.live(wrapped)} == names
    assert found.agree_on_base() == plain.agree_on_base() == Checkpoint(tiny_model("qwen3")).digest()


def test_a_run_goes_on_and_refuses_another_adapter(tiny_model, tmp_path):
    model = adapt(tiny_model("qwen3"))
    bucket = tmp_path / "bucket"
    session = started(model, bucket)
    train(model)
    session.step(1)
    assert session.finish()
    again = started(model, bucket)
    train(model)
    again.step(1)
    assert again.finish()
    assert (newest(bucket).version.epoch, newest(bucket).version.seq) == (2, 2)
    assert newest(bucket).adapter == BucketReader(open_store(bucket)).manifest(0).adapter
    with pytest.raises(
        BaseMismatchError, match="is called policy and has rank 4, this trainer's is other with rank 4"
    ):
        started(model, bucket, delta_sync_adapter_name="other")
    with pytest.raises(ModelMismatchError):
        started(model, bucket, delta_sync_adapter="merged")
    # the same tensors below which the base is another one
    moved = tmp_path / "moved"
    base = load(tiny_model("qwen3"))
    with torch.no_grad():
        base.lm_head.weight[0, 0] += 1  # type: ignore[operator]
    base.to(torch.bfloat16).save_pretrained(moved)
    with pytest.raises(BaseMismatchError, match=r"belongs to a base model with digest [0-9a-f]{32} .*trainer's has"):
        started(adapt(moved), bucket)


def test_a_trainers_checkpoint_that_is_behind_goes_on(tiny_model, tmp_path):
    model = adapt(tiny_model("qwen3"))
    bucket = tmp_path / "bucket"
    session = started(model, bucket)
    train(model)
    session.step(1)
    assert session.publisher.wait(60)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = session.resume_state()
    train(model)
    session.step(2)
    assert session.finish()
    model.load_state_dict(saved)
    again = DeltaSyncSession(str(bucket), DeltaSyncConfig(**SEPARATE))
    again.start(model, step=1, resumed=Resumed.parse(state))
    assert again.finish()
    reader = BucketReader(open_store(bucket))
    assert (newest(bucket).version.epoch, newest(bucket).version.seq) == (2, 3)
    assert newest(bucket).digest == reader.manifest(1).digest
    assert_saved(checkout(reader, newest(bucket), tmp_path / "checkout"), model, "default")


def test_a_base_that_is_not_its_checkpoint_is_refused(tiny_model, tmp_path):
    model = adapt(tiny_model("qwen3"), init_lora_weights="pissa", target_modules=["q_proj"])
    with pytest.raises(BaseMismatchError, match=r"digest [0-9a-f]{32}, the checkpoint .* has [0-9a-f]{32}.*pissa"):
        started(model, tmp_path / "bucket")
    assert not list((tmp_path / "bucket").rglob("*.json"))


@pytest.mark.parametrize("on_failure", ["warn", "stop"])
def test_a_base_that_has_moved_is_told_at_the_end(tiny_model, tmp_path, caplog, on_failure):
    model = adapt(tiny_model("qwen3"))
    session = started(model, tmp_path / "bucket", delta_sync_on_failure=on_failure)
    train(model)
    session.step(1)
    with torch.no_grad():
        model.get_base_model().model.norm.weight[0] += 1
    if on_failure == "stop":
        with pytest.raises(BaseMismatchError, match="when training began: something has trained or merged into them"):
            session.finish()
    else:
        assert not session.finish()
        assert "something has trained or merged into them" in caplog.text


def test_what_cannot_be_published_by_itself_is_refused(tiny_model, tmp_path):
    folder = tiny_model("qwen3")
    with pytest.raises(SetupError, match="the model is none of PEFT's"):
        started(load(folder), tmp_path / "none")
    two = adapt(folder)
    two.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    two.base_model.set_adapter(["default", "second"])
    with pytest.raises(SetupError, match="needs one active adapter, found default, second"):
        started(two, tmp_path / "two")
    vera = get_peft_model(load(folder), VeraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(SetupError, match="VeraConfig; only LoRA"):
        started(vera, tmp_path / "vera")


def test_another_active_adapter_is_never_published_as_the_runs(tiny_model, tmp_path, caplog):
    model = adapt(tiny_model("qwen3"))
    session = started(model, tmp_path / "bucket")
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("second")
    session.step(1)
    session.step(2)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("trl_delta")]
    assert len(said) == 1 and "the active adapter is second, it was default" in said[0]
    assert not session.publisher.wait(60) and newest(tmp_path / "bucket").version.seq == 0
    # and on with the one that the run began with
    model.set_adapter("default")
    model.delete_adapter("second")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B.default" in name:
                param.add_(1)
    session.step(3)
    assert session.finish() and newest(tmp_path / "bucket").step == 3
    session = started(model, tmp_path / "second", delta_sync_on_failure="stop")
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("second")
    with pytest.raises(SetupError, match="the active adapter is second, it was default"):
        session.step(1)
    session.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [("delta_sync_adapter", "both"), ("delta_sync_adapter_name", "a b"), ("delta_sync_adapter_name", "")],
)
def test_wrong_settings_name_the_key(key, value):
    with pytest.raises(SetupError, match=f"^{key}: expected .*, found {value!r}"):
        DeltaSyncConfig(**{key: value})


ADAPTER = {"name": "policy", "rank": 4, "base": {"digest": "0" * 32, "reference": None}}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"name": "a@b"}, "'a@b' is no name of an adapter"),
        ({"rank": 0}, "rank"),
        ({"base": None}, "base: expected an object"),
        ({"base": {"digest": "0" * 32}}, "reference"),
        ({"base": {"digest": "x", "reference": None}}, "digest"),
    ],
)
def test_a_manifest_with_a_bad_adapter_is_refused(tiny_model, tmp_path, edit, says):
    session = started(adapt(tiny_model("qwen3")), tmp_path / "bucket")
    session.close()
    value = json.loads(newest(tmp_path / "bucket").to_bytes())
    good = Manifest.from_bytes(json.dumps(value | {"adapter": ADAPTER}).encode(), "bucket/manifest")
    assert good.adapter is not None and good.adapter.to_json() == ADAPTER
    with pytest.raises(FormatError, match=says):
        Manifest.from_bytes(json.dumps(value | {"adapter": ADAPTER | edit}).encode(), "bucket/manifest")


def test_checkpoints_of_both_kinds_in_one_folder(tiny_model, tmp_path):
    """A folder with a whole model is that model, whatever adapter lies beside it."""
    model = adapt(tiny_model("qwen3"))
    model.save_pretrained(tmp_path)
    assert all("lora_" in name for name in Checkpoint(tmp_path).layout)
    load(tiny_model("qwen3"), "bfloat16").save_pretrained(tmp_path)
    assert Checkpoint(tmp_path).digest() == Checkpoint(tiny_model("qwen3")).digest()
