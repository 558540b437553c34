# SPDX-License-Identifier: Apache-2.0
"""Versions in HTTP headers, requests that demand one, metrics, and weights that something else has written."""

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from training import Training
from vllm_server import Server, serve

pytestmark = pytest.mark.e2e

EXTENSION = "--worker-extension-cls=vllm_delta.DeltaWorkerExtension"
WAIT_S = 1.0


@pytest.fixture(scope="module")
def followed(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Training]]:
    """Two API server processes in front of one engine, on version 0; with vLLM's routes for other ways to update."""
    folder = tmp_path_factory.mktemp("versions")
    training = Training(tiny_model("qwen3"), folder / "bucket")
    training.start()
    env = {
        "DELTA_SYNC_BUCKET": str(training.bucket),
        "DELTA_SYNC_POLL_S": "0.1",
        "DELTA_SYNC_MIN_VERSION_WAIT_S": str(WAIT_S),
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with serve(training.base, folder / "server.log", EXTENSION, "--api-server-count=2", env=env) as server:
        server.wait(lambda s: s["state"] == "serving", "version 0")
        yield server, training


def ask(server: Server, minimum: str | None = None, **options: Any) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of a completion."""
    body = {"model": server.model, "prompt": "The answer is", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"} | ({} if minimum is None else {"X-Min-Weight-Version": minimum})
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body | options).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            raw = response.read()
            return 200, dict(response.headers), raw if options.get("stream") else json.loads(raw)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.loads(error.read())


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_what_plans_stays_off_the_core_that_computes(followed: tuple[Server, Training]):
    server, _ = followed
    (pid,) = set(re.findall(r"\(Worker\S* pid=(\d+)\)", server.log.read_text()))
    worker = psutil.Process(int(pid))
    computes = set(worker.cpu_affinity())
    threads = [os.sched_getaffinity(thread.id) for thread in worker.threads()]
    assert computes < set(range(os.cpu_count() or 1))
    assert any(not cores & computes for cores in threads)


def test_answers_name_their_version_and_requests_demand_one(followed: tuple[Server, Training]):
    server, training = followed
    first = server.status()["version"]
    # more often than there are API servers
    for _ in range(4):
        status, headers, _ = ask(server)
        assert status == 200 and headers["x-weight-version"] == first
    _, headers, events = ask(server, stream=True)
    assert headers["x-weight-version"] == first and b"[DONE]" in events

    began_s = time.monotonic()
    refused = [ask(server, minimum) for minimum in ("1", first[:-1] + "1")]
    assert time.monotonic() - began_s >= 2 * WAIT_S
    for status, headers, body in refused:
        assert status == 409 and headers["retry-after"] == "1" and headers["x-weight-version"] == first
        assert body["served"] == first and body["required"] in body["error"]["message"]
        assert first in body["error"]["message"]
    assert ask(server, "otherrun-1-0")[0] == 409
    assert ask(server, "soon")[0] == 400
    assert ask(server, "0")[0] == ask(server, first)[0] == 200

    # these wait on both API servers, where need be once more, and are answered by what they waited for
    def ask_again() -> tuple[int, dict[str, str], Any]:
        for _ in range(20):
            if (answer := ask(server, "1"))[0] != 409:
                break
        return answer

    waited = threading.Event()

    def renewed() -> list[dict[str, str]]:
        """Headers of long requests, one after the other until the version has come."""
        found = []
        while not waited.is_set():
            found.append(ask(server, max_tokens=400)[1])
        return found

    with ThreadPoolExecutor(7) as pool:
        waiting = [pool.submit(ask_again) for _ in range(4)]
        streams = [pool.submit(renewed) for _ in range(3)]
        try:
            manifest = training.publish(training.start())
            answers = [future.result() for future in waiting]
        finally:
            waited.set()
    assert all(
        status == 200 and headers["x-weight-version"] == str(manifest.version) for status, headers, _ in answers
    )
    # the last version is the one that an answer ends with; the ones before it are named if there were any
    long = [headers for stream in streams for headers in stream.result()]
    assert {headers["x-weight-version"] for headers in long} <= {first, str(manifest.version)}
    spanned = [headers for headers in long if "x-weight-versions" in headers]
    assert spanned, "no request lived through the update"
    for headers in spanned:
        assert headers["x-weight-version"] == str(manifest.version)
        assert headers["x-weight-versions"] == f"{first}, {manifest.version}"


def metrics(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    names = [name for name, _ in rows if name.startswith("vllm_delta:")]
    assert len(names) == len(set(names)), "every series once"
    assert any(name.startswith("vllm:") for name, _ in rows), "vLLM's own are still there"
    return {name: float(value) for name, value in rows if name.startswith("vllm_delta:")}


def test_metrics_count_once_whatever_the_number_of_api_servers(followed: tuple[Server, Training]):
    server, training = followed
    before = [metrics(server) for _ in range(3)]
    assert before[0] == before[1] == before[2]
    manifest = training.publish(training.start())
    server.wait(lambda s: s["version"] == str(manifest.version), "the next version")
    after = metrics(server)
    for name in ("commits_total", "commit_seconds_count", 'commit_seconds_bucket{le="+Inf"}'):
        assert after[f"vllm_delta:{name}"] == before[0][f"vllm_delta:{name}"] + 1
    assert after["vllm_delta:staged_bytes_total"] > before[0]["vllm_delta:staged_bytes_total"]
    assert after["vllm_delta:served_seq"] == manifest.version.seq and after["vllm_delta:lag_versions"] == 0
    assert after['vllm_delta:state{state="serving"}'] == 1 and after["vllm_delta:refused_total"] == 0


def test_a_foreign_reload_is_noticed_and_healed(followed: tuple[Server, Training]):
    server, training = followed
    manifest = training.publish(training.start())
    before = server.wait(lambda s: s["version"] == str(manifest.version), "the next version")
    answer = ask(server, max_tokens=16, logprobs=1)[2]["choices"][0]["logprobs"]
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(training.base)}}
    # its answer is not JSON that anybody needs
    request = urllib.request.Request(
        server.url + "/collective_rpc", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).read()
    # asked at once: generation waits until the version is proven again
    _, headers, again = ask(server, max_tokens=16, logprobs=1)
    assert headers["x-weight-version"] == str(manifest.version) and "x-weight-versions" not in headers
    assert again["choices"][0]["logprobs"] == answer
    healed = server.wait(lambda s: s["state"] == "serving", "the server to recover")
    assert (healed["version"], healed["digest"]) == (before["version"], before["digest"])
    assert any("reload_weights was called from outside" in entry["reason"] for entry in healed["refused"])
    assert server.verify()["equal"]


def test_the_server_follows_on_after_it_slept(followed: tuple[Server, Training]):
    server, training = followed
    for path in ("/sleep?level=2", "/wake_up"):
        urllib.request.urlopen(urllib.request.Request(server.url + path, method="POST"), timeout=60).read()
    manifest = training.publish(training.start())
    server.wait(lambda s: s["version"] == str(manifest.version) and s["state"] == "serving", "the next version")
    assert ask(server)[1]["x-weight-version"] == str(manifest.version)
    assert server.verify()["equal"]
