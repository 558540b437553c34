# SPDX-License-Identifier: Apache-2.0
"""Stores on this machine: what every store must do, what is special about these, and how addresses are read."""

import errno
import os
from pathlib import Path

import pytest
from store_contract import StoreContract

from delta_wire.errors import (
    BucketNotFoundError,
    FormatError,
    SetupError,
    StorePermissionError,
    StoreRefusedError,
    StoreUnavailableError,
)
from delta_wire.stores import local as local_module
from delta_wire.stores import open_store
from delta_wire.stores.local import LocalStore
from delta_wire.stores.memory import MemoryStore


class TestLocal(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return open_store(tmp_path / "bucket", create=True)

    def vanish(self, store):
        import shutil

        shutil.rmtree(store.root)


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self):
        store = open_store("memory:contract", create=True)
        yield store
        store.drop()

    def vanish(self, store):
        store.drop()


def test_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b", "file:a%20b", "a b", "~/a b", tmp_path / "a b"):
        store = open_store(url)
        assert isinstance(store, LocalStore) and store.root == tmp_path / "a b"
    assert isinstance(open_store("memory:x"), MemoryStore)
    assert not (tmp_path / "a b").exists()
    open_store("a b", create=True)
    assert (tmp_path / "a b").is_dir()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "  ",
        "a\0b",
        "memory:",
        "memory:a/b",
        "file:",
        "file://host/share",
        "file:///x?y=1",
        "s3://",
        "s3://a",
        "s3:///bucket",
        "s3://bucket/../x",
        "gs://bucket//x",
        "az://bucket/.hidden",
        "S3://bucket",
        "hf://team/model",
        "hf://buckets/team",
        "hf://buckets/team/name/../x",
        "hf://buckets/team/.name",
        "HTTP://x",
    ],
)
def test_addresses_that_are_none(url):
    with pytest.raises(
        SetupError, match=r"address|memory bucket|expected (file|s3|gs|az|hf):|there are no buckets of kind"
    ):
        open_store(url)


@pytest.mark.parametrize(
    "url", ["s3://KEY:secret@bucket/x", "az://box/x?sig=secret", "hf://u:secret@b/x", "https://u:secret@h"]
)
def test_an_address_that_may_hold_a_secret_is_not_repeated(url):
    with pytest.raises(SetupError, match="credentials come from the environment") as caught:
        open_store(url)
    assert "secret" not in str(caught.value) and "KEY" not in str(caught.value)


def test_two_memory_stores_of_one_name_share():
    first, second = open_store("memory:shared", create=True), open_store("memory:shared")
    first.put("k", b"1")
    assert second.get("k", 1) == b"1"
    assert open_store("memory:unshared", create=True).list("") == []
    first.drop()


def test_temporary_files_are_invisible_and_do_not_stay(tmp_path):
    store = open_store(tmp_path, create=True)
    store.put("a/k", b"1")
    (tmp_path / "a" / ".tmp-1-2").write_bytes(b"left over by a crash")
    assert [info.key for info in store.list("")] == ["a/k"]
    with pytest.raises(FileNotFoundError):
        store.put("a/k2", tmp_path / "source that is missing")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".tmp-1-2", "k"]


def test_a_crash_before_the_rename_leaves_the_old_object(tmp_path, monkeypatch):
    store = open_store(tmp_path, create=True)
    store.put("LATEST", b"old")

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        store.put("LATEST", b"new")
    monkeypatch.undo()
    assert store.get("LATEST", 10) == b"old" and [info.key for info in store.list("")] == ["LATEST"]


def test_links_and_pipes_are_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    store = open_store(tmp_path / "bucket", create=True)
    (store.root / "link").symlink_to(secret / "key")
    (store.root / "folder").symlink_to(secret)
    os.mkfifo(store.root / "pipe")
    (store.root / "inner").mkdir()
    for key in ("link", "folder/key", "pipe", "inner"):
        with pytest.raises(FormatError, match=f"{key}: expected a regular file inside the bucket"):
            store.get(key, 100)
    with pytest.raises(FormatError, match="leads out of the bucket"):
        store.put("folder/new", b"")
    assert store.list("") == [] and not store.exists("link")
    assert [path.name for path in secret.iterdir()] == ["key"]


