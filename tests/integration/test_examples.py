# SPDX-License-Identifier: Apache-2.0
"""The examples as a user runs them, in their tiny forms; the demo has a file of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_server import WarmStart, serve

from delta_wire.bucket import BucketReader
from delta_wire.replay import verify
from delta_wire.stores import open_store

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


@pytest.mark.parametrize("example", ["async_grpo_math.py", "wordle_space/train_wordle.py"])
def test_a_trainer_and_a_server_elsewhere(warm: WarmStart, tiny_model, tmp_path: Path, example: str):
    """What both need on two machines, on one: the trainer knows two addresses and nothing else."""
    model, bucket = tiny_model("qwen3"), tmp_path / "bucket"
    environment = {"DELTA_SYNC_BUCKET": str(bucket), "DELTA_SYNC_POLL_S": "0.1"}
    flags = ["--worker-extension-cls=vllm_delta.DeltaWorkerExtension", "--logprobs-mode=processed_logprobs"]
    with serve(model, tmp_path / "server.log", *flags, env=environment, start=warm) as server:
        command = [sys.executable, str(EXAMPLES / example), "--tiny", "--model", str(model)]
        command += ["--bucket", str(bucket), "--server", server.url]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        newest = BucketReader(open_store(bucket)).latest()
        assert newest is not None and newest.step == 3
        server.wait(lambda s: s["version"] == str(newest.version), "the weights of the last step")
        assert server.verify()["digest"] == str(newest.digest)
    assert all(check.ok for check in verify(BucketReader(open_store(bucket))))
