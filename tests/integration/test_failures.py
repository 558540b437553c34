# SPDX-License-Identifier: Apache-2.0
"""Failures of a real server with two ranks, while a witness keeps asking it.

Each version is first served by a second server, which nothing happens to: its answer is what that version says. The
witness sends the same greedy request over and over to the server that fails; whatever happens, an answer labelled with
a version must have that version's tokens and log probabilities, and an answer that an update divides must begin with
those of the version it began with.
"""

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from training import Training, pointed_to
from vllm_server import Server, WarmStart, serve

from delta_wire.acks import read_acks
from delta_wire.bucket import BucketWriter
from delta_wire.manifest import manifest_key
from delta_wire.stores import open_store
from trl_delta.acks import AckWatcher
from trl_delta.anchors import AnchorMaker
from trl_delta.publisher import Publisher

pytestmark = pytest.mark.e2e

NUM_TOKENS = 24


def ask(server: Server) -> dict[str, Any]:
    """Tokens, their log probabilities, and the versions of a greedy answer."""
    options = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    body = {"model": server.model, "token_ids": [5, 6, 7], "sampling_params": options}
    choice = server.request("/inference/v1/generate", body)["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(choice["token_ids"]) == len(logprobs) == NUM_TOKENS
    return {
        "produced": list(zip(choice["token_ids"], logprobs, strict=True)),
        "spans": [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]],
    }


class Witness:
    """Asks one question after the other, in a thread, as long as it is in use.

    Nobody else asks meanwhile: sums are split differently where several requests run together.
    """

    def __init__(self, server: Server):
        self._server = server
        self._stop = threading.Event()
        self.answers: list[dict[str, Any]] = []

    def __enter__(self) -> "Witness":
        self._pool = ThreadPoolExecutor(1)
        self._asking = self._pool.submit(self._ask)
        return self

    def _ask(self) -> None:
        while not self._stop.is_set():
            self.answers.append(ask(self._server))

    def next(self) -> dict[str, Any]:
        """The first answer to a question that was asked after this call."""
        wanted, deadline_s = len(self.answers) + 2, time.monotonic() + 120
        while len(self.answers) < wanted:
            assert not self._asking.done() and time.monotonic() < deadline_s, "the witness gets no answer"
            time.sleep(0.01)
        return self.answers[wanted - 1]

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with self._pool:
            self._asking.result(120)


class Pair:
    """A server that fails and one that does not, each with a bucket of its own, and their trainer."""

    def __init__(self, training: Training, writer: BucketWriter, folder: Path, live: Server, other: Server):
        self.training, self._writer, self.live, self._other = training, writer, live, other
        self.bucket, self.stage = folder / "live", folder / "stage"
        self.expected: dict[str, list[Any]] = {}
        self.version = ""
        self._learn()

    def _learn(self) -> None:
        self.version = str(pointed_to(self.training.bucket).version)
        self._other.wait(lambda s: s["version"] == self.version and s["state"] == "serving", "the other server")
        answer = ask(self._other)
        assert answer["spans"] == [(self.version, 0, NUM_TOKENS)]
        assert answer["produced"] not in self.expected.values(), "versions cannot be told apart"
        self.expected[self.version] = answer["produced"]

    def publish(self) -> int:
        """Publish a version to the server that nothing happens to, and learn its answer."""
        manifest = self.training.publish(self._writer, "packed")
        self._learn()
        return manifest.version.seq

    def release(self, without: str | None = None) -> None:
        """Bring all that is published to the bucket of the server that fails, but for one object."""
        source = self.training.bucket
        paths = [path for path in source.rglob("*") if path.is_file() and "acks" not in path.parts]
        # the pointer last, as a trainer does; every file appears whole
        for path in sorted(paths, key=lambda path: path.name == "LATEST"):
            target = self.bucket / path.relative_to(source)
            if (target.exists() and path.name != "LATEST") or str(path.relative_to(source)) == without:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target.with_name(".unfinished"))
            target.with_name(".unfinished").replace(target)

    def answer_request(self) -> None:
        """What the server asks its trainer for in its ack, a real publisher does: a version with an anchor.

        It changes nothing, for nobody trains meanwhile, and says what the version before it says.
        """
        training, writer = self.training, self._writer
        anchors = AnchorMaker(writer.store, training.table, writer.head, factor=1e9, files=training.base)
        publisher = Publisher(
            writer,
            step=0,
            anchors=anchors,
            snapshot=lambda name: training.bits[name].copy().reshape(training.table[name].shape),
        )
        watcher = AckWatcher(lambda: read_acks(open_store(self.bucket)), publisher)
        try:
            deadline_s = time.monotonic() + 120
            while not publisher.records:
                assert time.monotonic() < deadline_s, "the publisher has heard of no request"
                time.sleep(0.01)
        finally:
            watcher.close()
            publisher.close(60)
        before, made = self.version, pointed_to(training.bucket)
        assert made.anchor is not None and made.anchor.objects and made.digest == training.digest
        self.version = str(made.version)
        self.expected[self.version] = self.expected[before]

    def arm(self, rank: int, *faults: str) -> None:
        body = {"method": "delta_arm", "args": [rank, list(faults)]}
        answer = self.live.request("/collective_rpc", body)
        assert answer["results"][rank]["faults"] == list(faults)

    def check(self, answers: list[dict[str, Any]]) -> None:
        """Every answer is that of the versions it is labelled with."""
        for answer in answers:
            spans = answer["spans"]
            assert [0, *(end for *_, end in spans)] == [*(start for _, start, _ in spans), NUM_TOKENS]
            version, _, end = spans[0]
            assert answer["produced"][:end] == self.expected[version][:end], f"wrong tokens labelled {version}"
        order = list(self.expected)
        seen = [order.index(version) for answer in answers for version, *_ in answer["spans"]]
        assert all(left <= right for left, right in pairwise(seen))

    def require_recovery(self, witness: Witness) -> None:
        """It serves the newest version, without a restart, and says what that version says."""
        self.live.wait(lambda s: s["version"] == self.version and s["state"] == "serving", "the recovery")
        assert witness.next() == {
            "produced": self.expected[self.version],
            "spans": [(self.version, 0, NUM_TOKENS)],
        }
        proof = self.live.verify()
        assert proof["equal"] and proof["digest"] == str(self.training.digest) and proof["ranks"] == 2


