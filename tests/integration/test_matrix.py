# SPDX-License-Identifier: Apache-2.0
"""Whatever the model, the ranks and the compiler: an updated server answers like a fresh one on the same version.

Two versions arrive while requests are in flight. Tokens and log probabilities are compared with those of a server that
was started on a checkout of the last version, with the same flags and the same binding of threads to cores, so that
both use the same kernels. Both are forks of one warm process, or the matrix would take most of an hour.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from training import Training, pointed_to
from vllm_server import FLAGS, Server, Streams, WarmStart, serve

from delta_wire.bucket import BucketReader
from delta_wire.replay import checkout
from delta_wire.stores import open_store

pytestmark = pytest.mark.e2e

# the last one fills more than one block of the prefix cache (128 tokens on a CPU)
PROMPTS = ["What is 12 plus 30?", "First count, then fill. " * 40]
COMPILED = tuple(flag for flag in FLAGS if flag != "--enforce-eager")


@dataclass
class Prepared:
    """A run of three versions in a bucket that still points to the first, and a checkout of the last."""

    training: Training
    bucket: Path
    pointers: list[bytes]
    checkout: Path


@pytest.fixture(scope="module")
def prepared(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prepared]:
    known: dict[str, Prepared] = {}

    def prepare(kind: str) -> Prepared:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            training = Training(tiny_model(kind), folder / "bucket")
            writer = training.start()
            latest, pointers = training.bucket / "LATEST", []
            for encoding in ("packed", "context", None):
                pointers.append(latest.read_bytes())
                if encoding is not None:
                    training.publish(writer, encoding)
            newest = pointed_to(training.bucket)
            folder = checkout(BucketReader(open_store(training.bucket)), newest, folder / "checkout")
            latest.write_bytes(pointers[0])
            known[kind] = Prepared(training, training.bucket, pointers, folder)
        return known[kind]

    return prepare


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmStart]:
    start = WarmStart(tmp_path_factory.mktemp("warm"))
    yield start
    start.stop()


def answers(server: Server) -> list[dict[str, Any]]:
    """Tokens and log probabilities of all prompts, one after the other."""
    choices = [server.complete(prompt, max_tokens=16)["logprobs"] for prompt in PROMPTS]
    return [{"tokens": c["tokens"], "logprobs": c["token_logprobs"], "top": c["top_logprobs"]} for c in choices]


KINDS = ["qwen3", "qwen3-tied", "llama", "qwen3-moe"]
CELLS = [(kind, tensor, 1, "eager") for tensor in (1, 2) for kind in KINDS]


@pytest.mark.parametrize(("kind", "tensor", "pipeline", "mode"), CELLS)
def test_an_updated_server_answers_like_a_fresh_one(
    prepared: Callable[[str], Prepared],
    warm: WarmStart,
    tmp_path: Path,
    kind: str,
    tensor: int,
    pipeline: int,
    mode: str,
):
    run = prepared(kind)
    flags = (
        "--worker-extension-cls=vllm_delta.DeltaWorkerExtension",
        "--enable-scale-out",
        f"--tensor-parallel-size={tensor}",
        f"--pipeline-parallel-size={pipeline}",
    )
    buckets = {name: shutil.copytree(run.bucket, tmp_path / name / "bucket") for name in ("live", "fresh")}
    (buckets["fresh"] / "LATEST").write_bytes(run.pointers[2])

    def start(name: str, model: Path) -> Server:
        cores = "0|1" if tensor * pipeline > 1 else "0"
        env = {
            "DELTA_SYNC_BUCKET": str(buckets[name]),
            "DELTA_SYNC_POLL_S": "0.05",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
        }
        common = FLAGS if mode == "eager" else COMPILED
        return stack.enter_context(
            serve(model, tmp_path / name / "server.log", *flags, env=env, start=warm, common=common)
        )

    with ExitStack() as stack:
        server = start("live", run.training.base)
        server.wait(lambda s: s["state"] == "serving" and s["seq"] == 0, "version 0")
        before = answers(server)
        streams = Streams(server, [[5, 6, 7], [8, 9]], 24)
        for seq in (1, 2):
            unfinished = buckets["live"] / ".LATEST"
            unfinished.write_bytes(run.pointers[seq])
            unfinished.replace(buckets["live"] / "LATEST")
            server.wait(lambda s, seq=seq: s["seq"] == seq, f"version {seq}")
        streams.finish()
        status = server.status()
        assert status["commits"] == 2 and status["digest"] == str(run.training.digest)
        updated = answers(server)
        assert updated != before
        assert server.verify()["equal"]
        fresh = start("fresh", run.checkout)
        recognised = fresh.wait(lambda s: s["state"] == "serving", "the fresh server to recognise its version")
        assert recognised["seq"] == 2 and recognised["commits"] == 0
        assert answers(fresh) == updated
