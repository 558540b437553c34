# SPDX-License-Identifier: Apache-2.0
"""What a real server refuses at its start: a setup that cannot work, and layouts that the map cannot express, by name.

Among them are those that vLLM's own ways to update weights answer with success and wrong weights: its sparse patches
and its reload do so with expert weights that a CPU kernel has permuted, its reload with tied ones that were packed.
"""

import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest
from training import Training
from vllm_server import WarmStart, serve

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
        refused = server.wait(lambda s: "the server cannot patch" in (s["reason"] or ""), "the refusal")
        entries = [entry for entry in refused["reason"].split("; ") if f"{name}: " in entry]
        assert entries and reason in entries[0], refused["reason"]
        before = server.complete("The answer is", max_tokens=8)["logprobs"]
        training.publish(writer)
        # it has looked at the new version, and still serves what it loaded, under no version's name
        with pytest.raises(urllib.error.HTTPError, match="503"):
            server.verify()
        assert server.complete("The answer is", max_tokens=8)["logprobs"] == before
        status = server.status()
        assert (status["version"], status["commits"], status["state"]) == (None, 0, "degraded")


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
