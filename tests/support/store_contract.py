# SPDX-License-Identifier: Apache-2.0
"""What every store must do, whatever keeps its objects."""

import os
import pickle
import threading
from typing import Any

import pytest

from delta_wire.errors import (
    BucketNotFoundError,
    FormatError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from delta_wire.stores import Store

BAD_KEYS = [
    "", "/", "/etc/passwd", "a/", "a//b", "..", "../x", "a/../b", "a/..", "./a", "a/./b", ".hidden", "a/.tmp-1",
    "a\\b", "a b", "a\0b", "a\n", "ä", "C:/x", "~/x", "x" * 513, "a/" + "x" * 201, "*", "a?b",
]  # fmt: skip
# every call of a store, with a folder for what it reads
CALLS = {
    "get": lambda store, path: store.get("k", 10),
    "get_file": lambda store, path: store.get_file("k", path, 10),
    "put": lambda store, path: store.put("k", b"new"),
    "create": lambda store, path: store.put("k2", b"new", create_only=True),
    "list": lambda store, path: store.list("a/"),
    "delete": lambda store, path: store.delete(["k"]),
    "exists": lambda store, path: store.exists("k"),
}


def require_plain(caught: Exception, kind: type[Exception]) -> Any:
    """An error is of exactly this kind, carries nothing of the client's own, and survives the way to another process;
    returns it as it arrives there."""
    assert type(caught) is kind
    assert caught.__cause__ is None and caught.__suppress_context__
    again = pickle.loads(pickle.dumps(caught))
    assert type(again) is kind and str(again) == str(caught)
    return again


class StoreContract:
    """Subclasses make an empty existing bucket, take it away and bring it back."""

    create_only = True

    @pytest.fixture
    def store(self, tmp_path) -> Store:
        raise NotImplementedError

    def vanish(self, store: Store) -> None:
        raise NotImplementedError

    def bring_back(self, store: Store) -> None:
        store.ensure()

    def test_put_get_list_delete(self, store):
        assert store.list("") == []
        store.put("LATEST", b"one")
        store.put("versions/000000000010.json", b"ten")
        store.put("versions/000000000009.json", b"")
        assert store.get("LATEST", 3) == b"one" and store.get("versions/000000000009.json", 0) == b""
        assert [(info.key, info.size_bytes) for info in store.list("")] == [
            ("LATEST", 3),
            ("versions/000000000009.json", 0),
            ("versions/000000000010.json", 3),
        ]
        assert store.exists("LATEST") and not store.exists("versions") and not store.exists("nothing/there")
        store.delete(["LATEST", "versions/000000000010.json", "never/was"])
        assert [info.key for info in store.list("")] == ["versions/000000000009.json"]
        store.delete([])
        store.put("acks/a+b@c=d.json", b"other letters")
        assert store.get("acks/a+b@c=d.json", 100) == b"other letters" and store.exists("acks/a+b@c=d.json")
        assert [info.key for info in store.list("acks/")] == ["acks/a+b@c=d.json"]

    def test_put_replaces_whole_objects(self, store):
        store.put("k", b"a long first content")
        assert store.get("k", 100) == b"a long first content"
        store.put("k", b"short")
        assert store.get("k", 100) == store.get("k", 5) == b"short"
        store.delete(["k"])
        with pytest.raises(ObjectNotFoundError):
            store.get("k", 100)

    def test_put_and_get_files(self, store, tmp_path):
        source = tmp_path / "source"
        content = os.urandom(3_000_000)
        source.write_bytes(content)
        store.put("deltas/x.bin", source)
        target = tmp_path / "target"
        target.write_bytes(b"old")
        store.get_file("deltas/x.bin", target, len(content))
        assert target.read_bytes() == content
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["source", "target"]

    def test_prefixes_are_prefixes_of_keys(self, store):
        for key in ("a/1", "a/10", "a/2/x", "ab", "b"):
            store.put(key, b"")
        assert [info.key for info in store.list("a/1")] == ["a/1", "a/10"]
        assert [info.key for info in store.list("a/")] == ["a/1", "a/10", "a/2/x"]
        assert [info.key for info in store.list("a")] == ["a/1", "a/10", "a/2/x", "ab"]
        assert store.list("c/") == [] and store.list("a/1/") == [] and store.list("../") == []

    def test_create_only(self, store):
        assert store.create_only is self.create_only
        store.put("k", b"first", create_only=True)
        with pytest.raises(ObjectExistsError, match="k: the object exists already"):
            store.put("k", b"second", create_only=True)
        assert store.get("k", 100) == b"first"

    def test_create_only_has_one_winner(self, store):
        if not self.create_only:
            pytest.skip("this kind of store has no conditional writes and says so")
        barrier = threading.Barrier(8)
        won = []

        def race(number: int) -> None:
            barrier.wait()
            try:
                store.put("versions/1.json", f"writer {number}".encode(), create_only=True)
            except ObjectExistsError:
                return
            won.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get("versions/1.json", 100) == f"writer {won[0]}".encode()
        assert [info.key for info in store.list("")] == ["versions/1.json"]

    def test_readers_see_one_whole_object_or_another(self, store):
        contents = [bytes([number]) * 100_000 for number in range(2)]
        store.put("LATEST", contents[0])
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                number ^= 1
                store.put("LATEST", contents[number])

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(100):
                assert store.get("LATEST", 100_000) in contents
        finally:
            stop.set()
            writer.join()

    def test_missing_objects(self, store, tmp_path):
        with pytest.raises(ObjectNotFoundError, match=r"versions/5\.json"):
            store.get("versions/5.json", 10)
        with pytest.raises(ObjectNotFoundError, match="x/y"):
            store.get_file("x/y", tmp_path / "target", 10)
        assert not (tmp_path / "target").exists()

    def test_too_large_objects_are_not_read(self, store, tmp_path):
        store.put("k", b"12345")
        assert store.get("k", 5) == b"12345"
        with pytest.raises(FormatError, match="k: expected at most 4 bytes, found 5"):
            store.get("k", 4)
        with pytest.raises(FormatError, match="k: expected at most 4 bytes, found 5"):
            store.get_file("k", tmp_path / "target", 4)
        assert not (tmp_path / "target").exists()

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys(self, store, tmp_path, key):
        for call in (
            lambda: store.get(key, 1),
            lambda: store.get_file(key, tmp_path / "t", 1),
            lambda: store.put(key, b""),
            lambda: store.put(key, b"", create_only=True),
            lambda: store.delete([key]),
            lambda: store.exists(key),
        ):
            with pytest.raises(FormatError, match="is no object key"):
                call()
        assert store.list("") == []

    def test_a_vanished_bucket_is_named_and_not_made_again(self, store, tmp_path):
        store.put("k", b"1")
        self.vanish(store)
        for call in (
            lambda: store.get("k", 1),
            lambda: store.get("a/k", 1),
            lambda: store.get_file("k", tmp_path / "t", 1),
            lambda: store.put("k", b""),
            lambda: store.put("a/b/k", b"", create_only=True),
            lambda: store.list(""),
            lambda: store.list("a/"),
            lambda: store.delete(["k"]),
            lambda: store.exists("k"),
        ):
            with pytest.raises(BucketNotFoundError) as caught:
                call()
            assert store.url in str(caught.value)
        self.bring_back(store)
        store.ensure()
        store.ensure()
        assert store.list("") == []
        store.close()

    def test_staging_that_cannot_be_written_is_not_the_buckets_fault(self, store, tmp_path):
        store.put("k", b"1")
        with pytest.raises(StoreUnavailableError, match=r"gone: cannot write the downloaded file"):
            store.get_file("k", tmp_path / "gone" / "t", 1)
