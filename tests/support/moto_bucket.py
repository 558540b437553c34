# SPDX-License-Identifier: Apache-2.0
"""A real S3 server on this machine (moto), and an environment in which clients find it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import URLError
from urllib.request import Request, urlopen

_START_S = 60


class MotoServer:
    """`moto_server` as a process of its own, so that other processes reach it and a test may kill it.

    Args:
        folder (`Path`): for its log.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): address to listen on.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1"):
        self._log = folder / "moto.log"
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", host, "-p", str(self.port)],
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                urlopen(f"{self.url}/moto-api/", timeout=5).close()
                return
            except (URLError, OSError):
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    self.stop()
                    raise RuntimeError(f"moto_server did not start:\n{self._log.read_text()}") from None
                time.sleep(0.05)

    @property
    def env(self) -> dict[str, str]:
        """What a client needs to find the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIDMOTO",
            "AWS_SECRET_ACCESS_KEY": "moto-secret-key",
            "AWS_REGION": "us-east-1",
        }

    def create_bucket(self, name: str) -> None:
        self._send("PUT", name)

    def delete_bucket(self, name: str) -> None:
        """Remove an empty bucket."""
        self._send("DELETE", name)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _send(self, method: str, name: str) -> None:
        headers = {"Host": f"127.0.0.1:{self.port}", "Content-Length": "0"}
        urlopen(Request(f"{self.url}/{name}", method=method, headers=headers), timeout=30).close()
