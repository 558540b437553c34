# SPDX-License-Identifier: Apache-2.0
"""A hub on this machine, real enough for the real `huggingface_hub` and `hf_xet`, that misbehaves on command.

    with HubServer() as hub:
        os.environ.update(hub.env)
        hub.fault(r"POST .*/batch", status=500, times=2)

As a program it prints the environment that its clients need, one `NAME=value` a line, and serves until it is killed.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

from hub_content import Content

WRITE_TOKEN, READ_TOKEN = "hf_write_token_of_the_tests", "hf_read_token_of_the_tests"
_CAS_TOKEN = "cas-token-of-the-tests"
_PAGE = 1000
_PING_S = 0.5


@dataclass
class Fault:
    """What happens to requests that match, instead of or beside the answer.

    Args:
        pattern (`re.Pattern`): searched in `METHOD /path` of a request.
        times (`int`): for so many requests.
        after (`int`): the first ones that match are spared.
        status (`int`, *optional*): answer with this status; nothing takes effect.
        headers (`dict`): of that answer.
        delay_s (`float`): before anything else happens.
        hang (`bool`): never answer; nothing takes effect.
        close (`bool`): close the connection without an answer; nothing takes effect.
        lose (`bool`): let it take effect, then close the connection without an answer.
        truncate (`bool`): send half of the answer's body.
        partial (`str`, *optional*): operations of a batch on paths that contain this fail, the others take effect.
        stale (`bool`): answer a listing with what it was before the last batch.
    """

    pattern: re.Pattern[str]
    times: int = 1
    after: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    hang: bool = False
    close: bool = False
    lose: bool = False
    truncate: bool = False
    partial: str | None = None
    stale: bool = False


@dataclass
class File:
    """One path of a bucket."""

    xet_hash: str
    size_bytes: int
    mtime: str


@dataclass
class Bucket:
    """Paths, what they were before the last batch, and the feed of changes."""

    files: dict[str, File] = field(default_factory=dict)
    before: dict[str, File] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)
    visibility: str = "public"


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
        self._servers = [_Server((host, 0), type("Handler", (_Handler,), {"hub": self})) for _ in range(2)]
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


class _Refuse(Exception):
    def __init__(self, status: int, code: str = "", body: dict[str, Any] | None = None):
        super().__init__(status, code)
        self.status, self.code, self.body = status, code, body


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    # a request is many small writes; without this each waits for an acknowledgement
    wbufsize = -1

    def _handle(self) -> None:
        self._body = self._read_body()
        path = unquote(urlsplit(self.path).path)
        self._fault = self.hub.next_fault(f"{self.command} {path}")
        if self._fault.delay_s:
            self.hub.stopped.wait(self._fault.delay_s)
        if self._fault.hang:
            self.hub.stopped.wait(600)
        if self._fault.hang or self._fault.close:
            self.close_connection = True
            return
        try:
            if self._fault.status is not None:
                raise _Refuse(self._fault.status)
            for method, pattern, answer in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in method:
                    answer(self, **{name: text for name, text in match.groupdict().items() if text is not None})
                    return
            raise _Refuse(404)
        except _Refuse as refusal:
            headers = {**self._fault.headers} | ({"X-Error-Code": refusal.code} if refusal.code else {})
            self._send_json(refusal.body or {"error": f"refused with {refusal.status}"}, refusal.status, headers)

    do_GET = do_HEAD = do_POST = do_DELETE = do_PUT = _handle

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    # ---- the hub

    def _bucket(self, bucket: str, write: bool = False) -> Bucket:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given not in (WRITE_TOKEN, READ_TOKEN):
            raise _Refuse(401)
        with self.hub.lock:
            found = self.hub.buckets.get(bucket)
        if found is None:
            raise _Refuse(404, "RepoNotFound")
        if write and given != WRITE_TOKEN:
            raise _Refuse(403)
        return found

    def _create(self, bucket: str) -> None:
        if self.headers.get("Authorization") != f"Bearer {WRITE_TOKEN}":
            raise _Refuse(403)
        url = {"url": f"{self.hub.url}/buckets/{bucket}"}
        with self.hub.lock:
            if bucket in self.hub.buckets:
                raise _Refuse(409, body=url)
            self.hub.buckets[bucket] = Bucket(visibility=json.loads(self._body or b"{}").get("visibility", "public"))
        self._send_json(url)

    def _info(self, bucket: str) -> None:
        found = self._bucket(bucket)
        files, private = found.files, found.visibility == "private"
        info = {"id": bucket, "private": private, "createdAt": _now(), "updatedAt": _now(), "totalFiles": len(files)}
        self._send_json({**info, "size": sum(file.size_bytes for file in files.values())})

    def _tree(self, bucket: str, prefix: str = "") -> None:
        found = self._bucket(bucket)
        query = parse_qs(urlsplit(self.path).query)
        with self.hub.lock:
            files = found.before if self._fault.stale else found.files
            rows = [_row(path, file) for path, file in sorted(files.items()) if path.startswith(prefix)]
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + _PAGE < len(rows):
            here = f"{self.hub.url}/api/buckets/{bucket}/tree" + (f"/{quote(prefix, safe='')}" if prefix else "")
            headers["Link"] = f'<{here}?recursive=true&cursor={start + _PAGE}>; rel="next"'
        self._send_json(rows[start : start + _PAGE], headers=headers)

    def _paths_info(self, bucket: str) -> None:
        found = self._bucket(bucket)
        wanted = json.loads(self._body)["paths"]
        with self.hub.lock:
            self._send_json([_row(path, found.files[path]) for path in wanted if path in found.files])

    def _batch(self, bucket: str) -> None:
        found = self._bucket(bucket, write=True)
        operations = [json.loads(line) for line in self._body.splitlines() if line.strip()]
        failed = []
        with self.hub.changed:
            found.before = dict(found.files)
            for operation in operations:
                path = operation["path"]
                if self._fault.partial is not None and self._fault.partial in path:
                    failed.append({"path": path, "error": "could not be stored"})
                elif operation["type"] == "deleteFile":
                    if found.files.pop(path, None) is None:
                        failed.append({"path": path, "error": "file not found"})
                    else:
                        found.changes.append({"path": path, "op": "delete"})
                else:
                    name = operation["xetHash"]
                    found.files[path] = File(name, self.hub.content.size_bytes(name), _now())
                    found.changes.append({"path": path, "op": "add", "xetHash": name})
            self.hub.changed.notify_all()
        status = 422 if failed and len(failed) == len(operations) else 200
        succeeded = len(operations) - len(failed)
        answer = {"success": not failed, "processed": len(operations), "succeeded": succeeded, "failed": failed}
        self._send_json(answer, status)

    def _token(self, bucket: str, kind: str) -> None:
        self._bucket(bucket, write=kind == "write")
        self._send_json(
            {"accessToken": _CAS_TOKEN, "exp": int(time.time()) + 3600, "casUrl": self.hub.content_url},
            headers={
                "X-Xet-Cas-Url": self.hub.content_url,
                "X-Xet-Access-Token": _CAS_TOKEN,
                "X-Xet-Token-Expiration": str(int(time.time()) + 3600),
            },
        )

    def _resolve(self, bucket: str, path: str) -> None:
        with self.hub.lock:
            file = self._bucket(bucket).files.get(path)
        if file is None:
            raise _Refuse(404, "EntryNotFound")
        headers = {
            "Location": f"{self.hub.content_url}/content/{file.xet_hash}?X-Signature=secret-of-the-link",
            "X-Xet-Hash": file.xet_hash,
            "X-Linked-Size": str(file.size_bytes),
            "X-Linked-Etag": f'"{file.xet_hash}"',
            "X-Xet-Refresh-Route": f"{self.hub.url}/api/buckets/{bucket}/xet-read-token",
        }
        self._send(302, b"", headers)

    def _events(self, bucket: str) -> None:
        found = self._bucket(bucket)
        if not self.hub.feed:
            raise _Refuse(501)
        self.send_response_only(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        sent = len(found.changes)
        self._write_event("ready", {"cursor": str(sent)})
        while not self.hub.stopped.is_set():
            with self.hub.changed:
                self.hub.changed.wait_for(
                    lambda sent=sent: len(found.changes) > sent or self.hub.stopped.is_set(), _PING_S
                )
                changes = found.changes[sent:]
            sent += len(changes)
            if changes:
                self._write_event("changes", {"cursor": str(sent), "changes": changes})
            else:
                self.wfile.write(b": ping\n\n")
            self.wfile.flush()

    def _write_event(self, name: str, data: dict[str, Any]) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    # ---- the content store

    def _require_content_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {_CAS_TOKEN}":
            raise _Refuse(401)

    def _xorb_upload(self, name: str) -> None:
        self._require_content_token()
        self.hub.content.add_xorb(name, self._body)
        self._send_json({"was_inserted": True})

    def _shard_upload(self) -> None:
        self._require_content_token()
        self.hub.content.add_shard(self._body)
        self._send_json({"result": 1})

    def _reconstruction(self, name: str) -> None:
        self._require_content_token()
        self._send_json(self.hub.content.reconstruction(name, self.hub.content_url))

    def _xorb(self, name: str) -> None:
        self._send_range(self.hub.content.xorbs[name])

    def _file(self, name: str) -> None:
        if parse_qs(urlsplit(self.path).query).get("X-Signature") != ["secret-of-the-link"]:
            raise _Refuse(403)
        if "Authorization" in self.headers:
            # real storage refuses links that are signed twice; and a token must not leave the hub
            raise _Refuse(400)
        self._send_range(self.hub.content.read(name))

    def _send_range(self, data: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self._send(200, data, {"Content-Type": "application/octet-stream"})
            return
        start, end = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
        part = data[start : end + 1]
        self._send(206, part, {"Content-Range": f"bytes {start}-{end}/{len(data)}"})

    # ---- answers

    def _send_json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self._fault.lose:
            self.close_connection = True
            return
        self.send_response_only(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self._fault.truncate:
            body = body[: len(body) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            with self.hub.lock:
                self.hub.body_bytes += len(body)
            self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Tests read the counters instead."""


