# SPDX-License-Identifier: Apache-2.0
"""What all tests share. Plain helper modules lie in tests/support, which pytest puts on the path."""

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# a shell lets what it starts in the background ignore interrupts, and so would every process of these tests
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that makes (once) a tiny model of a kind and returns its folder."""
    spec = importlib.util.spec_from_file_location("prepare_model", ROOT / "examples" / "prepare_model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("models")
    return lambda kind: module.make_tiny(kind, folder / kind)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test begins first, so that several workers end at about the same time."""
    items.sort(key=lambda item: item.path.name != "test_states.py")
