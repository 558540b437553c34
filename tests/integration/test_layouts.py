# SPDX-License-Identifier: Apache-2.0
"""What a real server refuses at its start: a setup that cannot work, and layouts that the map cannot express, by name.

Among them are those that vLLM's own ways to update weights answer with success and wrong weights: its sparse patches
and its reload do so with expert weights that a CPU kernel has permuted, its reload with tied ones that were packed.
"""

import json
import shutil
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import Training
from vllm_server import Server, WarmStart, serve

pytestmark = pytest.mark.e2e

OURS = "--worker-extension-cls=vllm_delta.DeltaWorkerExtension"
OTHER = "--worker-extension-cls=other_layouts.Other"


def test_the_extension_without_a_bucket_ends_the_start_before_another_process_begins(
    tiny_model: Callable[[str], Path], tmp_path: Path
):
    # `serve` sets no bucket by itself; while the processes of a start begin, vLLM loses a request to stop
    with pytest.raises(RuntimeError, match="ended with 1\n"), serve(tiny_model("qwen3"), tmp_path / "log", OURS):
        pass
    log = (tmp_path / "log").read_text()
    assert log.rstrip().splitlines()[-1].startswith("delta_wire.errors.SetupError: DELTA_SYNC_BUCKET is not set"), log
    assert "APIServer pid" in log and "EngineCore pid" not in log


@pytest.mark.parametrize(
    ("kind", "layout", "name", "reason"),
    [
        ("qwen3-moe", "permuted", "experts.0.gate_proj.weight", "of 64 samples"),
        ("qwen3-tied", "packed head", "embed_tokens.weight", "keeps a packed copy"),
    ],
)
def test_what_the_map_cannot_express_is_refused(
    tiny_model: Callable[[str], Path],
    warm: WarmStart,
    tmp_path: Path,
    kind: str,
    layout: str,
    name: str,
    reason: str,
):
    training = Training(tiny_model(kind), tmp_path / "bucket")
    writer = training.start()
    env = {
        "DELTA_SYNC_BUCKET": str(training.bucket),
        "DELTA_SYNC_POLL_S": "0.05",
        "PYTHONPATH": str(Path(__file__).parents[1] / "support"),
        "TEST_LAYOUT": layout,
    }
    with serve(training.base, tmp_path / "log", OTHER, env=env, start=warm) as server:
        entries = [entry for entry in refusal(server, lambda: training.publish(writer)) if f"{name}: " in entry]
        assert entries and reason in entries[0]


def refusal(server: Server, publish: Callable[[], Any]) -> list[str]:
    """What the server has to say of each tensor, when a version has not changed what it answers."""
    # it says that it is there when that is decided
    refused = server.status()
    before = server.complete("The answer is", max_tokens=8)["logprobs"]
    publish()
    # it has looked at the new version, and still serves what it loaded, under no version's name
    with pytest.raises(urllib.error.HTTPError, match="503"):
        server.verify()
    assert server.complete("The answer is", max_tokens=8)["logprobs"] == before
    status = server.status()
    assert (status["version"], status["commits"], status["state"]) == (None, 0, "degraded")
    assert status["reason"] == refused["reason"]
    return refused["reason"].split("; ")


def quantise(source: Path, target: Path) -> Path:
    """The checkpoint with projections in fp8 and a scale for each of their rows, as tools that quantise save it."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].float().abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": kind | {"strategy": "channel", "dynamic": False},
        "input_activations": kind | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flags", "prepare", "reason"),
    [
        (["--dtype=float16"], None, "lm_head.weight: the server holds it as torch.float16"),
        ([], quantise, "mlp.down_proj.weight_scale is F32"),
        (["--load-format=dummy"], None, "lm_head.weight: 64 of 64 samples"),
    ],
    ids=["float16", "quantised checkpoint", "no checkpoint"],
)
def test_what_a_server_holds_otherwise_than_the_run_is_refused(
    tiny_model: Callable[[str], Path],
    warm: WarmStart,
    tmp_path: Path,
    flags: list[str],
    prepare: Callable[[Path, Path], Path] | None,
    reason: str,
):
    training = Training(tiny_model("qwen3"), tmp_path / "bucket")
    writer = training.start()
    served = training.base if prepare is None else prepare(training.base, tmp_path / "served")
    env = {"DELTA_SYNC_BUCKET": str(training.bucket), "DELTA_SYNC_POLL_S": "0.05"}
    with serve(served, tmp_path / "log", OURS, *flags, env=env, start=warm) as server:
        assert any(reason in entry for entry in refusal(server, lambda: training.publish(writer)))


def test_weights_in_float32_are_those_of_the_checkpoint(
    tiny_model: Callable[[str], Path], warm: WarmStart, tmp_path: Path
):
    training = Training(tiny_model("qwen3"), tmp_path / "bucket")
    writer = training.start()
    env = {"DELTA_SYNC_BUCKET": str(training.bucket), "DELTA_SYNC_POLL_S": "0.05"}
    # of two types the last counts
    with serve(training.base, tmp_path / "log", OURS, "--dtype=float32", env=env, start=warm) as server:
        server.wait(lambda s: s["state"] == "serving", "version 0")
        answers = []
        delta = training.change()
        publish = [lambda: None, lambda: writer.publish(delta, digest=training.digest, step=None)]
        for seq, act in enumerate([*publish, lambda: training.take_back(writer, delta)]):
            act()
            server.wait(lambda s, seq=seq: s["seq"] == seq and s["state"] == "serving", f"version {seq}")
            answers.append(server.complete("The answer is", max_tokens=8)["logprobs"])
            proof = server.verify()
            assert proof["equal"] and (seq == 0 or proof["digest"] == str(training.digest))
        assert answers[0] == answers[2] != answers[1]