_BUCKET = r"/api/buckets/(?P<bucket>[\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[tuple[str, ...], str, Callable[..., None]]] = [
    (("POST",), _BUCKET, _Handler._create),
    (("GET",), _BUCKET, _Handler._info),
    (("GET",), _BUCKET + "/tree(?:/(?P<prefix>.+))?", _Handler._tree),
    (("POST",), _BUCKET + "/paths-info", _Handler._paths_info),
    (("POST",), _BUCKET + "/batch", _Handler._batch),
    (("GET",), _BUCKET + "/xet-(?P<kind>read|write)-token", _Handler._token),
    (("GET",), _BUCKET + "/events", _Handler._events),
    (("GET", "HEAD"), r"/buckets/(?P<bucket>[\w.-]+/[\w.-]+)/resolve/(?P<path>.+)", _Handler._resolve),
    (("POST",), r"/v1/xorbs/default/(?P<name>\w+)", _Handler._xorb_upload),
    (("POST",), r"/v1/shards", _Handler._shard_upload),
    (("GET",), r"/v1/reconstructions/(?P<name>\w+)", _Handler._reconstruction),
    (("GET",), r"/xorb/(?P<name>\w+)", _Handler._xorb),
    (("GET", "HEAD"), r"/content/(?P<name>\w+)", _Handler._file),
]


def _row(path: str, file: File) -> dict[str, Any]:
    return {
        "type": "file",
        "path": path,
        "size": file.size_bytes,
        "xetHash": file.xet_hash,
        "mtime": file.mtime,
        "uploadedAt": file.mtime,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def main() -> None:
    with HubServer(*sys.argv[1:2]) as hub:
        print(*(f"{name}={value}" for name, value in hub.env.items()), sep="\n", flush=True)
        hub.stopped.wait()


if __name__ == "__main__":
    main()
