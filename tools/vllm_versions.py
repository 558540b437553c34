#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the tests of the servers with the code of other releases of vLLM than the CPU build that is installed.

python tools/vllm_versions.py 0.33.0

A release that nobody has built for CPUs is laid into a folder of its own in `.cache/vllm/`: its Python code as it is
published, beside the compiled CPU kernels of the installed build. That is what this project hooks into (engine loop,
scheduler, loaders, routes), run for real; it is no run of that release's own kernels. The folder comes first on
PYTHONPATH in all processes of a server. Prints one line for each release; exits with 1 if a test failed with any.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trl_versions import ROOT, run, run_all

UNIT = ("test_plugin.py", "test_requests.py", "test_regions.py", "test_computed.py", "test_adapters.py")
INTEGRATION = (
    "test_server.py",
    "test_versions.py",
    "test_failures.py",
    "test_policies.py",
    "test_adapters.py",
    "test_layouts.py",
)
TESTS = [*(f"tests/unit/{name}" for name in UNIT), *(f"tests/integration/{name}" for name in INTEGRATION)]


def install(version: str) -> Path:
    """The release's folder, filled if it is not there yet."""
    folder = ROOT / ".cache" / "vllm" / version
    if folder.is_dir():
        return folder
    new = folder.with_name(f"{version}.new")
    shutil.rmtree(new, ignore_errors=True)
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", downloads, f"vllm=={version}"], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            # its kernels are for GPUs
            archive.extractall(new, [name for name in archive.namelist() if not name.endswith(".so")])
    # where the package is, without importing it
    find = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    found = subprocess.run([sys.executable, "-c", find], capture_output=True, text=True, check=True, cwd="/")
    installed = Path(found.stdout.strip())
    for library in installed.rglob("*.so"):
        path = new / "vllm" / library.relative_to(installed)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, path)
    # the platform is inferred from a version that contains "cpu"
    (metadata,) = new.glob("vllm-*.dist-info")
    metadata = metadata.rename(new / f"vllm-{version}+cpu.dist-info")
    text = (metadata / "METADATA").read_text()
    (metadata / "METADATA").write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
    new.rename(folder)
    return folder


def run_version(version: str, options: list[str]) -> tuple[bool, str]:
    folder = install(version)
    # what one release keeps there of a model another one trusts
    return run("vllm", version, folder, options, VLLM_CACHE_ROOT=str(folder / "cache"))


if __name__ == "__main__":
    raise SystemExit(run_all("vLLM", TESTS, sys.argv[1:], run_version, __doc__ or ""))
