# SPDX-License-Identifier: Apache-2.0
"""Buckets on a hub: the real client against a hub on this machine that misbehaves on command."""

import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from hub_server import HubServer
from hub_state import READ_TOKEN, WRITE_TOKEN
from store_contract import CALLS, StoreContract, require_plain

from delta_wire.errors import (
    BucketNotFoundError,
    RateLimitedError,
    SetupError,
    StorePermissionError,
    StoreRefusedError,
    StoreUnavailableError,
)
from delta_wire.stores import hf as hf_module
from delta_wire.stores import hf_client, open_store
from delta_wire.stores.patience import TIMEOUT_VARIABLE

URL = "hf://buckets/team/weights/runs/1"
# of the stores that are to give up
SHORT_S = 1.0


@pytest.fixture(scope="module")
def server():
    with HubServer() as hub:
        yield hub


@pytest.fixture
def hub(server, monkeypatch):
    from huggingface_hub import constants

    for name, value in {**server.env, TIMEOUT_VARIABLE: "60", "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    # the client has read its address when it was imported
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server.heal()
    server.buckets.clear()
    server.requests.clear()
    server.body_bytes = 0
    server.feed = True
    return server


@pytest.fixture
def store(hub):
    store = open_store(URL, create=True)
    # faults are seen at the first try
    store.patience.give_up_s = 0
    yield store
    store.close()


@pytest.fixture
def impatient(store, monkeypatch):
    """The same bucket, waited for only shortly."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, str(SHORT_S))
    store = open_store(URL)
    store.patience.give_up_s = 0
    yield store
    store.close()


class TestHub(StoreContract):
    create_only = False

    @pytest.fixture
    def store(self, hub):
        store = open_store(URL, create=True)
        yield store
        store.close()

    @pytest.fixture(autouse=True)
    def _hub(self, hub):
        self.hub = hub

    def vanish(self, store):
        self.hub.buckets.clear()


def test_a_bucket_is_made_private_and_only_once(hub):
    open_store(URL, create=True)
    open_store(URL, create=True)
    assert list(hub.buckets) == ["team/weights"]
    assert hub.buckets["team/weights"].visibility == "private"


def test_other_prefixes_of_one_bucket_are_other_buckets(store):
    other = open_store(URL + "0")
    store.put("LATEST", b"1")
    assert other.list("") == [] and not other.exists("LATEST")
    assert open_store("hf://buckets/team/weights").list("runs/")[0].key == "runs/1/LATEST"


def test_a_poll_is_one_small_request(hub, store):
    store.put("LATEST", b"x" * 1000)
    assert store.get("LATEST", 1000) == b"x" * 1000
    hub.requests.clear()
    hub.body_bytes = 0
    for _ in range(5):
        assert store.get("LATEST", 1000) == b"x" * 1000
    assert hub.requests == Counter({"HEAD /buckets/team/weights/resolve/runs/1/LATEST": 5}) and hub.body_bytes == 0


def test_the_token_is_shown_to_the_hub_only_and_nothing_secret_is_logged(hub, store, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    # whoever asks for a trace of what goes over the wire gets it
    caplog.set_level(logging.INFO, "httpcore2")
    store.put("k", b"12345")
    # the hub's storage refuses a request that carries the hub's token
    assert store.get("k", 10) == b"12345"
    store.get_file("k", tmp_path / "k", 10)
    assert not re.search(f"secret-of-the-link|{WRITE_TOKEN}", caplog.text)
    assert WRITE_TOKEN not in store.url


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ({"status": 500}, StoreUnavailableError, "answered 500; try again later"),
        ({"status": 503, "headers": {"Retry-After": "7"}}, StoreUnavailableError, "answered 503"),
        ({"status": 429, "headers": {"Retry-After": "77"}}, RateLimitedError, "answered 429.*poll more slowly"),
        ({"status": 403}, StorePermissionError, "answered 403; give HF_TOKEN a token that may"),
        ({"status": 401}, StorePermissionError, "answered 401"),
        ({"status": 400}, StoreRefusedError, "answered 400; check"),
        ({"close": True}, StoreUnavailableError, "cut short"),
    ],
)
def test_what_the_hub_refuses_has_a_name(hub, store, tmp_path, caplog, call, fault, error, message):
    store.put("k", b"old")
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, "httpcore2")
    # whatever of the hub itself is asked
    hub.fault(r" /(api/)?buckets/", times=1000, **fault)
    began_s = time.monotonic()
    with pytest.raises(error, match=message) as caught:
        CALLS[call](store, tmp_path / "target")
    assert time.monotonic() - began_s < 30, "a limit of 77 s is told, not slept over"
    assert URL + "/" in str(caught.value)
    assert not re.search(f"secret-of-the-link|{WRITE_TOKEN}", str(caught.value) + caplog.text)
    assert list(tmp_path.iterdir()) == []
    again = require_plain(caught.value, error)
    if isinstance(caught.value, RateLimitedError) and call not in ("put",):
        assert caught.value.retry_after_s == again.retry_after_s == 77
    hub.heal()
    assert store.get("k", 10) == b"old" and [info.key for info in store.list("")] == ["k"]


@pytest.mark.parametrize("call", CALLS)
def test_a_hub_that_hangs_is_given_up(hub, store, impatient, tmp_path, call):
    store.put("k", b"old")
    hub.fault(r" /(api/)?buckets/", times=1000, hang=True)
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=rf"within 1 s \({TIMEOUT_VARIABLE}\)|in time"):
        CALLS[call](impatient, tmp_path / "target")
    assert time.monotonic() - began_s < 60
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("request_", ["xet-write-token", "POST /v1/xorbs", "POST /v1/shards", "POST .*/batch"])
@pytest.mark.parametrize("fault", ["status", "hang", "close", "lose", "truncate"])
def test_an_upload_that_fails_anywhere_leaves_the_old_object_or_the_new_one(hub, store, impatient, request_, fault):
    store.put("k", b"old")
    content = os.urandom(2000)
    hub.fault(request_, times=10, **{fault: 500 if fault == "status" else True})
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="k: cannot write"):
        (impatient if fault == "hang" else store).put("k", content)
    assert time.monotonic() - began_s < 60
    hub.heal()
    applied = request_ == "POST .*/batch" and fault in ("lose", "truncate")
    assert store.get("k", 2000) == (content if applied else b"old")
    store.put("k", content)
    assert store.get("k", 2000) == content


def test_an_upload_that_begins_only_after_its_limit_ends_all_the_same(hub, store, monkeypatch):
    # on a machine that was busy; the client itself would wait for this answer for ever
    monkeypatch.setattr(hf_client, "_ABORT_AGAIN_S", 0.3)
    hub.fault("POST /v1/shards", times=1000, hang=True)
    client = hf_client.Client(1.0)
    with client.guarded() as api, pytest.raises(RuntimeError, match="cancelled"), client.upload(0.1):
        time.sleep(0.3)
        api.batch_bucket_files("team/weights", add=[(os.urandom(2000), "runs/1/k")])
    hub.heal()
    store.put("k", b"after")
    assert store.get("k", 5) == b"after"


@pytest.mark.parametrize("fault", ["status", "hang", "close", "truncate"])
def test_content_that_does_not_arrive_leaves_no_file(hub, store, impatient, tmp_path, fault):
    content = os.urandom(300_000)
    store.put("k", content)
    hub.fault("GET /content/", times=2, **{fault: 503 if fault == "status" else True})
    reader = impatient if fault == "hang" else store
    for read in (lambda: reader.get("k", 300_000), lambda: reader.get_file("k", tmp_path / "target", 300_000)):
        with pytest.raises(StoreUnavailableError, match=r"cut short|answered 503|no answer"):
            read()
    assert list(tmp_path.iterdir()) == []
    assert store.get("k", 300_000) == content


def test_a_batch_that_fails_in_part_is_told(hub, store):
    hub.fault("POST .*/batch", partial="1/k")
    with pytest.raises(StoreUnavailableError, match=r"could not apply it \('runs/1/k': 'could not be stored'\)"):
        store.put("k", b"1")
    assert not store.exists("k")
    store.put("a", b"1")
    store.put("b", b"1")
    hub.fault("POST .*/batch", partial="1/b")
    with pytest.raises(StoreUnavailableError, match="runs/1/b"):
        store.delete(["a", "b", "never/was"])
    assert [info.key for info in store.list("")] == ["b"]


def test_a_stale_listing_is_only_a_listing(hub, store):
    store.put("a", b"1")
    store.put("b", b"1")
    hub.fault("GET .*/tree", stale=True)
    assert [info.key for info in store.list("")] == ["a"]
    assert store.exists("b") and store.get("b", 1) == b"1"


def test_long_listings_come_in_pages(hub, store):
    store.put("v/0", b"1")
    files = hub.buckets["team/weights"].files
    for number in range(2500):
        files[f"runs/1/v/{number:05d}"] = files["runs/1/v/0"]
    assert len(store.list("v/")) == 2501
    assert hub.counted("GET .*/tree") >= 3


def test_tries_are_bounded_and_a_passing_fault_is_not_seen(hub, store):
    store.put("k", b"1")
    store.patience.give_up_s = 10
    hub.requests.clear()
    hub.fault("HEAD ", times=3, status=500)
    assert store.get("k", 1) == b"1" and hub.counted("HEAD") == 4
    hub.fault("HEAD ", times=1000, close=True)
    with pytest.raises(StoreUnavailableError):
        store.get("k", 1)
    assert hub.counted("HEAD") == 8


def test_closing_ends_a_pause(hub, store):
    store.put("k", b"1")
    store.patience.first_pause_s = 60
    store.patience.give_up_s = 1000
    hub.fault("HEAD ", times=1000, status=500)
    failed = threading.Event()

    def read():
        with pytest.raises(StoreUnavailableError):
            store.get("k", 1)
        failed.set()

    thread = threading.Thread(target=read)
    hub.requests.clear()
    thread.start()
    while not hub.counted("HEAD"):
        time.sleep(0.01)
    store.close()
    assert failed.wait(20), "the pause of 60 s was not cut short"
    thread.join()


def test_a_reader_s_token_reads_and_is_told_that_it_cannot_write(hub, store, monkeypatch):
    store.put("k", b"1")
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    reader = open_store(URL)
    assert reader.get("k", 1) == b"1"
    with pytest.raises(StorePermissionError, match=r"answered 403.*on the trainer write it"):
        reader.put("k", b"2")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(StorePermissionError, match="answered 401"):
        reader.get("k", 1)


def test_offline_mode_is_a_matter_of_setup(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SetupError, match="HF_HUB_OFFLINE is set"):
        open_store(URL).get("k", 1)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(hf_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"need the packages huggingface_hub and hf-xet.*\[hf\]"):
        open_store(URL)


def test_notes_of_the_uploader_do_not_pile_up(hub, store, monkeypatch):
    monkeypatch.setattr(hf_client, "_PRUNE_EVERY", 4)
    monkeypatch.setattr(hf_client, "_KEEP_SHARDS", 3)
    for number in range(8):
        store.put("k", os.urandom(100 + number))
    assert hf_client._scratch is not None
    assert 1 <= len(list(hf_client._scratch.rglob("*.mdb"))) <= 3
    content = os.urandom(1000)
    store.put("k", content)
    assert store.get("k", 1000) == content


def test_the_uploader_s_folder_goes_with_the_process(hub, tmp_path):
    open_store(URL, create=True)
    code = f"""if True:
        from delta_wire.stores import open_store, hf_client
        store = open_store({URL!r}); store.put("LATEST", b"by another process"); print(hf_client._scratch)"""
    env = {**os.environ, **hub.env, "TMPDIR": str(tmp_path)}
    env.pop("HF_XET_CACHE", None)
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith(str(tmp_path)) and result.stderr == "", result.stderr
    assert list(tmp_path.iterdir()) == []
    assert open_store(URL).get("LATEST", 99) == b"by another process"


def test_other_users_of_the_client_do_not_see_our_limits(hub, store, impatient):
    from huggingface_hub import HfApi

    hub.fault("GET /api/buckets/team/weights", times=2, delay_s=2 * SHORT_S)
    with pytest.raises(StoreUnavailableError, match="no answer"):
        impatient.list("")
    assert HfApi().bucket_info("team/weights").id == "team/weights"
    assert hub.counted("GET /api/buckets/team/weights") == 3


def test_changes_are_hinted_at(hub, store):
    seen = threading.Semaphore(0)
    stop = store.watch("LATEST", seen.release)
    assert seen.acquire(timeout=30), "the beginning of the feed is a hint, too"
    store.put("LATEST", b"1")
    assert seen.acquire(timeout=30)
    open_store(URL + "0").put("LATEST", b"of another bucket")
    store.put("acks/server.json", b"another object")
    store.put("LATEST", b"2")
    assert seen.acquire(timeout=30)
    stop()
    assert not seen.acquire(blocking=False), "other objects are none of its business"


def test_a_hub_without_a_feed_is_asked_once(hub, store):
    hub.feed = False
    stop = store.watch("", lambda: pytest.fail("there is nothing to tell"))
    while not hub.counted("/events"):
        time.sleep(0.01)
    threads = [thread for thread in threading.enumerate() if thread.name == "delta-hub-feed"]
    for thread in threads:
        thread.join(30)
    assert hub.counted("/events") == 1
    stop()


def test_a_bucket_that_is_not_there_is_named_with_what_to_do(hub):
    with pytest.raises(
        BucketNotFoundError, match=r"shows no bucket 'team/other' to this token; check the name, log in"
    ):
        open_store("hf://buckets/team/other").get("LATEST", 1)
