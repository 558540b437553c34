# SPDX-License-Identifier: Apache-2.0
"""Buckets at Google and Azure: the real client against a loopback server of each."""

from pathlib import Path

import azurite
import gcs_server
import pytest
from cloud_contract import CloudContract
from gcs_server import GcsServer

CACHE = Path(__file__).parents[2] / ".cache"


@pytest.fixture(scope="session")
def gcs():
    with GcsServer() as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory):
    program = azurite.install(CACHE)
    if program is None:
        pytest.skip("npm, or a registry that it reaches, is not there to install the emulator")
    with azurite.Azurite(program, tmp_path_factory.mktemp("azurite")) as server:
        yield server


class TestGoogle(CloudContract):
    scheme = "gs"

    @pytest.fixture
    def server(self, gcs):
        return gcs

    def test_more_objects_than_a_page_of_a_listing(self, store, monkeypatch):
        monkeypatch.setattr(gcs_server, "PAGE", 2)
        keys = [f"deltas/{number}" for number in range(5)]
        for key in keys:
            store.put(key, b"x")
        assert [info.key for info in store.list("deltas/")] == keys


class TestAzure(CloudContract):
    scheme = "az"

    @pytest.fixture
    def server(self, azure):
        return azure
