# SPDX-License-Identifier: Apache-2.0
"""`trl-delta` with the files of configs/cpu, in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs" / "cpu"
# on two processes
ACCELERATED = ("-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "-m", "trl_delta")
TIMEOUT_S = 300


def copy_configs(folder: Path, model: Path) -> Path:
    """`folder`, which becomes configs/cpu with a model, as its README says."""
    shutil.copytree(CONFIGS, folder, ignore=shutil.ignore_patterns("runs", "model", "__pycache__"))
    shutil.copytree(model, folder / "model")
    return folder


def train(
    folder: Path,
    command: str,
    *options: str,
    program: Sequence[str] = ("-m", "trl_delta"),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run `trl-delta COMMAND --config COMMAND.yaml`, or another program in its place; returns what it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DELTA_SYNC_")}
    inherited |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [sys.executable, *program, command, "--config", f"{command}.yaml", *options],
        cwd=folder,
        env=inherited | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said
