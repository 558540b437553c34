# SPDX-License-Identifier: Apache-2.0
"""The demo through other buckets than a folder: real trainer, real server, real clients of hub and S3."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import HubServer
from moto_bucket import MotoServer

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart_cpu.py"
DELTA_WIRE = Path(sys.executable).with_name("delta-wire")
STEPS = 6
TIMEOUT_S = 300


def run_demo(folder: Path, bucket: str, env: dict[str, str]) -> tuple[str, dict]:
    """Output and summary of a demo that has passed."""
    command = [sys.executable, str(SCRIPT), "--model", "tiny", "--steps", str(STEPS), "--bucket", bucket]
    result = subprocess.run(
        [*command, "--run-dir", str(folder / "run")],
        cwd=folder,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stdout
    assert "Traceback" not in result.stdout
    return result.stdout, json.loads((folder / "run" / "summary.json").read_text())


def check(folder: Path, bucket: str, env: dict[str, str], secret: str) -> dict:
    output, summary = run_demo(folder, bucket, env)
    assert summary["bit_exact"] is True
    assert summary["version_served"] == summary["versions_published"] >= 1
    # somebody who knows only the bucket can verify it
    verified = subprocess.run(
        [DELTA_WIRE, "verify", bucket, "--json"], cwd=folder, env=os.environ | env, capture_output=True, text=True
    )
    assert verified.returncode == 0, verified.stderr
    logs = output + (folder / "run" / "server.log").read_text() + verified.stdout + verified.stderr
    assert not re.search(secret, logs)
    return summary


def test_through_a_hub(tmp_path):
    with HubServer() as hub:
        bucket = "hf://buckets/team/weights/runs/demo"
        summary = check(
            tmp_path, bucket, hub.env | {"HF_HUB_OFFLINE": "0"}, f"{hub.env['HF_TOKEN']}|secret-of-the-link"
        )
        paths = hub.buckets["team/weights"].files
        assert "runs/demo/LATEST" in paths and "runs/demo/acks/server.json" in paths
        assert sum(path.startswith("runs/demo/deltas/") for path in paths) == summary["versions_published"]
        # an idle poll is a HEAD request; content is fetched only when there is some
        polls, fetches = hub.counted(r"HEAD .*/LATEST"), hub.counted("GET /content/")
        assert polls > fetches > 0


def test_through_s3(tmp_path):
    with MotoServer(tmp_path) as moto:
        moto.create_bucket("weights")
        check(tmp_path, "s3://weights/runs/demo", moto.env, moto.env["AWS_SECRET_ACCESS_KEY"])
