# SPDX-License-Identifier: Apache-2.0
"""The examples as a user runs them, in their tiny forms; the demo has a file of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 900


def test_one_of_three_servers_is_killed_and_one_joins_late(tmp_path):
    command = [sys.executable, str(EXAMPLES / "multi_replica.py"), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["passed"] is True
    assert [server["server"] for server in summary["servers"]] == ["replica-1", "replica-3"]
    assert all(server["bit_exact"] for server in summary["servers"])
    assert {server["version_served"] for server in summary["servers"]} == {summary["versions_published"]}
    assert "replica-3 has joined" in done.stdout and "Traceback" not in done.stdout + done.stderr
    # the fleet as the bucket shows it: the dead one is still where it was
    watched = subprocess.run(
        [Path(sys.executable).with_name("delta-wire"), "watch", str(tmp_path / "run" / "bucket"), "--once", "--json"],
        capture_output=True,
        text=True,
    )
    servers = {server["server"]: server for server in json.loads(watched.stdout)["servers"]}
    assert watched.returncode == 1 and servers["replica-2"]["lag_versions"] > 1
    assert servers["replica-1"]["lag_versions"] == servers["replica-3"]["lag_versions"] == 0


def test_grpo_generates_with_the_weights_of_its_step(tmp_path):
    command = [sys.executable, str(EXAMPLES / "grpo_server_mode.py"), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["passed"] is True and summary["version_served"] == summary["versions_published"]
    assert [step["step"] for step in summary["steps"]] == [1, 2, 3, 4]
    assert "equal to the trainer in every bit" in done.stdout and "Traceback" not in done.stdout + done.stderr
