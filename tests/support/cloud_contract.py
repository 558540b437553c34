# SPDX-License-Identifier: Apache-2.0
"""What a store in a cloud's object service must do beyond the contract of all stores."""

import uuid

import pytest
from store_contract import StoreContract

from delta_wire.errors import BucketNotFoundError, ObjectExistsError
from delta_wire.stores import object as object_module
from delta_wire.stores import open_store


class CloudContract(StoreContract):
    """Subclasses name the scheme and the server, which has `env`, `create_bucket` and `delete_bucket`."""

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
        # S3 takes parts of 5 MiB and more
        monkeypatch.setattr(object_module, "_MULTIPART_FROM_BYTES", 1 << 20)
        monkeypatch.setattr(object_module, "_PART_BYTES", 5 << 20)
        source = tmp_path / "source"
        for content in (b"ab" * 6_000_000, b"c" * 5_500_000):
            source.write_bytes(content)
            store.put("anchors/model.safetensors", source)
            store.get_file("anchors/model.safetensors", tmp_path / "target", len(content))
            assert (tmp_path / "target").read_bytes() == content
        # create-only writes are single requests whatever their size
        with pytest.raises(ObjectExistsError):
            store.put("anchors/model.safetensors", source, create_only=True)
