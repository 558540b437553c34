#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the tests of the trainers with other releases of TRL than the one that is installed.

python tools/trl_versions.py 1.14.2 1.15.0

Each release is laid into a folder of its own in `.cache/trl/`, without its dependencies, and comes first on
PYTHONPATH, in the trainer's processes, the launched ones included. The environment stays as it is. Prints one line
for each release; exits with 1 if a test failed with any of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNIT = (
    "test_trl_versions.py",
    "test_transfer.py",
    "test_server_mode.py",
    "test_rollouts.py",
    "test_trl_delta_cli.py",
    "test_cpu_attention.py",
    "test_trackers.py",
)
# real servers, and several processes with stubs for the server
INTEGRATION = ("test_trainers.py", "test_rank_trainers.py")
TESTS = [*(f"tests/unit/{name}" for name in UNIT), *(f"tests/integration/{name}" for name in INTEGRATION)]


def install(version: str) -> Path:
    """The release's folder, filled if it is not there yet."""
    folder = ROOT / ".cache" / "trl" / version
    if not (folder / "trl").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), f"trl=={version}"], check=True)
    return folder


def run(package: str, version: str, folder: Path, arguments: list[str], **variables: str) -> tuple[bool, str]:
    """Whether all tests passed with a package that lies in a folder, and pytest's last line."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    environment |= variables
    say = [sys.executable, "-c", f"import {package}; print({package}.__version__)"]
    found = subprocess.run(say, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1]
    if found != version:
        raise SystemExit(f"expected {package} {version} to be imported, found {found}")
    pytest = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert pytest.stdout is not None
    last = ""
    for line in pytest.stdout:
        print(line, end="", flush=True)
        last = line.strip(" =\n") or last
    return pytest.wait() == 0, last


def run_all(
    name: str,
    tests: list[str],
    arguments: list[str],
    run_one: Callable[[str, list[str]], tuple[bool, str]],
    usage: str,
) -> int:
    """Run tests with each release that the arguments name, and say how each went.

    Args:
        name (`str`): of the package, for people.
        tests (`list[str]`): run if the arguments choose none.
        arguments (`list[str]`): versions, and what pytest is given.
        run_one (`Callable`): runs one version with these arguments of pytest.
        usage (`str`): what is said where no version is given.

    Returns:
        `int`: the exit code.
    """
    versions = [argument for argument in arguments if argument[:1].isdigit() and "." in argument]
    options = [argument for argument in arguments if argument not in versions]
    # options of pytest alone choose no tests
    options += tests if all(option.startswith("-") for option in options) else []
    if not versions:
        raise SystemExit(usage)
    results = {version: run_one(version, options) for version in versions}
    for version, (passed, last) in results.items():
        print(f"{name} {version}: {'passed' if passed else 'FAILED'}: {last}")
    return 0 if all(passed for passed, _ in results.values()) else 1


def run_version(version: str, options: list[str]) -> tuple[bool, str]:
    # computes log probabilities by Triton also where there is no GPU, see trl_delta/cpu.py
    variables = {"TRITON_INTERPRET": "1"} if version.startswith("1.15.") else {}
    return run("trl", version, install(version), options, **variables)


if __name__ == "__main__":
    raise SystemExit(run_all("TRL", TESTS, sys.argv[1:], run_version, __doc__ or ""))
