# SPDX-License-Identifier: Apache-2.0
"""Stands in for a vLLM server and for TRL's rollout worker where only the trainer's side is tested."""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from delta_wire.acks import Ack
from delta_wire.bucket import BucketReader
from delta_wire.errors import StoreError
from delta_wire.manifest import Manifest
from delta_wire.stores import open_store


class StubServer:
    """Generates random tokens, and notes the newest version in the bucket that it has acknowledged by then.

    Args:
        bucket (`Path`): followed.
        delay_s (`float`): between seeing a version and serving it.
    """

    def __init__(self, bucket: Path, delay_s: float = 0.1):
        self.bucket = bucket
        self.delay_s = delay_s
        self.served: Manifest | None = None
        # optimizer step of the weights that each request was answered with
        self.answered_with: list[int | None] = []
        self._stop = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def reply(self, body: dict, status: int = 200) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self):
                # as a server that is not in development mode
                known = {"/health": {}, "/v1/models": {"data": [{"id": "model"}]}}
                path = self.path.partition("?")[0]
                self.reply(known.get(path, {}), 200 if path in known else 404)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.answered_with.append(stub.served.step if stub.served else None)
                self.reply({"choices": stub.choices(body)})

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._threads = [threading.Thread(target=self._http.serve_forever), threading.Thread(target=self._follow)]
        for thread in self._threads:
            thread.start()

    def choices(self, body: dict) -> list[dict]:
        choices = []
        for prompt in body["prompt"]:
            for _ in range(body["n"]):
                ids = [random.randrange(4, 500) for _ in range(body["max_tokens"])]
                logprobs = {
                    "tokens": [f"token_id:{token}" for token in ids],
                    "token_logprobs": [-6.0] * len(ids),
                    "top_logprobs": [None] * len(ids),
                }
                choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs})
        return choices

    def _follow(self) -> None:
        while not self._stop.wait(0.02):
            try:
                reader = BucketReader(open_store(self.bucket))
                latest = reader.latest()
                if latest is None or latest == self.served:
                    continue
                time.sleep(self.delay_s)
                self.served = latest
                reader.write_ack(Ack("stub", latest.version, latest.digest, "serving", None, 1.0, time.time()))
            except StoreError:
                continue

    def stop_following(self) -> None:
        self._stop.set()
        self._threads[1].join()

    def close(self) -> None:
        self.stop_following()
        self._http.shutdown()
        for thread in self._threads:
            thread.join()
        self._http.server_close()


class StubWorker:
    """Makes up rollouts as fast as they are taken, stamped with the number it was told last."""

    def __init__(self):
        self.rollout_buffer: queue.Queue = queue.Queue(maxsize=4)
        self.metrics_queue: queue.Queue = queue.Queue()
        self.model_version = 0
        self.told: list[int] = []
        self.started_at_version: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def update_model_version(self, model_version: int) -> None:
        self.told.append(model_version)
        self.model_version = model_version

    def start(self) -> None:
        self.started_at_version = self.model_version
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def check_health(self, stale_after_s: float) -> None:
        pass

    def _run(self) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        rng = np.random.default_rng(0)
        group = 0
        while not self._stop.is_set():
            for advantage in (1.0, -1.0):
                ids = rng.integers(4, 500, 12)
                sample = RolloutSample(
                    prompt=[{"role": "user", "content": "?"}],
                    completion=[{"role": "assistant", "content": "!"}],
                    input_ids=ids,
                    completion_mask=np.array([0] * 6 + [1] * 6),
                    old_log_probs=np.full(12, -6.0, dtype=np.float32),
                    advantage=advantage,
                    model_version=self.model_version,
                    group_id=group,
                    metrics={"reward": advantage},
                )
                while not self._stop.is_set():
                    try:
                        self.rollout_buffer.put(sample, timeout=0.05)
                        break
                    except queue.Full:
                        continue
            group += 1


class Acker(threading.Thread):
    """A server that serves each new version `delay_s` after it sees it."""

    def __init__(self, bucket: Path, delay_s: float):
        super().__init__(daemon=True)
        self.bucket = bucket
        self.delay_s = delay_s
        self.steps: list[int] = []
        self.stop = threading.Event()

    def run(self) -> None:
        served = None
        while not self.stop.wait(0.02):
            try:
                reader = BucketReader(open_store(self.bucket))
                latest = reader.latest()
                if latest is None or latest.version == served:
                    continue
                time.sleep(self.delay_s)
                served = latest.version
                self.steps.append(latest.step or 0)
                reader.write_ack(Ack("server", served, latest.digest, "serving", None, 1.0, time.time()))
            except StoreError:
                continue
