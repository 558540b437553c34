# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/gpu.py` where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

PATH = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path):
    result = subprocess.run(
        [sys.executable, str(PATH), "--json"],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout.strip()) == (0, "no GPU"), result.stderr
