# SPDX-License-Identifier: Apache-2.0
"""Buckets in an object store: the real client against a real S3 server, and against one that misbehaves."""

import logging
import re
import subprocess
import sys
import threading
import time
import uuid

import pytest
from bad_server import BadServer
from cloud_contract import CloudContract
from moto_bucket import MotoServer
from store_contract import CALLS, require_plain

from delta_wire.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    RateLimitedError,
    SetupError,
    StorePermissionError,
    StoreRefusedError,
    StoreUnavailableError,
)
from delta_wire.stores import object as object_module
from delta_wire.stores import open_store
from delta_wire.stores.patience import TIMEOUT_VARIABLE

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_SESSION_TOKEN", "AWS_PROFILE")


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    with MotoServer(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def s3_env(monkeypatch, moto):
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(s3_env, moto):
    name = f"bucket-{uuid.uuid4().hex}"
    moto.create_bucket(name)
    return f"s3://{name}/runs/1"


class TestS3(CloudContract):
    scheme = "s3"

    @pytest.fixture
    def server(self, s3_env, moto):
        return moto


def test_other_prefixes_of_one_bucket_are_other_buckets(url):
    one, other = open_store(url), open_store(url + "0")
    one.put("LATEST", b"1")
    assert other.list("") == [] and not other.exists("LATEST")
    assert open_store(url + "/").get("LATEST", 1) == b"1"


def test_a_second_process_sees_what_the_first_wrote(url, moto):
    open_store(url).put("LATEST", b"written here")
    code = f"from delta_wire.stores import open_store; print(open_store({url!r}).get('LATEST', 99))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "b'written here'\n", result.stderr


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(object_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"need the package obstore.*pip install '\.\[s3\]'"):
        open_store("gs://bucket/run")


@pytest.fixture
def bad(s3_env, monkeypatch):
    with BadServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDSECRET")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-key")
        yield server


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((500, "InternalError"), StoreUnavailableError, "answered 500"),
        ((503, "ServiceUnavailable"), StoreUnavailableError, "answered 503"),
        ((429, "TooManyRequests"), RateLimitedError, "answered 429.*poll more slowly"),
        ((403, "AccessDenied"), StorePermissionError, "answered 403.*AWS_ACCESS_KEY_ID.*Grant them"),
        ((401, "ExpiredToken"), StorePermissionError, "answered 401"),
        ((400, "AuthorizationHeaderMalformed"), StoreRefusedError, "answered 400.*region"),
        ("close", StoreUnavailableError, "cut short"),
    ],
)
def test_what_a_server_refuses_has_a_name(bad, tmp_path, caplog, call, answer, error, message):
    bad.answer = answer
    store = open_store("s3://bucket/run")
    store.patience.give_up_s = 0
    caplog.set_level(logging.DEBUG)
    with pytest.raises(error, match=message) as caught:
        CALLS[call](store, tmp_path / "target")
    assert "s3://bucket/run/" in str(caught.value)
    assert not re.search("AKIDSECRET|very-secret-key", str(caught.value) + caplog.text)
    assert list(tmp_path.iterdir()) == []
    require_plain(caught.value, error)


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_hangs_is_given_up(bad, tmp_path, monkeypatch, call):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.3")
    bad.answer = "hang"
    store = open_store("s3://bucket/run")
    store.patience.give_up_s = 0
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=r"no answer from S3 within 0\.3 s \(DELTA_STORE_TIMEOUT_S\)"):
        CALLS[call](store, tmp_path / "target")
    assert time.monotonic() - began_s < 30
    assert list(tmp_path.iterdir()) == []


