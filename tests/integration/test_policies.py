# SPDX-License-Identifier: Apache-2.0
"""What a commit does to the prefix cache, and many versions in every order.

The oracle for a prompt that may hit the cache is the same prompt under a salt of its own, which cannot.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from training import Training
from vllm_server import Server, Streams, WarmStart, serve

from delta_wire.bucket import BucketWriter

pytestmark = pytest.mark.e2e

EXTENSION = "--worker-extension-cls=vllm_delta.DeltaWorkerExtension"
# several blocks of the prefix cache (128 tokens on a CPU)
LONG = "First count, then fill; first stage, then commit; first measure, then claim. " * 25


def logprobs(server: Server, prompt: str, **options: Any) -> dict[str, Any]:
    found = server.complete(prompt, max_tokens=12, **options)["logprobs"]
    return {"tokens": found["tokens"], "logprobs": found["token_logprobs"]}


def cached_and_fresh(server: Server) -> tuple[dict[str, Any], dict[str, Any]]:
    """The long prompt's answer as the cache gives it, and as the weights alone give it."""
    fresh = logprobs(server, LONG, cache_salt=uuid.uuid4().hex)
    return logprobs(server, LONG), fresh


@pytest.fixture
def followed(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path: Path, warm: WarmStart
) -> Iterator[tuple[Server, Training, BucketWriter]]:
    training = Training(tiny_model("qwen3"), tmp_path / "bucket")
    writer = training.start()
    env = {
        "DELTA_SYNC_BUCKET": str(training.bucket),
        "DELTA_SYNC_POLL_S": "0.05",
        "DELTA_SYNC_CACHE_POLICY": request.param,
    }
    flags = (EXTENSION, "--enable-scale-out")
    with serve(training.base, tmp_path / "server.log", *flags, env=env, start=warm) as server:
        server.wait(lambda s: s["state"] == "serving", "version 0")
        yield server, training, writer


@pytest.mark.parametrize(
    ("followed", "stale"), [("reset", False), ("keep", True)], indirect=["followed"], ids=["reset", "keep"]
)
def test_policies(followed: tuple[Server, Training, BucketWriter], stale: bool):
    server, training, writer = followed
    base, fresh = cached_and_fresh(server)
    assert base == fresh
    running = Streams(server, [[3, 4, 5] * 100, [5, 6, 7], [8, 9]], 400)
    training.publish(writer)
    server.wait(lambda s: s["seq"] == 1, "version 1")
    streams = running.finish()
    assert any(len(spans) > 1 for stream in streams for spans in stream), "no request lived through the update"
    cached, fresh = cached_and_fresh(server)
    assert fresh != base
    assert (cached != fresh) is stale
    if stale:
        # what is documented: old keys and values of the prompt, new weights from there on
        assert logprobs(server, "The answer is") == logprobs(server, "The answer is", cache_salt="fresh")
    assert server.verify()["equal"]


@pytest.mark.parametrize("followed", ["forget"], indirect=True)
def test_many_versions(followed: tuple[Server, Training, BucketWriter], tmp_path: Path, warm: WarmStart):
    server, training, writer = followed
    digest = training.digest
    base, fresh = cached_and_fresh(server)
    assert base == fresh

    # twenty under load, each committed on its own
    running = Streams(server, [[10, 11], [12, 13, 14], [15]], 400)
    deltas = []
    for seq in range(1, 21):
        delta = training.change()
        writer.publish(delta, digest=training.digest, step=None)
        deltas.append(delta)
        server.wait(lambda s, seq=seq: s["seq"] == seq, f"version {seq}")
    status = server.status()
    assert status["commits"] == 20 and status["digest"] == str(training.digest)
    cached, fresh = cached_and_fresh(server)
    assert cached == fresh != base

    # and the inverse of each, which leads back to the base
    for delta in reversed(deltas):
        training.take_back(writer, delta)
    server.wait(lambda s: s["seq"] == 40, "version 40")
    for stream in running.finish():
        seqs = [int(span["version"].rsplit("-", 1)[1]) for spans in stream for span in spans]
        assert seqs == sorted(seqs) and len(set(seqs)) > 1
    assert training.digest == digest and server.status()["digest"] == str(digest)
    assert server.verify()["equal"]
    assert cached_and_fresh(server) == (base, base)

    # ten at once are one commit
    commits = server.status()["commits"]
    early = (training.bucket / "LATEST").read_bytes()
    copy = shutil.copytree(training.bucket, tmp_path / "copy")
    other = training.start(copy)
    for _ in range(10):
        training.publish(other)
    for file in sorted(copy.rglob("*"), key=lambda path: path.name == "LATEST"):
        target = training.bucket / file.relative_to(copy)
        if file.is_file() and "acks" not in file.parts and (file.name == "LATEST" or not target.exists()):
            shutil.copyfile(file, target.with_name(".unfinished"))
            target.with_name(".unfinished").replace(target)
    status = server.wait(lambda s: s["seq"] == 50, "version 50")
    assert status["commits"] == commits + 1 and status["digest"] == str(training.digest)

    # the same pointer once more, and an old one late, change nothing
    late = (training.bucket / "LATEST").read_bytes()
    for pointer in (late, early, late):
        (training.bucket / ".unfinished").write_bytes(pointer)
        (training.bucket / ".unfinished").replace(training.bucket / "LATEST")
        # a verification is answered by the same thread: it has looked at the pointer since
        assert server.verify()["equal"] and server.verify()["equal"]
        status = server.status()
        assert (status["seq"], status["commits"], status["state"]) == (50, commits + 1, "serving")
    assert cached_and_fresh(server)[0] == cached_and_fresh(server)[1]

    # who starts now goes straight to the newest version, and answers only then that it is there
    env = {"DELTA_SYNC_BUCKET": str(training.bucket)}
    with serve(training.base, tmp_path / "late.log", EXTENSION, env=env, start=warm) as latecomer:
        status = latecomer.status()
        assert (status["seq"], status["commits"], status["state"]) == (50, 1, "serving")
        assert logprobs(latecomer, LONG) == logprobs(server, LONG, cache_salt="late")
