# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, checked on the source and in fresh interpreters."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "trl",
    "vllm",
    "huggingface_hub",
    "obstore",
    "numba",
    "cryptography",
}


def imported(path: Path) -> set[str]:
    """Top-level packages a file imports anywhere, `delta_wire.kernels` kept apart from `delta_wire`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            names.add(node.module)
    return {name.split(".")[0] for name in names if name}


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("delta_wire", {"trl_delta", "vllm_delta", "transformers", "accelerate", "trl", "vllm", "triton"}),
        (
            "triton_kernels",
            {"trl_delta", "vllm_delta", "transformers", "accelerate", "trl", "vllm", "huggingface_hub", "obstore"},
        ),
        ("trl_delta", {"vllm_delta", "vllm"}),
        ("vllm_delta", {"trl_delta", "trl", "transformers", "accelerate"}),
    ],
)
def test_imports_go_one_way(folder: str, forbidden: set[str]):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    offenders = {str(path.relative_to(ROOT)): imported(path) & forbidden for path in files}
    assert not {path: names for path, names in offenders.items() if names}


def test_the_wire_names_client_libraries_only_in_their_own_store():
    for path in (ROOT / "delta_wire").rglob("*.py"):
        clients = imported(path) & {"huggingface_hub", "obstore"}
        # resolving a public checkpoint is the hub's own job, whatever store carries the deltas
        assert not clients or path.parent.name == "stores" or path.name == "checkpoint.py", path


@pytest.mark.parametrize("module", ["delta_wire", "delta_wire.bucket", "delta_wire.cli", "trl_delta", "vllm_delta"])
def test_import_is_light(module: str, tmp_path: Path):
    result = run(f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_every_module_of_the_wire_imports_without_heavy_packages(tmp_path: Path):
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "delta_wire").rglob("*.py"))
    ]
    result = run(f"import sys, {', '.join(modules)}; print(sorted({HEAVY!r} & set(sys.modules)))", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_no_module_called_triton_kernels_is_installed(tmp_path: Path):
    result = run("import importlib.util; print(importlib.util.find_spec('triton_kernels'))", tmp_path)
    assert result.stdout.strip() == "None", result.stderr


def test_the_folder_refuses_to_be_imported_under_its_own_name():
    result = run("import triton_kernels", ROOT)
    assert result.returncode != 0
    assert "delta_wire.kernels" in result.stderr and "must not be imported as 'triton_kernels'" in result.stderr


def test_vllm_does_not_take_the_checkout_for_its_triton_kernels():
    pytest.importorskip("vllm")
    result = run("from vllm.utils.import_utils import has_triton_kernels; print(has_triton_kernels())", ROOT)
    assert result.stdout.strip().splitlines()[-1] == "False", result.stderr