@pytest.fixture(scope="module")
def pair(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, warm: WarmStart
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("failures")
    training = Training(tiny_model("qwen3"), folder / "bucket")
    writer = training.start()
    bucket = shutil.copytree(training.bucket, folder / "live")
    (folder / "stage").mkdir()
    common = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "DELTA_SYNC_POLL_S": "0.05"}
    flags = ("--tensor-parallel-size=2", "--enable-scale-out")
    faulty = {
        "DELTA_SYNC_BUCKET": str(bucket),
        "DELTA_SYNC_STAGE_DIR": str(folder / "stage"),
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": str(Path(__file__).parents[1] / "support"),
    }
    with (
        serve(
            training.base,
            folder / "live.log",
            *flags,
            "--worker-extension-cls=faulty_extension.Faulty",
            env=common | faulty,
            start=warm,
        ) as live,
        serve(
            training.base,
            folder / "other.log",
            *flags,
            "--worker-extension-cls=vllm_delta.DeltaWorkerExtension",
            env=common | {"DELTA_SYNC_BUCKET": str(training.bucket)},
            start=warm,
        ) as other,
    ):
        yield Pair(training, writer, folder, live, other)


def refusals(status: dict[str, Any], rank: int) -> list[str]:
    return [entry["reason"] for entry in status["ranks"][rank]["refused"]]


def test_an_exception_in_the_scatter_of_one_rank(pair: Pair):
    before = pair.version
    with Witness(pair.live) as witness:
        seq = pair.publish()
        pair.arm(1, "scatter")
        pair.release()
        status = pair.live.wait(lambda s: any("off the bus" in r for r in refusals(s, 1)), "the failure")
        # undone on both ranks, and tried again
        assert status["version"] == before and status["seq"] == seq - 1
        pair.live.wait(lambda s: s["state"] == "degraded", "the failure to be visible")
        assert witness.next()["spans"] == [(before, 0, NUM_TOKENS)]
        pair.arm(1)
        pair.require_recovery(witness)
    pair.check(witness.answers)


def test_a_scatter_that_cannot_be_undone(pair: Pair):
    before = pair.version
    with Witness(pair.live) as witness:
        pair.publish()
        pair.arm(0, "scatter", "undo")
        pair.release()
        pair.live.wait(lambda s: any("could not be restored" in r for r in refusals(s, 0)), "the failure")
        pair.arm(0)
        pair.require_recovery(witness)
    pair.check(witness.answers)
    assert before in {version for answer in witness.answers for version, *_ in answer["spans"]}


def test_a_truncated_stage_file(pair: Pair):
    with Witness(pair.live) as witness:
        seq = pair.publish()
        pair.arm(1, "truncated stage file")
        pair.release()
        status = pair.live.wait(lambda s: s["state"] == "degraded", "the file to be refused")
        assert "half.safetensors" in status["reason"] and status["seq"] == seq - 1
        assert refusals(status, 1) and not [r for r in refusals(status, 0) if "half.safetensors" in r]
        pair.arm(1)
        pair.require_recovery(witness)
    pair.check(witness.answers)


def test_a_fetcher_that_loses_its_folder(pair: Pair):
    stage = pair.stage
    with Witness(pair.live) as witness:
        seq = pair.publish()
        stage.rename(stage.with_name("moved"))
        stage.write_text("no folder")
        pair.release()
        status = pair.live.wait(lambda s: s["state"] == "degraded", "the loss to be noticed")
        assert status["seq"] == seq - 1
        stage.unlink()
        stage.with_name("moved").rename(stage)
        pair.require_recovery(witness)
    pair.check(witness.answers)


def test_a_sleep_that_loses_the_weights(pair: Pair):
    def post(path: str, body: dict[str, Any] | None = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            pair.live.url + path, data, {"Content-Type": "application/json"}, method="POST"
        )
        urllib.request.urlopen(request, timeout=60).read()

    post("/sleep?level=2")
    # a CPU keeps them
    post("/collective_rpc", {"method": "delta_lose"})
    post("/wake_up")
    with Witness(pair.live) as witness:
        # asked at once: generation waits until they are back
        pair.require_recovery(witness)
        assert any("the engine slept" in entry["reason"] for entry in pair.live.status()["refused"])
    pair.check(witness.answers)


def test_a_missing_version(pair: Pair):
    with Witness(pair.live) as witness:
        seq = pair.publish()
        pair.publish()
        pair.release(without=manifest_key(seq))
        status = pair.live.wait(lambda s: s["state"] == "degraded", "the gap to be refused")
        assert status["seq"] == seq - 1 and status["target_seq"] == seq + 1
        assert manifest_key(seq) in status["reason"]
        # it is lost for good: nothing but an anchor leads on, and that has to be asked for
        pair.live.wait(lambda s: s["needs_anchor"] == pair.version, "the server to need an anchor")
        pair.answer_request()
        pair.release(without=manifest_key(seq))
        # what answers looks at the bucket, too, and its own looks have become rare
        pair.live.verify()
        pair.require_recovery(witness)
        assert not (pair.bucket / manifest_key(seq)).exists()
    pair.check(witness.answers)
