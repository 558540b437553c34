# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` as a child process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300


class DemoServer:
    """vLLM on the CPU with this project's extension, followed by its log file.

    Args:
        model (`Path`): checkpoint folder; also the name it is served under.
        bucket (`str` or `Path`): the bucket it follows.
        run_dir (`Path`): folder for its log; also its working folder.
        name (`str`, *optional*, defaults to `"server"`): of its log file, and in its acknowledgements.
    """

    def __init__(self, model: Path, bucket: str | Path, run_dir: Path, name: str = "server"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = run_dir / f"{name}.log"
        self.name = name
        self._stopping = False
        command = [
            str(Path(sys.executable).with_name("vllm")),
            "serve",
            str(model),
            # all that delta sync needs: this flag, and DELTA_SYNC_BUCKET below
            *("--worker-extension-cls", "vllm_delta.DeltaWorkerExtension"),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
            # a small server: it shares the machine with the trainer
            *("--max-model-len", "512", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "256M", "--enforce-eager"),
            # the trainer compares log-probabilities of the distribution that was sampled from
            *("--logprobs-mode", "processed_logprobs"),
        ]
        env = os.environ | {
            "DELTA_SYNC_BUCKET": str(bucket),
            "DELTA_SYNC_POLL_S": "0.1",
            "DELTA_SYNC_SERVER_ID": name,
            "VLLM_LOGGING_LEVEL": "INFO",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),
        }
        with self.log.open("wb") as log:
            # a process group of its own, so that engine and workers can be ended with it
            self._process = subprocess.Popen(
                command, env=env, cwd=run_dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self, progress: Callable[[float], None]) -> None:
        """Wait until the server answers; `progress` is called with the elapsed seconds about once a second."""
        began_s = time.monotonic()
        while True:
            elapsed_s = time.monotonic() - began_s
            self.require_alive()
            try:
                self._call("/health", timeout_s=5)
                return
            except (urllib.error.URLError, OSError):
                pass
            if elapsed_s > START_TIMEOUT_S:
                raise SystemExit(f"demo: the server was not ready within {START_TIMEOUT_S} s; see {self.log}")
            progress(elapsed_s)
            time.sleep(1)

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        return self._process.poll() is None

    def require_alive(self) -> None:
        """End the demo with a sentence if the server has exited."""
        code = self._process.poll()
        if code is not None:
            raise SystemExit(f"demo: the server has exited with code {code}; the reason is at the end of {self.log}")

    def end_demo_when_it_exits(self) -> None:
        """From now on raise the sentence of `require_alive` in the main thread, whatever that is waiting for.

        TRL's rollout worker would try a dead server again for ten minutes.
        """
        signal.signal(signal.SIGUSR1, lambda *_: self.require_alive())

        def watch() -> None:
            self._process.wait()
            if not self._stopping:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        threading.Thread(target=watch, name="demo-server-watch", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """What `GET /delta/status` answers."""
        return json.loads(self._call("/delta/status", timeout_s=30))

    def verify(self) -> dict[str, Any]:
        """Digests of the live weights on all ranks, recomputed now by `POST /delta/verify`."""
        return json.loads(self._call("/delta/verify", method="POST", timeout_s=300))

    def kill(self) -> None:
        """What a power failure does: no process of the server gets to say anything more."""
        self._stopping = True
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the server and everything it has started."""
        self._stopping = True
        # vLLM ends its own processes in order; whatever is left of the group after that is killed
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _call(self, path: str, *, method: str = "GET", timeout_s: float) -> bytes:
        request = urllib.request.Request(self.url + path, method=method)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.read()
