# SPDX-License-Identifier: Apache-2.0
"""Settings: help for each, clear refusals, and the YAML files."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from delta_wire.errors import SetupError
from trl_delta import DeltaSyncConfig

ROOT = Path(__file__).parents[2]


def test_every_field_has_help_a_prefix_and_a_line_in_the_docstring():
    documentation = inspect.getdoc(DeltaSyncConfig)
    for field in dataclasses.fields(DeltaSyncConfig):
        assert field.name.startswith("delta_sync_")
        assert len(field.metadata["help"]) > 20
        assert f"{field.name} (`" in documentation


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("delta_sync_on_failure", "ignore"),
        ("delta_sync_encoding", "zip"),
        ("delta_sync_snapshot", "gpu"),
        ("delta_sync_steps", 0),
        ("delta_sync_expected_servers", 0),
        ("delta_sync_close_timeout_s", -1.0),
        ("delta_sync_start_timeout_s", float("nan")),
        ("delta_sync_server_timeout_s", -0.1),
        ("delta_sync_ack_poll_s", 0.0),
    ],
)
def test_bad_values_are_refused_with_field_and_value(name, value):
    with pytest.raises(SetupError, match=name) as refused:
        DeltaSyncConfig(**{name: value})
    assert str(value) in str(refused.value)


def test_a_feature_switched_on_without_its_bucket_is_refused():
    with pytest.raises(SetupError, match="has no bucket"):
        DeltaSyncConfig().require_bucket(None)
    with pytest.raises(SetupError, match="has no bucket"):
        DeltaSyncConfig(delta_sync_bucket="").require_bucket("")


def test_the_bucket_may_come_from_either_side_but_not_from_two():
    assert DeltaSyncConfig(delta_sync_bucket="a").require_bucket(None) == "a"
    assert DeltaSyncConfig().require_bucket("b") == "b"
    assert DeltaSyncConfig(delta_sync_bucket="a").require_bucket("a") == "a"
    with pytest.raises(SetupError, match="two buckets"):
        DeltaSyncConfig(delta_sync_bucket="a").require_bucket("b")


def parse(tmp_path: Path, *extra: str):
    from trl import TrlParser
    from trl.experimental.async_grpo import AsyncGRPOConfig

    parser = TrlParser((AsyncGRPOConfig, DeltaSyncConfig))  # pyright: ignore[reportArgumentType]
    # a test machine has no GPU; the command line wins over the file
    on_cpu = ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path)]
    return parser.parse_args_and_config(["--config", str(ROOT / "configs" / "async_grpo.yaml"), *on_cpu, *extra])


def test_the_yaml_is_parsed_into_both_configs(tmp_path):
    args, delta_sync = parse(tmp_path)
    assert args.max_staleness == 4
    assert args.learning_rate == 1e-6
    assert delta_sync.delta_sync_bucket == "/mnt/shared/run-1"
    assert delta_sync.delta_sync_steps == 1


def test_the_command_line_wins_over_the_yaml(tmp_path):
    _, delta_sync = parse(tmp_path, "--delta_sync_steps", "5", "--delta_sync_bucket", "other")
    assert delta_sync.delta_sync_steps == 5
    assert delta_sync.delta_sync_bucket == "other"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("delta_sync_close_timeout_s", float("inf")),
        ("delta_sync_start_timeout_s", 1e10),
        ("delta_sync_server_timeout_s", float("nan")),
        ("delta_sync_ack_poll_s", float("inf")),
        ("delta_sync_ack_poll_s", "1"),
        ("delta_sync_steps", 1.5),
        ("delta_sync_steps", float("nan")),
        ("delta_sync_expected_servers", "2"),
    ],
)
def test_values_that_would_fail_later_are_refused_by_name(name: str, value: object):
    with pytest.raises(SetupError, match=name):
        DeltaSyncConfig(**{name: value})


def test_an_empty_variable_means_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DELTA_SYNC_ENCODING", "")
    assert DeltaSyncConfig().delta_sync_encoding == "packed"
