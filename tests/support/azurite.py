# SPDX-License-Identifier: Apache-2.0
"""Microsoft's own emulator of Azure Blob Storage, as a process on this machine."""

from __future__ import annotations

import hmac
import shutil
import subprocess
from base64 import b64decode, b64encode
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from server_process import ServerProcess

VERSION = "3.35.0"
# published with the emulator, of the only account it has
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_API = "2021-08-06"
_INSTALL_S = 600


def install(folder: Path) -> Path | None:
    """The emulator's program, installed below a folder if it is not; `None` where npm is not there or cannot do it."""
    program = folder / f"azurite-{VERSION}" / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        npm = shutil.which("npm")
        if npm is None:
            return None
        target = folder / f"azurite-{VERSION}"
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--no-save", "--prefix", str(target), f"azurite@{VERSION}"],
            capture_output=True,
            timeout=_INSTALL_S,
        )
    return program if program.exists() else None


class Azurite(ServerProcess):
    """Context manager.

    Args:
        program (`Path`): what [`install`] returned.
        folder (`Path`): for its log.
    """

    start_s = 120.0

    def __init__(self, program: Path, folder: Path):
        def command(port: int) -> list[str]:
            return [
                str(program),
                *("--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"),
                *("--blobHost", "127.0.0.1", "--blobPort", str(port)),
            ]

        super().__init__(command, folder)
        self.url = f"http://127.0.0.1:{self.port}/{_ACCOUNT}"

    @property
    def env(self) -> dict[str, str]:
        """What a client needs to find the server."""
        return {
            "AZURE_STORAGE_ENDPOINT": self.url,
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        }

    def create_bucket(self, name: str) -> None:
        self._send("PUT", name)

    def delete_bucket(self, name: str) -> None:
        self._send("DELETE", name)

    def _send(self, method: str, name: str) -> None:
        """A request for a container, which the client of objects cannot make, signed with the account's key."""
        date = formatdate(usegmt=True)
        resource = f"{urlsplit(self.url).path}/{name}"
        # twelve standard headers, none of which is sent
        signed = (
            method + 12 * "\n" + f"x-ms-date:{date}\nx-ms-version:{_API}\n/{_ACCOUNT}{resource}\nrestype:container"
        )
        signature = b64encode(hmac.digest(b64decode(_KEY), signed.encode(), "sha256")).decode()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"x-ms-date": date, "x-ms-version": _API, "Authorization": f"SharedKey {_ACCOUNT}:{signature}"}
        connection.request(method, f"{resource}?restype=container", headers=headers)
        answer = connection.getresponse()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {name}: azurite answered {answer.status}: {answer.read().decode()}")
        connection.close()