def test_a_bucket_reached_through_a_link_works(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = open_store(tmp_path / "link")
    store.put("a/b", b"1")
    assert store.get("a/b", 1) == b"1" and store.list("a/")[0].key == "a/b"


def test_a_file_in_place_of_the_bucket(tmp_path):
    (tmp_path / "file").write_text("x")
    store = open_store(tmp_path / "file")
    for call in (
        lambda: store.get("k", 1),
        lambda: store.put("k", b""),
        lambda: store.list(""),
        lambda: store.exists("k"),
    ):
        with pytest.raises(BucketNotFoundError, match="file: a file is where the bucket should be; name a folder"):
            call()
    with pytest.raises(SetupError, match="a file is where the bucket should be"):
        open_store(tmp_path / "file", create=True)
    with pytest.raises(SetupError, match="a part of the path is no folder"):
        open_store(tmp_path / "file" / "bucket", create=True)


def test_a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    with pytest.raises(BucketNotFoundError, match=r"symbolic link to .*not mounted, which does not exist"):
        open_store(tmp_path / "link").list("")
    with pytest.raises(SetupError, match="remove the link"):
        open_store(tmp_path / "link", create=True)


def test_what_killed_writers_left_is_swept_and_what_live_ones_write_is_not(tmp_path):
    store = open_store(tmp_path, create=True)
    store.put("a/k", b"1")
    left, fresh = tmp_path / "a" / ".tmp-1-old", tmp_path / "a" / ".tmp-2-new"
    for path in (left, fresh):
        path.write_bytes(b"half of an object")
    hidden = tmp_path / ".snapshots"
    hidden.mkdir()
    (hidden / ".tmp-3-old").write_bytes(b"not ours")
    for path in (left, hidden / ".tmp-3-old", tmp_path / "a" / "k"):
        os.utime(path, (0, 0))
    open_store(tmp_path)
    assert left.exists(), "readers remove nothing"
    open_store(tmp_path, create=True)
    assert not left.exists() and fresh.exists() and (hidden / ".tmp-3-old").exists()
    assert store.get("a/k", 1) == b"1"


def test_a_folder_that_goes_while_it_is_written_to_is_no_missing_object(tmp_path, monkeypatch):
    store = open_store(tmp_path, create=True)
    replace = os.replace

    def vanish(source, target):
        os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", vanish)
    with pytest.raises(StoreUnavailableError, match="its folder was removed meanwhile"):
        store.put("a/k", b"1")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "No space left"),
        (errno.EIO, "Input/output"),
        (errno.EDQUOT, ""),
    ],
)
def test_what_the_system_refuses_is_transient_and_says_why(tmp_path, monkeypatch, number, message):
    store = open_store(tmp_path, create=True)
    store.put("k", b"old")

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StoreUnavailableError, match=f"k: cannot write: .*{message}"):
            store.put("k", b"new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreUnavailableError, match=f"k: cannot read: .*{message}"):
            store.get("k", 10)
    assert store.get("k", 10) == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_refused_access_is_told_from_an_outage(tmp_path, monkeypatch, number):
    store = open_store(tmp_path, create=True)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorePermissionError, match=rf"k: cannot write: .*give the user {os.getuid()} of this process"):
        store.put("k", b"new")
    assert list(tmp_path.iterdir()) == []


def test_names_too_long_for_the_file_system_are_refused_for_good(tmp_path, monkeypatch):
    store = open_store(tmp_path, create=True)

    def refuse(*_):
        raise OSError(errno.ENAMETOOLONG, "File name too long")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreRefusedError, match="names this long"):
        store.put("k", b"new")


def test_no_hard_links_is_a_matter_of_setup(tmp_path, monkeypatch):
    store = open_store(tmp_path, create=True)

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(SetupError, match="no hard links"):
        store.put("k", b"", create_only=True)
    assert list(tmp_path.iterdir()) == []


def test_data_is_synced_before_it_is_named(tmp_path, monkeypatch):
    store = open_store(tmp_path, create=True)
    events = []
    real = {"fsync": os.fsync, "replace": os.replace, "link": os.link}
    for name in ("fsync", "replace", "link"):
        monkeypatch.setattr(os, name, lambda *args, name=name: (events.append(name), real[name](*args))[1])
    monkeypatch.setattr(local_module, "sync_folder", lambda path: events.append(f"folder {Path(path).name}"))
    store.put("v/k", b"1")
    store.put("v/k2", b"1", create_only=True)
    root = tmp_path.name
    assert events == [f"folder {root}", "fsync", "replace", "folder v", "fsync", "link", "folder v"]
