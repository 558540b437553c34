# SPDX-License-Identifier: Apache-2.0
"""Which version answers satisfy a demand, and what the status looks like to Prometheus."""

import pytest

pytest.importorskip("prometheus_client")

from delta_wire.digest import Digest
from delta_wire.manifest import VersionId
from vllm_delta.metrics import exposition
from vllm_delta.status import Status
from vllm_delta.versions import parse_minimum, reaches


@pytest.mark.parametrize(
    ("served", "minimum", "enough"),
    [
        (None, "0", False),
        ("run-1-4", "4", True),
        ("run-1-4", "5", False),
        ("run-2-10", "run-1-9", True),
        ("run-1-9", "run-1-10", False),
        ("run-1-9", "other-1-2", False),
    ],
)
def test_what_is_new_enough(served: str | None, minimum: str, enough: bool):
    assert reaches(served, parse_minimum(minimum)) is enough


@pytest.mark.parametrize("text", ["", "soon", "-1", "1.5", "run-1", "9" * 40, "run-x-1"])
def test_a_demand_that_names_no_version_is_refused(text: str):
    with pytest.raises(ValueError, match="x-min-weight-version"):
        parse_minimum(text)


def test_metrics_before_and_after_commits():
    status = Status("server", "bucket")
    assert b"vllm_delta:commits_total 0.0" in exposition(status.to_json())
    assert b"vllm_delta:lag_versions" not in exposition(status.to_json())
    status.staged(3, 100)
    status.staged(4, 20)
    for seq, pause_ms in ((3, 1.5), (4, 30.0)):
        status.committed(VersionId("run", 1, seq), Digest(), pause_ms, pause_ms, [1.0])
    status.aims_at(VersionId("run", 1, 6))
    status.degraded("version", "broken")
    status.degraded("version", "broken")
    text = exposition(status.to_json()).decode()
    for line in (
        "vllm_delta:commits_total 2.0",
        "vllm_delta:refused_total 1.0",
        "vllm_delta:staged_bytes_total 120.0",
        "vllm_delta:lag_versions 2.0",
        'vllm_delta:state{state="degraded"} 1.0',
        'vllm_delta:commit_seconds_bucket{le="0.001"} 0.0',
        'vllm_delta:commit_seconds_bucket{le="0.002"} 1.0',
        'vllm_delta:commit_seconds_bucket{le="0.02"} 1.0',
        'vllm_delta:commit_seconds_bucket{le="+Inf"} 2.0',
        "vllm_delta:commit_seconds_count 2.0",
    ):
        assert line in text.splitlines(), text
