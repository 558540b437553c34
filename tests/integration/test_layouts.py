# SPDX-License-Identifier: Apache-2.0
"""Layouts that the map cannot express are refused by a real server at its start, with names and reason.

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


@pytest.mark.parametrize(
    ("kind", "layout", "name", "reason"),
    [
        ("qwen3", "float32", "input_layernorm.weight", "the server holds it as torch.float32"),
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
    # of two types the last counts
    flags = [OURS, "--dtype=float32"] if layout == "float32" else [OTHER]
    with serve(training.base, tmp_path / "log", *flags, env=env, start=warm) as server:
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
