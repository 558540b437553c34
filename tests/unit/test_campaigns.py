# SPDX-License-Identifier: Apache-2.0
"""Short forms of the campaigns in benchmarks/; the long ones' results are stored beside them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *options: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--json", *options],
        capture_output=True,
        text=True,
        timeout=600,
        cwd="/",
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_hostile_objects_are_refused():
    report = run("fuzz.py", "--count", "1000")
    assert report["failures"] == 0, report["problems"]
    assert report["cases"] == 1000 and report["refused"] > 800 and report["identical"] > 5
    assert len(report["by_kind"]) == 9


def test_a_long_run_neither_fills_the_bucket_nor_the_memory():
    report = run("faults.py", "--soak", "120", "--servers", "1", "--timeout-s", "120")
    assert report["wrong_states"] == 0 and report["unrecovered"] == 0, report["problems"]
    assert report["versions"] >= 120 and report["restarts"] == 0
    # each version is two objects; how many of the old ones are gone by now depends on the machine
    last = report["samples"][-1]
    assert last["objects"] < 2 * last["version"]


@pytest.mark.parametrize("store", ["file", "s3", "hf"])
def test_faults_leave_no_wrong_state_and_nobody_behind(store: str):
    report = run(
        "faults.py",
        "--count",
        "50" if store == "file" else "20",
        "--seed",
        "11",
        "--store",
        store,
        "--timeout-s",
        "120",
    )
    assert report["wrong_states"] == 0 and report["unrecovered"] == 0, report["problems"]
    assert report["faults"] >= 20 and report["versions"] > 10 and report["states_checked"] > 20
