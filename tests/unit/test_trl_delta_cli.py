# SPDX-License-Identifier: Apache-2.0
"""The `trl-delta` command up to the point where it trains; tests/integration/test_trainers.py trains with it."""

from dataclasses import fields
from pathlib import Path

import pytest

from delta_wire.errors import SetupError
from trl_delta import DeltaSyncConfig, cli

ROOT = Path(__file__).parents[2]
BASE = "model_name_or_path: model\noutput_dir: out\nuse_cpu: true\nbf16: false\n"


@pytest.fixture
def parsed(monkeypatch, tmp_path):
    """What `main` of a TRL script would get: the settings of delta sync that a YAML file and options lead to."""
    monkeypatch.chdir(tmp_path)
    found: list = []

    def stop(command, config):
        found.append(config)
        raise SetupError("parsed")

    monkeypatch.setattr(cli, "_publishing", stop)

    def parse(yaml: str, *options: str, command: str = "sft") -> DeltaSyncConfig:
        Path("run.yaml").write_text(BASE + yaml)
        with pytest.raises(SetupError, match=r"^parsed$"):
            cli.train(command, ["--config", "run.yaml", *options])
        return found[-1]

    return parse


def refused(capsys, *arguments: str) -> str:
    assert cli.main(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_settings_come_from_the_file(parsed, command):
    config = parsed("delta_sync: /mnt/run\ndelta_sync_steps: 3\ndelta_sync_max_lag_versions: 1\n", command=command)
    assert (config.delta_sync_bucket, config.delta_sync_steps, config.delta_sync_max_lag_versions) == (
        "/mnt/run",
        3,
        1,
    )


def test_the_long_key_of_the_bucket_is_the_same(parsed):
    assert parsed("delta_sync_bucket: /mnt/run\n").delta_sync_bucket == "/mnt/run"


def test_options_win_over_the_file(parsed):
    config = parsed("delta_sync: a\n", "--delta_sync", "b", "--delta_sync_encoding", "context")
    assert (config.delta_sync_bucket, config.delta_sync_encoding) == ("b", "context")


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("", "delta_sync_bucket"),
        ("delta_sync: {bucket: a}\n", "delta_sync: expected the bucket's address"),
        ("delta_sync: a\ndelta_sync_bucket: b\n", "delta_sync: expected the bucket's address, given once"),
        ("delta_sync: a\ndelta_sync_steps: 0\n", "delta_sync_steps"),
        ("delta_sync: a\ndelta_sync_encoding: zip\n", "delta_sync_encoding"),
        ("delta_sync: a\ndelta_sync_on_failure: panic\n", "delta_sync_on_failure"),
        ("delta_sync: a\ndelta_sync_max_lag_versions: -1\n", "delta_sync_max_lag_versions"),
        ("delta_sync: a\ndelta_sync_lag_timeout_s: -1\n", "delta_sync_lag_timeout_s"),
        ("delta_sync: a\ndelta_sync_typo: 1\n", "delta_sync_typo"),
        ("delta_sync: [a\n", "run.yaml"),
    ],
)
def test_a_wrong_value_names_its_key(tmp_path, monkeypatch, capsys, yaml, said):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(BASE + yaml)
    assert said in refused(capsys, "sft", "--config", "run.yaml")


def test_an_unknown_command_is_refused_with_those_that_exist(capsys):
    assert "grpo, async_grpo, sft, dpo" in refused(capsys, "ppo")
    assert "grpo, async_grpo, sft, dpo" in refused(capsys, "")
    assert "grpo, async_grpo, sft, dpo" in refused(capsys)


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert f"{tmp_path / 'run.yaml'}: cannot read" in refused(capsys, "sft", "--config", str(tmp_path / "run.yaml"))


def test_help_lists_every_setting(capsys):
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(field.name in said for field in fields(DeltaSyncConfig))


@pytest.mark.parametrize("name", ["reward_that.does_not_exist", "json.no_such_function", "nodots"])
def test_a_reward_function_that_does_not_exist_is_refused_by_name(name):
    from trl_delta.async_grpo import _reward

    with pytest.raises(SetupError, match=f"reward_funcs: .*{name}"):
        _reward(name)


def test_a_reward_without_an_opinion():
    from trl_delta.rewards import none

    assert none(completions=["a", "b"], prompts=["?", "?"]) == [None, None]


def test_the_trainer_class_is_put_back(monkeypatch):
    import trl

    before = trl.SFTTrainer
    with cli._publishing("sft", DeltaSyncConfig(delta_sync_bucket="a")):
        assert trl.SFTTrainer is not before
        assert trl.SFTTrainer.__name__ == "SFTTrainer"
    assert trl.SFTTrainer is before
