# SPDX-License-Identifier: Apache-2.0
"""A server says that it is there when it has looked at its bucket, and not before."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_delta.health import HealthMiddleware


class Core:
    def __init__(self) -> None:
        self.looked = False
        self.asked = 0

    async def call_utility_async(self, method: str) -> dict[str, Any]:
        assert method == "delta_status"
        self.asked += 1
        return {"looked": self.looked, "bucket": "/bucket"}


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.get("/health")(lambda: None)
    app.get("/v1/models")(lambda: None)
    app.add_middleware(HealthMiddleware)
    app.state.engine_client = SimpleNamespace(engine_core=Core(), errored=False)
    return app


def test_not_before_the_first_look_and_from_then_on_without_asking(app: FastAPI):
    client, core = TestClient(app), app.state.engine_client.engine_core
    for _ in range(2):
        answer = client.get("/health")
        assert answer.status_code == 503 and "/bucket" in answer.json()["error"]
    assert client.get("/v1/models").status_code == 200
    core.looked = True
    assert [client.get("/health").status_code for _ in range(3)] == [200] * 3
    assert core.asked == 3


def test_a_dead_engine_is_not_asked(app: FastAPI):
    app.state.engine_client.errored = True
    assert TestClient(app).get("/health").status_code == 200 and app.state.engine_client.engine_core.asked == 0