def test_a_body_that_ends_early_leaves_no_file(bad, tmp_path):
    bad.answer = "truncate"
    store = open_store("s3://bucket/run")
    store.patience.give_up_s = 0
    for call in ("get", "get_file"):
        with pytest.raises(StoreUnavailableError, match="cut short"):
            CALLS[call](store, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_tries_are_bounded_and_a_passing_fault_is_not_seen(bad):
    store = open_store("s3://bucket/run")
    bad.answers = [(503, "ServiceUnavailable"), "close", (500, "InternalError"), (200, "")]
    assert store.get("k", 1000) == b"<Error><Code></Code></Error>"
    assert bad.num_requests == 4
    bad.answers = [(500, "InternalError")] * 100
    with pytest.raises(StoreUnavailableError):
        store.get("k", 1000)
    assert bad.num_requests == 8


def test_who_asks_too_often_waits_as_long_as_told_or_tells_the_caller(bad):
    store = open_store("s3://bucket/run")
    bad.answers = [(503, "SlowDown")]
    # longer than this store waits by itself
    store.patience.give_up_s = 4
    with pytest.raises(RateLimitedError, match="poll more slowly") as caught:
        store.get("k", 1000)
    assert caught.value.retry_after_s == 5 and bad.num_requests == 1


def test_closing_ends_a_pause(bad):
    bad.answer = (500, "InternalError")
    store = open_store("s3://bucket/run")
    store.patience.first_pause_s = 9
    store.patience.give_up_s = 1000
    failed = threading.Event()

    def read():
        with pytest.raises(StoreUnavailableError):
            store.get("k", 1)
        failed.set()

    thread = threading.Thread(target=read)
    began_s = time.monotonic()
    thread.start()
    assert bad.reached.wait(30)
    store.close()
    assert failed.wait(30)
    thread.join()
    assert time.monotonic() - began_s < 4.5, "half of the shortest pause"


def test_a_create_whose_answer_was_lost_is_recognised(bad, moto, monkeypatch):
    bad.forward_to = moto.url
    bucket = f"bucket-{uuid.uuid4().hex}"
    moto.create_bucket(bucket)
    store = open_store(f"s3://{bucket}/run", create=True)
    bad.lose_answers = 1
    store.put("versions/1.json", b"mine", create_only=True)
    assert store.get("versions/1.json", 10) == b"mine"
    # with the object of somebody else in its place it is refused
    open_store(f"s3://{bucket}/run").put("versions/2.json", b"of another")
    bad.lose_answers = 1
    with pytest.raises(ObjectExistsError):
        store.put("versions/2.json", b"mine", create_only=True)
    assert store.get("versions/2.json", 10) == b"of another"


def test_an_undecided_conditional_write_is_tried_again(bad):
    store = open_store("s3://bucket/run")
    bad.answers = [(409, "ConditionalRequestConflict"), (200, "")]
    store.put("k", b"1", create_only=True)
    assert bad.num_requests == 2


def test_a_server_that_ignores_conditions_is_found_out(bad):
    bad.answer = (200, "")
    store = open_store("s3://bucket/run")
    assert store.create_only
    store.ensure()
    assert store.create_only is False
    # it still refuses what exists already
    with pytest.raises(ObjectExistsError):
        store.put("k", b"1", create_only=True)


def test_a_poll_of_an_unchanged_object_moves_no_content(bad, moto):
    bad.forward_to = moto.url
    bucket = f"bucket-{uuid.uuid4().hex}"
    moto.create_bucket(bucket)
    store = open_store(f"s3://{bucket}/run")
    store.put("LATEST", b"x" * 1000)
    assert store.get("LATEST", 1000) == b"x" * 1000
    bad.body_bytes = 0
    for _ in range(3):
        assert store.get("LATEST", 1000) == b"x" * 1000
    assert bad.body_bytes == 0
    open_store(store.url).put("LATEST", b"y" * 999)
    assert store.get("LATEST", 1000) == b"y" * 999


def test_missing_credentials_are_no_outage(s3_env, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with BadServer() as metadata:
        metadata.answer = (404, "")
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", metadata.url)
        with pytest.raises(StorePermissionError, match=r"no credentials; set AWS_ACCESS_KEY_ID"):
            open_store("s3://bucket/run").get("k", 1)


@pytest.mark.parametrize(
    ("url", "env"),
    [
        ("gs://bucket/run", {"GOOGLE_SKIP_SIGNATURE": "true"}),
        ("az://container/run", {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_SKIP_SIGNATURE": "true"}),
    ],
)
def test_the_other_clients_are_set_up_from_their_environment(monkeypatch, url, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    store = open_store(url)
    assert store.url == url and store.create_only
    assert store._client().prefix == "run"


def test_a_client_that_cannot_be_set_up_says_what_it_needs(monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_USE_EMULATOR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SetupError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/run").get("k", 1)


def test_missing_and_empty_are_told_apart(url):
    store = open_store(url)
    store.put("empty", b"")
    assert store.get("empty", 0) == b"" and store.exists("empty")
    with pytest.raises(ObjectNotFoundError):
        store.get("missing", 0)
