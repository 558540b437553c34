# SPDX-License-Identifier: Apache-2.0
"""The demo as a user runs it: real TRL, real vLLM, a generated model."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart_cpu.py"
STEPS = 6
TIMEOUT_S = 300


class Demo:
    """A running demo; its output goes to a file, which is read line by line."""

    def __init__(self, folder: Path):
        self.run_dir = folder / "run"
        self.bucket = self.run_dir / "bucket"
        self._output = folder / "output.txt"
        command = [
            sys.executable,
            str(SCRIPT),
            "--model",
            "tiny",
            "--steps",
            str(STEPS),
            "--run-dir",
            str(self.run_dir),
        ]
        with self._output.open("w") as file:
            # a group of its own, as a shell gives it, so that an interrupt reaches it alone
            self.process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, start_new_session=True)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            found = re.search(pattern, self.output, re.MULTILINE)
            if found:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        pytest.fail(f"{pattern!r} did not appear:\n{self.output}")

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def leftovers(self) -> list[str]:
        """Processes that still have this demo's bucket in their environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if str(self.bucket).encode() in path.read_bytes():
                    found.append(path.parent.name)
            except OSError:
                continue
        return found


@pytest.fixture
def demo(tmp_path):
    running = Demo(tmp_path)
    yield running
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(60)


def test_the_demo_ends_with_a_server_that_equals_the_trainer_in_every_bit(demo):
    code = demo.wait()
    assert code == 0, demo.output
    summary = json.loads((demo.run_dir / "summary.json").read_text())
    assert summary["bit_exact"] is True
    published = summary["versions_published"]
    assert summary["version_served"] == published
    # a tiny model trains faster than it is published, so steps may share a version
    assert 1 <= published <= STEPS
    assert len(summary["delta_bytes"]) == len(summary["changed_frac"]) == published
    assert all(0 < size < summary["full_bytes"] / 10 for size in summary["delta_bytes"])
    assert all(0 < share < 0.1 for share in summary["changed_frac"])
    assert len(summary["reward"]) == len(summary["staleness"]) == STEPS
    assert all(0 <= staleness <= STEPS for staleness in summary["staleness"])
    assert summary["pause_ms"]
    assert 0 < summary["wall_s"] < TIMEOUT_S
    steps = re.findall(r"^ +(\d+) +-?\d\.\d+ +\d\.\d+% ", demo.output, re.MULTILINE)
    assert steps == [str(step) for step in range(1, STEPS + 1)]
    assert "Traceback" not in demo.output
    # the bucket can be verified by somebody who knows only the bucket
    verified = subprocess.run(
        [Path(sys.executable).with_name("delta-wire"), "verify", str(demo.bucket), "--json"],
        cwd=demo.run_dir,
        capture_output=True,
        text=True,
    )
    assert verified.returncode == 0, verified.stderr
    assert demo.leftovers() == []


def test_a_bucket_removed_half_way_is_told_on_both_sides_without_a_traceback(demo):
    demo.wait_for(r"^ +2 +-?\d\.\d+ ")
    # at one go: a folder that is emptied while the trainer writes into it may outlive its removal
    demo.bucket.rename(demo.run_dir / "removed")
    shutil.rmtree(demo.run_dir / "removed")
    assert demo.wait() == 1
    output = demo.output
    assert output.count("cannot publish version") == 1
    assert f"{demo.bucket}: there is no such folder" in output
    assert re.search(rf"^ +{STEPS} .*not published", output, re.MULTILINE), "training must go on"
    assert re.search(rf"demo FAILED: the weights of step {STEPS} are not in the bucket", output)
    assert "Traceback" not in output
    # what vLLM says when it is told to end is no part of this
    log = (demo.run_dir / "server.log").read_text().partition("[shutdown]")[0]
    assert re.search(rf"degraded, serving .*{re.escape(str(demo.bucket))}: there is no such folder", log)
    assert "Traceback" not in log
    assert json.loads((demo.run_dir / "summary.json").read_text())["bit_exact"] is False
    assert not demo.bucket.exists()
    assert demo.leftovers() == []


def test_an_interrupt_ends_the_server_too(demo):
    demo.wait_for("starting vllm serve")
    deadline_s = time.monotonic() + 60
    while not demo.leftovers() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    os.kill(demo.process.pid, signal.SIGINT)
    assert demo.wait() == 1
    assert "demo: interrupted" in demo.output
    assert "Traceback" not in demo.output
    assert demo.leftovers() == []


def test_a_server_that_dies_ends_the_demo_with_a_sentence(demo):
    demo.wait_for("^step  reward")
    for pid in demo.leftovers():
        os.kill(int(pid), signal.SIGKILL)
    assert demo.wait() == 1
    assert re.search(
        r"^demo: the server has exited with code -9; the reason is at the end of .*server\.log",
        demo.output,
        re.MULTILINE,
    )
    assert demo.leftovers() == []


def test_a_folder_that_is_no_bucket_is_not_wiped(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    command = [sys.executable, str(SCRIPT), "--model", "tiny", "--bucket", str(precious)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "neither empty nor a bucket" in result.stderr
    assert (precious / "thesis.txt").exists()


def test_too_few_steps_are_refused(tmp_path):
    command = [sys.executable, str(SCRIPT), "--steps", "2"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "at least 6" in result.stderr
