# SPDX-License-Identifier: Apache-2.0
"""A hub on this machine, real enough for the real `huggingface_hub` and `hf_xet`, that misbehaves on command.

    with HubServer() as hub:
        os.environ.update(hub.env)
        hub.fault(r"POST .*/batch", status=500, times=2)

As a program it prints the environment that its clients need, one `NAME=value` a line, and serves until it is killed.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from hub_content import Content
from hub_handler import Handler
from hub_state import WRITE_TOKEN, Bucket, Fault


class HubServer:
    """Hub and content store on two ports of one address, as threads of this process.

    Args:
        host (`str`, *optional*, defaults to `"127.0.0.1"`): address to listen on.

    Attributes:
        buckets (`dict`): by `namespace/name`.
        requests (`Counter`): by `METHOD /path`, hub and content store together.
        feed (`bool`): whether the feed of changes is served.
    """

    def __init__(self, host: str = "127.0.0.1"):
        self.buckets: dict[str, Bucket] = {}
        self.content = Content()
        self.requests: Counter[str] = Counter()
        self.body_bytes = 0
        self.feed = True
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.stopped = threading.Event()
        self._faults: list[Fault] = []
        self._servers = [_Server((host, 0), type("Handler", (Handler,), {"hub": self})) for _ in range(2)]
        # two origins: the client must not take the content's address for one of the hub
        self.url, self.content_url = (f"http://{host}:{server.server_port}" for server in self._servers)
        self._threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            for server in self._servers
        ]

    @property
    def env(self) -> dict[str, str]:
        """What a client needs to find the hub."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": WRITE_TOKEN, "HF_HUB_DISABLE_TELEMETRY": "1"}

    def fault(self, pattern: str, **what: Any) -> Fault:
        """Plan a [`Fault`] for requests that match a regular expression."""
        fault = Fault(re.compile(pattern), **what)
        with self.lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Forget all faults; what hangs goes on hanging."""
        with self.lock:
            self._faults.clear()

    def next_fault(self, request: str) -> Fault:
        with self.lock:
            self.requests[request] += 1
            for fault in self._faults:
                if fault.times > 0 and fault.pattern.search(request):
                    if fault.after > 0:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault
        return Fault(re.compile(""))

    def counted(self, pattern: str) -> int:
        """Requests so far whose `METHOD /path` matches."""
        with self.lock:
            return sum(count for request, count in self.requests.items() if re.search(pattern, request))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stopped.set()
        with self.changed:
            self.changed.notify_all()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        # clients that were killed in the middle of a request are what the tests are about
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def main() -> None:
    with HubServer(*sys.argv[1:2]) as hub:
        print(*(f"{name}={value}" for name, value in hub.env.items()), sep="\n", flush=True)
        hub.stopped.wait()


if __name__ == "__main__":
    main()
