# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests share."""

from collections.abc import Iterator

import pytest
from vllm_server import WarmStart


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmStart]:
    """Starts servers within seconds."""
    start = WarmStart(tmp_path_factory.mktemp("warm"))
    yield start
    start.stop()
