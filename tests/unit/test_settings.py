# SPDX-License-Identifier: Apache-2.0
"""The environment of a server."""

from pathlib import Path

import pytest

from delta_wire.errors import SetupError
from vllm_delta.settings import Settings


def test_defaults():
    settings = Settings.from_env({"DELTA_SYNC_BUCKET": " /bucket "})
    assert (settings.bucket, settings.poll_s, settings.cache_policy, settings.ack) == ("/bucket", 0.5, "forget", True)
    assert settings.stage_dir.is_dir() and settings.server_id


def test_everything_set(tmp_path: Path):
    settings = Settings.from_env(
        {
            "DELTA_SYNC_BUCKET": "file:///bucket",
            "DELTA_SYNC_POLL_S": "2",
            "DELTA_SYNC_CACHE_POLICY": "reset",
            "DELTA_SYNC_ACK": "0",
            "DELTA_SYNC_STAGE_DIR": str(tmp_path),
            "DELTA_SYNC_SERVER_ID": "rollout-7",
            "DELTA_SYNC_MIN_VERSION_WAIT_S": "0.5",
            "DELTA_SYNC_VERIFY_FRAC": "0.25",
        }
    )
    assert settings == Settings("file:///bucket", 2.0, "reset", False, tmp_path, "rollout-7", 0.5, 0.25)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("DELTA_SYNC_BUCKET", "", "--worker-extension-cls"),
        ("DELTA_SYNC_BUCKET", "  ", "--worker-extension-cls"),
        ("DELTA_SYNC_POLL_S", "soon", "between 0.01 and 3600"),
        ("DELTA_SYNC_POLL_S", "nan", "between 0.01 and 3600"),
        ("DELTA_SYNC_POLL_S", "0", "between 0.01 and 3600"),
        ("DELTA_SYNC_MIN_VERSION_WAIT_S", "-1", "between 0.01 and 3600"),
        ("DELTA_SYNC_VERIFY_FRAC", "0", "between 0.01 and 1"),
        ("DELTA_SYNC_VERIFY_FRAC", "1.5", "between 0.01 and 1"),
        ("DELTA_SYNC_CACHE_POLICY", "drop", "forget, reset, keep"),
        ("DELTA_SYNC_ACK", "yes", "1, 0"),
        ("DELTA_SYNC_STAGE_DIR", "/no/such/folder", "create it"),
        ("DELTA_SYNC_STAGE_DIR", "/proc", "create it"),
        ("DELTA_SYNC_SERVER_ID", "../other", "letters, digits"),
        ("DELTA_SYNC_SERVER_ID", "x" * 200, "letters, digits"),
    ],
)
def test_what_cannot_work_is_named_with_a_remedy(name: str, value: str, remedy: str):
    with pytest.raises(SetupError) as error:
        Settings.from_env({"DELTA_SYNC_BUCKET": "/bucket", name: value})
    assert name in str(error.value) and remedy in str(error.value)


@pytest.mark.parametrize("bucket", ["ftp://host/run", "s3:///run", "hf://somewhere"])
def test_an_address_without_a_store_ends_the_start(bucket: str):
    with pytest.raises(SetupError, match=bucket):
        Settings.from_env({"DELTA_SYNC_BUCKET": bucket})
