# SPDX-License-Identifier: Apache-2.0
"""A real server follows a bucket: requests in flight survive, and what it serves is what a fresh server would serve.

The fresh server runs on the checked-out checkpoint with the same flags, bucket and extension, so that both use the
same kernels; it must recognise its version by itself and apply nothing.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from training import Forgery, Training, pointed_to
from vllm_server import Server, Streams, serve

from delta_wire.bucket import BucketReader
from delta_wire.replay import checkout
from delta_wire.stores import open_store

pytestmark = pytest.mark.e2e

EXTENSION = "--worker-extension-cls=vllm_delta.DeltaWorkerExtension"
# the last one fills more than one block of the prefix cache (128 tokens on a CPU)
PROMPTS = ["What is 12 plus 30?", "The answer is", "First count, then fill. " * 40]
# what is in flight while versions come and go
IN_FLIGHT = [[5, 6, 7], [9, 8], list(range(10, 150)), [11]]
TOKENS_IN_FLIGHT = 400


def environment(bucket: Path) -> dict[str, str]:
    return {"DELTA_SYNC_BUCKET": str(bucket), "DELTA_SYNC_POLL_S": "0.1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def answers(server: Server) -> list[dict[str, Any]]:
    """Tokens and log probabilities of all prompts, one after the other."""
    choices = [server.complete(prompt, max_tokens=24)["logprobs"] for prompt in PROMPTS]
    return [{"tokens": c["tokens"], "logprobs": c["token_logprobs"], "top": c["top_logprobs"]} for c in choices]


@pytest.fixture(scope="module")
def followed(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Training]]:
    """A server on the base checkpoint, started before its bucket exists, and the run that it follows."""
    folder = tmp_path_factory.mktemp("server")
    training = Training(tiny_model("qwen3"), folder / "bucket")
    env = environment(training.bucket)
    # without scale-out no answer of the API tells which version produced which token
    with serve(training.base, folder / "server.log", EXTENSION, "--enable-scale-out", env=env) as server:
        yield server, training


def test_three_updates_under_load_equal_a_fresh_server(followed: tuple[Server, Training], tmp_path: Path):
    server, training = followed
    missing = server.wait(lambda s: s["state"] == "degraded", "the missing bucket to be reported")
    assert str(training.bucket) in missing["reason"]

    writer = training.start()
    server.wait(lambda s: s["state"] == "serving" and s["seq"] == 0, "version 0")
    before = answers(server)
    running = Streams(server, IN_FLIGHT, TOKENS_IN_FLIGHT)
    versions = [pointed_to(training.bucket)]
    for seq, encoding in ((1, "plain"), (2, "packed"), (3, "context")):
        versions.append(training.publish(writer, encoding))
        status = server.wait(lambda s, seq=seq: s["seq"] == seq, f"version {seq}")
        assert status["state"] == "serving" and status["digest"] == str(training.digest)
    names = [str(version.version) for version in versions]
    for stream in running.finish():
        # each stream had a request that lived through an update, and versions only ever follow one another
        assert max(len(spans) for spans in stream) > 1
        produced = [names.index(span["version"]) for span in chain.from_iterable(stream)]
        assert produced == sorted(produced)
    assert status["commits"] == 3 and len(status["pauses_ms"]) == 3

    proof = server.verify()
    assert proof["equal"] and proof["digest"] == str(training.digest)
    assert proof["tensors"].keys() == training.table.keys()
    ack = json.loads((training.bucket / "acks" / f"{status['server']}.json").read_text())
    assert ack["digest"] == str(training.digest) and ack["state"] == "serving"

    updated = answers(server)
    assert updated != before
    store = open_store(training.bucket)
    folder = checkout(BucketReader(store), versions[-1], tmp_path / "checkout")
    with serve(folder, tmp_path / "fresh.log", EXTENSION, env=environment(training.bucket)) as fresh:
        recognised = fresh.wait(lambda s: s["state"] == "serving", "the fresh server to recognise its version")
        assert recognised["seq"] == 3 and recognised["commits"] == 0
        assert answers(fresh) == updated


def drop_half(forgery: Forgery) -> str:
    raw = forgery.delta_file.read_bytes()
    forgery.delta_file.write_bytes(raw[: len(raw) // 2])
    return forgery.delta_key


def flip_a_bit(forgery: Forgery) -> str:
    raw = bytearray(forgery.delta_file.read_bytes())
    raw[-1] ^= 1
    forgery.delta_file.write_bytes(raw)
    return forgery.delta_key


def edited(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata)

    return rewrite


def name_an_unknown_tensor(forgery: Forgery) -> str:
    def edit(tensors: dict[str, Any]) -> None:
        name = min(name for name in tensors if name.endswith(".indices")).removesuffix(".indices")
        for part in ("indices", "values"):
            tensors[f"ghost.weight.{part}"] = tensors[f"{name}.{part}"].clone()

    forgery.rewrite_delta(edited(edit))
    return "ghost.weight"


def point_outside(forgery: Forgery) -> str:
    def edit(tensors: dict[str, Any]) -> None:
        name = min(name for name in tensors if name.endswith(".indices"))
        tensors[name][-1] = 1 << 30

    forgery.rewrite_delta(edited(edit))
    return forgery.delta_key


def change_other_weights(forgery: Forgery) -> str:
    def edit(tensors: dict[str, Any]) -> None:
        name = min(name for name in tensors if name.endswith(".values"))
        tensors[name] = -tensors[name]

    forgery.rewrite_delta(edited(edit))
    return "announces digest"


def write_a_newer_format(forgery: Forgery) -> str:
    forgery.pointer_file.write_text(json.dumps(forgery.pointer() | {"format": 2}))
    return "LATEST"


@pytest.mark.parametrize(
    "forge",
    [drop_half, flip_a_bit, name_an_unknown_tensor, point_outside, change_other_weights, write_a_newer_format],
)
def test_a_bad_version_is_named_and_refused_until_it_is_repaired(
    followed: tuple[Server, Training], forge: Callable[[Forgery], str], tmp_path: Path
):
    server, training = followed
    if not training.bucket.exists():
        training.start()
    good = server.wait(lambda s: s["state"] == "serving", "the server to follow")
    forgery = Forgery(training, tmp_path)
    expected = forge(forgery)
    forgery.release()
    bad = server.wait(lambda s: s["state"] == "degraded", "the version to be refused")
    assert expected in bad["reason"], bad["reason"]
    assert (bad["version"], bad["digest"]) == (good["version"], good["digest"])
    assert server.verify()["digest"] == good["digest"]
    assert server.complete(PROMPTS[0], max_tokens=4)["logprobs"]["tokens"]
    forgery.repair()
    served = server.wait(lambda s: s["state"] == "serving", "the repaired version")
    assert served["version"] == str(forgery.manifest.version) and served["digest"] == str(training.digest)
    assert server.verify()["equal"]


def test_a_bucket_that_vanishes_and_returns(followed: tuple[Server, Training], tmp_path: Path):
    server, training = followed
    if not training.bucket.exists():
        training.start()
    good = server.wait(lambda s: s["state"] == "serving", "the server to follow")
    running = Streams(server, IN_FLIGHT[:2], 100)
    shutil.move(training.bucket, tmp_path / "elsewhere")
    gone = server.wait(lambda s: s["state"] == "degraded", "the missing bucket to be reported")
    assert str(training.bucket) in gone["reason"] and gone["version"] == good["version"]
    # several looks at the bucket
    time.sleep(1)
    assert all(stream for stream in running.finish())
    assert not training.bucket.exists(), "the server made a bucket of its own"
    shutil.move(tmp_path / "elsewhere", training.bucket)
    server.wait(lambda s: s["state"] == "serving", "the bucket to be found again")
    server.wait_for_log(f"following {training.bucket} as server {good['server']}, serving {good['version']}")
    log = server.log_text()
    assert log.count(f"degraded, serving {good['version']}: {training.bucket}: there is no such folder") == 1, log
    assert "Traceback" not in log
    manifest = training.publish(training.start())
    server.wait(lambda s: s["version"] == str(manifest.version), "the next version")
    assert pointed_to(training.bucket).digest == training.digest
