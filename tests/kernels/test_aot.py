# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every target without spills and with wide accesses; and the check finds what it should."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TOOLS = Path(__file__).parents[2] / "tools"
# the kernels must be the compiled ones, whoever runs this
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=900
    )


def test_every_kernel_compiles_without_spills_and_with_wide_accesses(tmp_path: Path):
    result = run(str(TOOLS / "aot.py"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    compiled = {(entry["kernel"], entry["target"]) for entry in report["kernels"]}
    # every function of the modules called a kernel, found by its name alone
    sources = [path.read_text() for path in (TOOLS.parent / "triton_kernels").glob("triton_*.py")]
    named = {line.split("(")[0][4:] for text in sources for line in text.splitlines() if line.startswith("def ")}
    kernels = {name for name in named if name.endswith("_kernel")}
    assert compiled == {(name, target) for name in kernels for target in ("sm_80", "sm_90", "sm_100")}
    assert all(0 < entry["registers"] <= 255 and entry["spills"] == 0 for entry in report["kernels"])
    assert all(access["bits"] == 128 for entry in report["kernels"] for access in entry["accesses"]
               if access["pointer"] == "p_param" and "exempt" not in access)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # what is scattered, but not declared
        ("kernel.__name__ == 'gather_kernel'; narrow={}", "p_flat: 8 × ld of 16 bits where 128 are possible"),
        # a size that is no multiple of 16 makes the accesses of a tile narrow
        ("variant == '128 columns'; multiples=()", "p_rows: 16 × ld of 16 bits where 128 are possible"),
        # more registers than there are
        ("kernel.__name__ == 'rank_kernel'; constants={'BLOCK': 8192, 'CHUNK': 32}", "spills"),
        # a declared pointer that nothing reads or writes any more
        ("kernel.__name__ == 'sign_kernel'; arguments=build.arguments | {'p_gone': '*i64'}", "p_gone: not accessed"),
    ],
)
def test_the_check_finds(change: str, expected: str, tmp_path: Path):
    chosen, changed = change.split("; ")
    code = (
        f"import sys; sys.path.insert(0, {str(TOOLS)!r})\n"
        "import aot; from dataclasses import replace\n"
        f"build = next(build for build in aot.BUILDS if build.{chosen})\n"
        f"print(aot.inspect_build(replace(build, {changed}), 90)['problems'])\n"
        "assert not aot.inspect_build(build, 90)['problems']"
    )
    result = run("-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout
