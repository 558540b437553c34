# SPDX-License-Identifier: Apache-2.0
"""The overhead benchmark runs and counts what it says, on the generated model."""

import importlib.util
from pathlib import Path


def test_blocks_alternate_and_all_time_is_counted(tiny_model):
    path = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
    spec = importlib.util.spec_from_file_location("overhead", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = module.measure(tiny_model("qwen3"), pairs=2, block_steps=2)
    assert [len(times) for times in result["blocks_s"].values()] == [2, 2]
    assert 0 < result["thread_s"] < result["step_s_with"]
    assert result["share"] == result["thread_s"] / result["step_s_with"]
    assert result["extra_bytes"] == 2 * result["num_params"]
    assert 0 < result["changed_frac"] < 0.1
