# SPDX-License-Identifier: Apache-2.0
"""A real S3 server on this machine (moto), and an environment in which clients find it."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.request import Request, urlopen

from server_process import ServerProcess


class MotoServer(ServerProcess):
    """`moto_server`.

    Args:
        folder (`Path`): for its log.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): address to listen on.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1"):
        def command(port: int) -> list[str]:
            return [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]

        super().__init__(command, folder, host, _answers)
        self.url = f"http://{host}:{self.port}"

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

    def _send(self, method: str, name: str) -> None:
        headers = {"Host": f"127.0.0.1:{self.port}", "Content-Length": "0"}
        urlopen(Request(f"{self.url}/{name}", method=method, headers=headers), timeout=30).close()


def _answers(host: str, port: int) -> None:
    urlopen(f"http://{host}:{port}/moto-api/", timeout=5).close()
