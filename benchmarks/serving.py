# SPDX-License-Identifier: Apache-2.0
"""What a loaded server loses to a new version every second, or to verifying itself: tokens, and delays between them.

    python benchmarks/serving.py --json

One `vllm serve` (SmolLM2-135M on the CPU) with constantly running requests. Phases of equal length alternate: no
updates, then a version of 0.4 % of all elements every second, then one `POST /delta/verify` after the other. What is
measured are all tokens that arrive during the phases, and every delay between two tokens of one request. The versions
are published beforehand and released by moving the pointer, because a trainer does not use the cores of its servers;
fetching, decoding and planning do, and are part of the loss. Takes about seven minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("examples", "tests/support")]
from prepare_model import prepare
from training import Training, move_pointer
from vllm_server import Server, serve

from delta_wire.machine import measured
from delta_wire.state import Delta, TensorDelta

_PERIOD_S = 1.0
_KINDS = ("off", "on", "verify")


class Load:
    """Streams that never end: each thread asks for the next answer as soon as it has the last one.

    Args:
        server (`Server`): to ask.
        num_streams (`int`): requests at a time.
    """

    def __init__(self, server: Server, num_streams: int):
        self._server = server
        self._stop = threading.Event()
        # (when, delay since the token before it in the same answer)
        self.tokens: list[tuple[float, float | None]] = []
        self.error: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(num_streams)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, at: int) -> None:
        turn = 0
        try:
            while not self._stop.is_set():
                self._stream(f"Stream {at}, answer {turn}. Tell me about the sea.")
                turn += 1
        except Exception as error:
            self.error = error

    def _stream(self, prompt: str) -> None:
        body = {"model": self._server.model, "prompt": prompt, "max_tokens": 256, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            self._server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        last_s = None
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    now_s = time.perf_counter()
                    self.tokens.append((now_s, None if last_s is None else now_s - last_s))
                    last_s = now_s
                if self._stop.is_set():
                    return

    def between(self, start_s: float, stop_s: float) -> list[tuple[float, float | None]]:
        if self.error is not None:
            raise self.error
        return [token for token in self.tokens if start_s <= token[0] < stop_s]


class Trainer:
    """Releases versions that lie in the bucket already, as if a trainer on another machine had published them.

    Args:
        training (`Training`): the run.
        num_versions (`int`): there and back in turn, all of the same size.
    """

    def __init__(self, training: Training, num_versions: int):
        writer = training.start()
        base = training.digest
        there = training.change()
        back: Delta = {
            name: TensorDelta(name, part.indices, part.old, part.new)  # type: ignore[arg-type]
            for name, part in there.items()
        }
        turns = [(there, training.digest), (back, base)]
        self.num_changed = sum(part.num_changed for part in there.values())
        self._pointer = training.bucket / "LATEST"
        pointers = [self._pointer.read_bytes()]
        for seq in range(num_versions):
            delta, digest = turns[seq % 2]
            writer.publish(delta, digest=digest, step=None)
            pointers.append(self._pointer.read_bytes())
        self._pointers = iter(pointers)
        self.num_versions = -1
        self.publish()

    def publish(self) -> None:
        move_pointer(self._pointer.parent, next(self._pointers))
        self.num_versions += 1

    def run(self, until_s: float) -> None:
        due_s = time.perf_counter()
        while due_s < until_s:
            self.publish()
            due_s += _PERIOD_S
            time.sleep(max(0.0, min(due_s, until_s) - time.perf_counter()))


def measure(server: Server, trainer: Trainer, phases: int, phase_s: float, streams: int) -> dict[str, float]:
    rates: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    delays: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    verify_s: list[float] = []
    with Load(server, streams) as load:
        # everything is compiled and cached once
        time.sleep(5)
        trainer.publish()
        server.wait(lambda s: s["seq"] == trainer.num_versions, "the first version")
        before = server.status()["commits"]
        published = trainer.num_versions
        for kind in _KINDS * phases:
            start_s = time.perf_counter()
            stop_s = start_s + phase_s
            if kind == "on":
                trainer.run(stop_s)
            while kind == "verify" and time.perf_counter() < stop_s:
                asked_s = time.perf_counter()
                assert server.verify()["equal"]
                verify_s.append(time.perf_counter() - asked_s)
            time.sleep(max(0.0, stop_s - time.perf_counter()))
            tokens = load.between(start_s, stop_s)
            rates[kind].append(len(tokens) / phase_s)
            delays[kind] += [delay for _, delay in tokens if delay is not None]
            # a version of the last moment belongs to no phase
            server.wait(lambda s: s["seq"] == trainer.num_versions, "the last version")
        status = server.status()
    assert status["state"] == "serving" and server.verify()["equal"]
    off, on, verify = (statistics.mean(rates[kind]) for kind in _KINDS)
    return {
        "tokens_per_s_off": off,
        "tokens_per_s_on": on,
        "tokens_per_s_verify": verify,
        "loss_frac": 1 - on / off,
        "loss_verify_frac": 1 - verify / off,
        **{f"p99_itl_ms_{kind}": float(np.percentile(delays[kind], 99)) * 1000 for kind in _KINDS},
        **{f"max_itl_ms_{kind}": max(delays[kind]) * 1000 for kind in _KINDS},
        "verify_s": statistics.median(verify_s),
        "versions": trainer.num_versions - published,
        "commits": status["commits"] - before,
        "pause_ms": statistics.median(status["pauses_ms"]),
        "changed": trainer.num_changed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/models/smollm2"), help="made if it does not exist")
    parser.add_argument("--phases", type=int, default=5, help="of each kind")
    parser.add_argument("--phase-s", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--verify-frac", default="", help="DELTA_SYNC_VERIFY_FRAC of the server")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    base = prepare("smollm2", options.model).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_versions = 2 + options.phases * (int(options.phase_s / _PERIOD_S) + 2)
        trainer = Trainer(Training(base, folder / "bucket", changed_frac=0.004), num_versions)
        flags = ("--worker-extension-cls=vllm_delta.DeltaWorkerExtension",)
        env = {"DELTA_SYNC_BUCKET": str(folder / "bucket"), "DELTA_SYNC_VERIFY_FRAC": options.verify_frac}
        with serve(base, folder / "log", *flags, env=env) as server:
            server.wait(lambda s: s["state"] == "serving", "version 0")
            result = measure(server, trainer, options.phases, options.phase_s, options.streams)
    if options.json:
        print(json.dumps({**result, "measured": measured()}))
        return
    print(
        f"{result['tokens_per_s_off']:.0f} tokens a second without updates, {result['tokens_per_s_on']:.0f} with one a"
        f" second ({result['loss_frac']:.1%} less); 99 of 100 delays below {result['p99_itl_ms_off']:.0f} ms and "
        f"{result['p99_itl_ms_on']:.0f} ms; median pause {result['pause_ms']:.1f} ms; while it verifies all weights, "
        f"which takes {result['verify_s']:.1f} s, {result['loss_verify_frac']:.1%} less, the longest delay "
        f"{result['max_itl_ms_verify']:.0f} ms instead of {result['max_itl_ms_off']:.0f} ms"
    )


if __name__ == "__main__":
    main()
