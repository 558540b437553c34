# SPDX-License-Identifier: Apache-2.0
"""The answers of the hub of hub_server.py: its API, its resolver and the storage behind it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from hub_state import READ_TOKEN, WRITE_TOKEN, Bucket, File

if TYPE_CHECKING:
    from hub_server import HubServer

_CAS_TOKEN = "cas-token-of-the-tests"
_PAGE = 1000
_PING_S = 0.5


class _Refuse(Exception):
    def __init__(self, status: int, code: str = "", body: dict[str, Any] | None = None):
        super().__init__(status, code)
        self.status, self.code, self.body = status, code, body


class Handler(BaseHTTPRequestHandler):
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
    (("POST",), _BUCKET, Handler._create),
    (("GET",), _BUCKET, Handler._info),
    (("GET",), _BUCKET + "/tree(?:/(?P<prefix>.+))?", Handler._tree),
    (("POST",), _BUCKET + "/paths-info", Handler._paths_info),
    (("POST",), _BUCKET + "/batch", Handler._batch),
    (("GET",), _BUCKET + "/xet-(?P<kind>read|write)-token", Handler._token),
    (("GET",), _BUCKET + "/events", Handler._events),
    (("GET", "HEAD"), r"/buckets/(?P<bucket>[\w.-]+/[\w.-]+)/resolve/(?P<path>.+)", Handler._resolve),
    (("POST",), r"/v1/xorbs/default/(?P<name>\w+)", Handler._xorb_upload),
    (("POST",), r"/v1/shards", Handler._shard_upload),
    (("GET",), r"/v1/reconstructions/(?P<name>\w+)", Handler._reconstruction),
    (("GET",), r"/xorb/(?P<name>\w+)", Handler._xorb),
    (("GET", "HEAD"), r"/content/(?P<name>\w+)", Handler._file),
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
