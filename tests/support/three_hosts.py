# SPDX-License-Identifier: Apache-2.0
"""Three network namespaces in a row, trainer - bucket - server: both ends reach the middle and not each other."""

from __future__ import annotations

import os
import subprocess
from types import TracebackType
from typing import Any, Self

BUCKET_ADDRESS = "10.213.0.1"
# of each end, and of the middle on that side
_LINKS = {"trainer": ("10.213.1.2", "10.213.1.1"), "server": ("10.213.2.2", "10.213.2.1")}
_FORWARD = "/proc/sys/net/ipv4/ip_forward"


class NotAvailable(Exception):
    """This machine or this user may not make network namespaces."""


class ThreeHosts:
    """Context manager; hosts are called `trainer`, `bucket` and `server`.

    Raises:
        NotAvailable: on entry, with what was refused.
    """

    def __init__(self) -> None:
        self._names = {host: f"dws{os.getpid()}-{host}" for host in ("trainer", "bucket", "server")}

    def __enter__(self) -> Self:
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__(None, None, None)
            said = getattr(error, "stderr", None) or str(error)
            raise NotAvailable(f"no network namespaces: {said.strip()}") from error
        return self

    def _make(self) -> None:
        for name in self._names.values():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        middle = self._names["bucket"]
        _ip("-n", middle, "addr", "add", f"{BUCKET_ADDRESS}/32", "dev", "lo")
        for number, (host, (near, far)) in enumerate(_LINKS.items()):
            name, ours, theirs = self._names[host], f"d{os.getpid()}a{number}", f"d{os.getpid()}b{number}"
            _ip("link", "add", ours, "netns", name, "type", "veth", "peer", "name", theirs, "netns", middle)
            _ip("-n", name, "addr", "add", f"{near}/24", "dev", ours)
            _ip("-n", name, "link", "set", ours, "up")
            _ip("-n", middle, "addr", "add", f"{far}/24", "dev", theirs)
            _ip("-n", middle, "link", "set", theirs, "up")
            # everything is sent to the middle, which has no reason to pass it on
            _ip("-n", name, "route", "add", "default", "via", far)
        # what a new namespace begins with differs from machine to machine
        self.run("bucket", "sh", "-c", f"echo 0 > {_FORWARD}")
        if self.read("bucket", _FORWARD).strip() != "0":
            raise OSError(f"{_FORWARD} is on and cannot be turned off")

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def address(self, host: str) -> str:
        return _LINKS[host][0]

    def command(self, host: str, *command: str) -> list[str]:
        """A command as it is run on a host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def run(self, host: str, *command: str, **how: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(host, *command), capture_output=True, text=True, **how)

    def read(self, host: str, path: str) -> str:
        """A file of `/proc/net` or `/proc/sys/net` as a host sees it."""
        return self.run(host, "cat", path, check=True).stdout

    def sent_bytes(self, host: str) -> int:
        """What a host has sent over its link."""
        return self._counters(host)[8]

    def received_bytes(self, host: str) -> int:
        """What a host has received over its link."""
        return self._counters(host)[0]

    def forwarded(self) -> int:
        """Packets that the middle has passed on from one link to another."""
        names, values = (line.split() for line in self.read("bucket", "/proc/net/snmp").splitlines()[:2])
        return int(values[names.index("ForwDatagrams")])

    def _counters(self, host: str) -> list[int]:
        lines = [line.split(":") for line in self.read(host, "/proc/net/dev").splitlines()[2:]]
        links = [numbers for name, numbers in lines if name.strip() != "lo"]
        assert len(links) == 1, f"{host} has other links: {lines}"
        return [int(number) for number in links[0].split()]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
