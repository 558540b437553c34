# SPDX-License-Identifier: Apache-2.0
"""The built wheel in an empty environment: the wire works without torch, the kernels sit under their own name."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # a copy, so that no build folder is left in the checkout
    source = folder / "source"
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, source, cwd=folder)
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source,
        cwd=folder,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty_env(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=folder)
    return python


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"delta_wire", "trl_delta", "vllm_delta"}
    assert "delta_wire/kernels/cpu.py" in names
    assert "delta_wire/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wire_works_where_nothing_else_is_installed(empty_env: Path, tmp_path: Path):
    code = """
import importlib.util, sys
import numpy as np
assert importlib.util.find_spec("torch") is None
assert importlib.util.find_spec("triton_kernels") is None
from delta_wire.digest import digest_change, digest_tensor
bits = np.arange(100, dtype=np.uint16)
after = bits.copy(); after[[3, 50]] = 7
change = digest_change("w", np.array([3, 50], dtype=np.int32), bits[[3, 50]], after[[3, 50]])
assert digest_tensor("w", bits) + change == digest_tensor("w", after)
print("ok")
"""
    assert run(empty_env, "-c", code, cwd=tmp_path).strip() == "ok"


def test_the_command_is_installed(empty_env: Path, tmp_path: Path):
    assert "inspect" in run(empty_env.parent / "delta-wire", "--help", cwd=tmp_path)


def test_both_sides_can_be_imported_but_say_what_they_need(empty_env: Path, tmp_path: Path):
    assert run(empty_env, "-c", "import trl_delta, vllm_delta; print('ok')", cwd=tmp_path).strip() == "ok"
