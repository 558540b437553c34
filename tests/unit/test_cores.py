# SPDX-License-Identifier: Apache-2.0
"""What follows a bucket stays off the cores that compute tokens, if there are others."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_server import FakeEngine, FakeWorker, write_checkpoint

from delta_wire import kernels
from vllm_delta.live import Live
from vllm_delta.ranks import Ranks

CORES = sorted(os.sched_getaffinity(0))
PROGRAM = Path(__file__).parents[1] / "support/bound_process.py"


def look(*args: str) -> dict[str, list[int]]:
    done = subprocess.run([sys.executable, str(PROGRAM), *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_threads_beside_a_bound_one_may_go_elsewhere():
    first, *others = CORES
    assert look("bind") == {
        "bound": [first],
        "as made": [first],
        "unbound": CORES,
        "off": others,
        # nothing is left: better there than nowhere
        "off all": CORES,
        "off none": [first],
    }


def test_where_nothing_is_bound_threads_stay_where_they_are():
    found = look()
    assert found["bound"] == [] and found["as made"] == found["unbound"] == CORES


def test_a_server_asks_its_ranks_and_keeps_off_all_their_cores(tmp_path, monkeypatch):
    base = write_checkpoint(tmp_path / "base")
    bound = iter([[3, 4], [5]])
    kept = []
    monkeypatch.setattr(kernels, "bound_cores", lambda: next(bound))
    monkeypatch.setattr(
        kernels, "keep_off", lambda cores: kept.append((threading.current_thread().name[:10], list(cores)))
    )
    Live.attach(Ranks(FakeEngine([FakeWorker(base), FakeWorker(base)])), base)
    assert kept == [("MainThread", [3, 4, 5])] + 2 * [("delta-plan", [3, 4, 5])]
