# SPDX-License-Identifier: Apache-2.0
import json
import sys
import types

import numpy as np
import pytest

from delta_wire.checkpoint import Checkpoint, resolve_reference
from delta_wire.container import write_tensors
from delta_wire.errors import FormatError, ModelMismatchError, SetupError


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_bits_table_and_digest_do_not_depend_on_shards(tmp_path, tools, shards):
    bits = tools.random_bits()
    checkpoint = Checkpoint(tools.write_checkpoint(tmp_path / "m", bits, shards))
    assert {name: spec.shape for name, spec in checkpoint.table().items()} == {n: b.shape for n, b in bits.items()}
    for name, expected in bits.items():
        np.testing.assert_array_equal(checkpoint.bits(name), expected)
    assert checkpoint.digest() == tools.digest_of(bits)
    assert len(checkpoint.weight_files()) == shards + (shards > 1)


def test_other_files_are_configuration_and_tokenizer_only(base):
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool.jinja").write_text("x")
    (base / "checkpoint-5").mkdir()
    (base / "checkpoint-5" / "config.json").write_text("{}")
    (base / "consolidated.safetensors").write_bytes(b"")
    assert Checkpoint(base).other_files() == [
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_torch_reads_the_same_bits(base, tools):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    loaded = load_file(base / "model.safetensors")
    for name, expected in tools.random_bits().items():
        assert loaded[name].dtype == torch.bfloat16
        np.testing.assert_array_equal(loaded[name].view(torch.int16).numpy().view(np.uint16), expected)


def test_a_checkpoint_that_torch_wrote(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    values = torch.tensor([1.0, -0.0, float("nan"), float("inf")], dtype=torch.bfloat16)
    save_file({"w": values}, tmp_path / "model.safetensors", {"format": "pt"})
    assert Checkpoint(tmp_path).bits("w")[1] == 0x8000


def test_other_dtypes_are_refused_by_name(tmp_path):
    tensors = {"w": ("BF16", (2,), np.zeros(2, np.uint16)), "gate.bias": ("F32", (2,), np.zeros(2, np.float32))}
    write_tensors(tmp_path / "model.safetensors", tensors)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ModelMismatchError, match=r"found 1 others: gate\.bias is F32"):
        checkpoint.table()
    with pytest.raises(ModelMismatchError, match=r"gate\.bias is F32"):
        checkpoint.bits("gate.bias")


def test_missing_things_are_named(tmp_path, tools):
    with pytest.raises(SetupError, match="no such folder"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(SetupError, match=r"neither model\.safetensors"):
        Checkpoint(tmp_path)
    folder = tools.write_checkpoint(tmp_path / "m", tools.random_bits(), 2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SetupError, match=r"model-00002-of-00002\.safetensors is missing"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "expected a weight_map"),
        ([], "expected a weight_map"),
        ({"w": "../../etc/passwd.safetensors"}, "no file name of this folder"),
        ({"w": "/etc/x.safetensors"}, "no file name of this folder"),
        ({"w": "model.bin"}, "no file name of this folder"),
        ({"w": 5}, "no file name of this folder"),
        ({"w": "a.safetensors", "missing": "a.safetensors"}, "tensor missing is not in a.safetensors"),
        ({"w": "a.safetensors"}, "tensor v is not listed"),
    ],
)
def test_bad_index_is_refused(tmp_path, weight_map, message):
    array = np.zeros(1, np.uint16)
    write_tensors(tmp_path / "a.safetensors", {"w": ("BF16", (1,), array), "v": ("BF16", (1,), array)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FormatError, match=message):
        Checkpoint(tmp_path)


def test_a_torn_shard_is_named(base):
    path = base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"model\.safetensors: tensors need"):
        Checkpoint(base)


def test_no_tensors_is_no_checkpoint(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {})
    with pytest.raises(FormatError, match="no tensors"):
        Checkpoint(tmp_path)


def test_references(base, monkeypatch):
    assert resolve_reference(str(base)) == base
    for text in (
        "/no/such/folder",
        "repo-without-revision",
        "../x@main",
        "a/b/c@main",
        "repo@../../x",
        "repo@a/../../x",
        "x" * 3000,
    ):
        with pytest.raises(SetupError, match="no folder on this machine"):
            resolve_reference(text)

    asked = []
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = lambda repo, revision, **_: asked.append((repo, revision)) or str(base)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve_reference("org/model@v1.0") == base
    assert asked == [("org/model", "v1.0")]

    def offline(*_, **__):
        raise ConnectionError("offline")

    hub.snapshot_download = offline
    with pytest.raises(SetupError, match=r"cannot get this checkpoint.*offline"):
        resolve_reference("org/model@v1.0")
