# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the pause runs, and checks what it measures, on a small model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

PAUSE = Path(__file__).parents[2] / "benchmarks" / "pause.py"


def test_three_ways_to_new_weights_give_the_same_bits(tiny_model: Callable[[str], Path], tmp_path: Path):
    command = [sys.executable, str(PAUSE), "--json", "--repeats=1", f"--model={tiny_model('qwen3')}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert 0 < result["changed"] < result["params"]
    assert result["commit_speedup_vs_reload"] == pytest.approx(result["reload_ms"] / result["commit_ms"])
    assert {"scatter_ms", "vllm_sparse_ms", "commit_speedup_vs_sparse", "scatter_speedup_vs_sparse"} < result.keys()
