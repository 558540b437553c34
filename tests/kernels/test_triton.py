# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of the Triton kernels in Triton's interpreter, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "interpreter").glob("test_*.py"))


def test_the_tests_in_the_interpreter_are_found():
    assert {path.name for path in FILES} == {"test_benchmark.py", "test_elements.py", "test_streams.py"}
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_kernels_equal_references_and_cpu_forms(path: Path):
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    summary = result.stdout.strip().splitlines()[-1]
    # a skipped test would be one that nobody runs
    assert re.fullmatch(r"=*\s*\d+ passed in .*", summary), summary


def test_using_the_cpu_forms_imports_no_triton(tmp_path: Path):
    code = (
        "import sys, types; sys.modules['triton'] = None\n"
        "import delta_wire; from delta_wire import kernels; kernels.warm_up(); print('fine')"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "fine", result.stderr
