# SPDX-License-Identifier: Apache-2.0
"""The trackers that people use, each with what it has stored itself: delta sync's metrics are in TRL's lines."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from rank_trainers import STEPS, grpo
from stub_server import StubServer
from tracked import ENVIRONMENT, environment, stored
from yaml_training import copy_configs, train

OURS = {"train/delta/changed_frac", "train/delta/extract_s", "train/delta/version"}
# these once something is durable, which the first line need not know
LATER = {"train/delta/bytes", "train/delta/ratio", "train/delta/publish_s"}


def assert_in_trls_lines(steps: dict[str, list[int]], lines: list[int], own: str) -> None:
    """As many points as TRL has lines, at its steps; its own means have not been cut into more."""
    assert steps["train/loss"] == steps[own] == lines
    assert {name: steps.get(name) for name in OURS} == dict.fromkeys(OURS, lines)
    for name in LATER & set(steps):
        assert steps[name] == lines[-len(steps[name]) :]


@pytest.fixture(scope="module")
def tracked(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of all trackers that are installed, after a run from its file alone."""
    here = tmp_path_factory.mktemp("trackers")
    folder = copy_configs(here / "cpu", tiny_model("qwen3"))
    trackers = [tracker for tracker in ENVIRONMENT if find_spec(tracker)]
    file = folder / "sft.yaml"
    said = file.read_text()
    assert "report_to: none" in said
    file.write_text(said.replace("report_to: none", f"report_to: [{', '.join(trackers)}]"))
    told = {}
    for tracker in trackers:
        (here / tracker).mkdir()
        told |= environment(tracker, here / tracker)
    # in a process of its own: trackers read the environment when they are imported, which another test may have done
    train(folder, "sft", "--max_steps", "4", "--logging_steps", "2", environment=told)
    return here


@pytest.mark.parametrize("tracker", ENVIRONMENT)
def test_a_run_from_its_file_alone(tracked: Path, tracker: str):
    if not (tracked / tracker).is_dir():
        pytest.skip(f"{tracker} is not installed")
    assert_in_trls_lines(stored(tracker, tracked / tracker), [2, 4], "train/mean_token_accuracy")


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubServer]:
    server = StubServer(tmp_path / "bucket")
    yield server
    server.close()


def test_grpo_with_what_is_served(
    tiny_model: Callable[[str], Path], tmp_path: Path, stub: StubServer, monkeypatch: pytest.MonkeyPatch
):
    if not find_spec("tensorboard"):
        pytest.skip("tensorboard is not installed")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tracked"))
    model, folder = str(tiny_model("qwen3")), str(tmp_path)
    grpo(0, 1, model, folder, stub.url, "ddp", {}, report_to=["tensorboard"])
    steps = stored("tensorboard", tmp_path / "tracked")
    lines = list(range(1, STEPS + 1))
    assert_in_trls_lines(steps, lines, "train/reward")
    # generation has waited for the servers, so every line knows what they serve
    assert steps["train/delta/served_version"] == steps["train/delta/lag_versions"] == lines
