# SPDX-License-Identifier: Apache-2.0
"""A server of somebody else's as a process of its own, so that other processes reach it and a test may kill it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self


class ServerProcess:
    """Context manager; answers once it has been made.

    Args:
        command (callable): command line for a port.
        folder (`Path`): to run in, and for its log.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): address that it listens on.
        answers (callable, *optional*): raises an `OSError` as long as the server, at host and port, is not ready; by
            default it is as soon as it takes a connection.
    """

    # how long a start may take
    start_s = 60.0

    def __init__(
        self,
        command: Callable[[int], list[str]],
        folder: Path,
        host: str = "127.0.0.1",
        answers: Callable[[str, int], object] | None = None,
    ):
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.port: int = probe.getsockname()[1]
        line = command(self.port)
        path = folder / f"{type(self).__name__.lower()}.log"
        with path.open("w") as log:
            self.process = subprocess.Popen(line, cwd=folder, stdout=log, stderr=log)
        deadline_s = time.monotonic() + self.start_s
        while True:
            try:
                (answers or _connect)(host, self.port)
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    self.stop()
                    raise RuntimeError(f"{' '.join(line)} did not start:\n{path.read_text()}") from None
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _connect(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=5).close()
