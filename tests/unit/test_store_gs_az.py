# SPDX-License-Identifier: Apache-2.0
"""Buckets at Google and Azure: the real client against a loopback server of each."""

import uuid
from pathlib import Path

import azurite
import gcs_server
import pytest
from gcs_server import GcsServer
from store_contract import StoreContract

from delta_wire.errors import BucketNotFoundError, ObjectExistsError
from delta_wire.stores import object as object_module
from delta_wire.stores import open_store

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


class CloudContract(StoreContract):
    """Subclasses name the server and the scheme."""

    scheme = ""

    @pytest.fixture
    def server(self):
        raise NotImplementedError

    @pytest.fixture
    def store(self, server, monkeypatch):
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        self.server = server
        name = f"bucket-{uuid.uuid4().hex}"
        server.create_bucket(name)
        store = open_store(f"{self.scheme}://{name}/runs/1", create=True)
        yield store
        store.close()

    def vanish(self, store):
        store.delete([info.key for info in store.list("")])
        self.server.delete_bucket(store.url.split("/")[2])

    def bring_back(self, store):
        with pytest.raises(BucketNotFoundError, match=r"create it with the tools of the service"):
            store.ensure()
        self.server.create_bucket(store.url.split("/")[2])

    def test_large_objects_go_in_parts_and_replace_each_other(self, store, tmp_path, monkeypatch):
        monkeypatch.setattr(object_module, "_MULTIPART_FROM_BYTES", 1 << 20)
        monkeypatch.setattr(object_module, "_PART_BYTES", 5 << 20)
        source = tmp_path / "source"
        for content in (b"ab" * 6_000_000, b"c" * 5_500_000):
            source.write_bytes(content)
            store.put("anchors/model.safetensors", source)
            store.get_file("anchors/model.safetensors", tmp_path / "target", len(content))
            assert (tmp_path / "target").read_bytes() == content
        with pytest.raises(ObjectExistsError):
            store.put("anchors/model.safetensors", source, create_only=True)


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
