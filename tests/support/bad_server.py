# SPDX-License-Identifier: Apache-2.0
"""A loopback HTTP server that answers as told: with errors, late, cut short or not at all; or passes requests on."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

# (status, error code in the body), or `close`, `hang`, `truncate`
Answer = tuple[int, str] | str


class BadServer:
    """Context manager; all settings may be changed while it runs.

    Attributes:
        answer (`Answer`): what every request is answered with.
        answers (`list`): what the next requests are answered with, before `answer` counts again.
        forward_to (`str`, *optional*): pass requests on to this server and its answers back.
        lose_answers (`int`): so many of the next forwarded requests take effect but are never answered.
        num_requests (`int`): requests so far.
        body_bytes (`int`): bytes of forwarded answers' bodies so far.
        reached (`threading.Event`): set by every request.
    """

    def __init__(self) -> None:
        self.answer: Answer = (200, "")
        self.answers: list[Answer] = []
        self.forward_to: str | None = None
        self.lose_answers = 0
        self.num_requests = 0
        self.body_bytes = 0
        self.reached = threading.Event()
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def next_answer(self) -> Answer:
        with self._lock:
            self.num_requests += 1
            self.reached.set()
            return self.answers.pop(0) if self.answers else self.answer

    def loses(self) -> bool:
        with self._lock:
            self.lose_answers -= 1
            return self.lose_answers >= 0


class _Handler(BaseHTTPRequestHandler):
    owner: BadServer
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.owner.next_answer()
        if self.owner.forward_to:
            self._forward(self.owner.forward_to, body)
        elif answer == "hang":
            self.owner.stopped.wait(60)
            self.close_connection = True
        elif answer == "close":
            self.close_connection = True
        elif answer == "truncate":
            self._send(200, {"ETag": '"x"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, b"cut", length=9)
            self.close_connection = True
        else:
            status, code = answer
            text = b"" if status == 304 else f"<Error><Code>{code}</Code></Error>".encode()
            self._send(status, {"ETag": '"x"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, text)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _forward(self, url: str, body: bytes) -> None:
        # the signature covers the host, which must stay what the client called
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        connection.request(self.command, self.path, body=body, headers=dict(self.headers))
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if self.owner.loses():
            self.close_connection = True
            return
        self.owner.body_bytes += len(content)
        headers = {key: value for key, value in response.getheaders() if key.lower() not in _HOP}
        length = response.getheader("Content-Length")
        self._send(response.status, headers, content, length=int(length) if length else None)

    def _send(self, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        self.send_response_only(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Tests read no access logs."""


_HOP = {"connection", "content-length", "transfer-encoding", "date", "server"}
