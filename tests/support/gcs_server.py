# SPDX-License-Identifier: Apache-2.0
"""A loopback Google Cloud Storage: the part of its XML interface that clients of objects use, with generations and
conditional writes."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

# keys in one answer to a listing
PAGE = 1000


@dataclass(slots=True)
class _Object:
    data: bytes
    generation: int
    modified: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}-{self.generation}"'


@dataclass(slots=True)
class _Upload:
    key: str
    parts: dict[int, bytes] = field(default_factory=dict)


class GcsServer:
    """Context manager. `url` is what `GOOGLE_BASE_URL` names."""

    token = "a-token-of-this-server"

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, _Object]] = {}
        self.uploads: dict[str, _Upload] = {}
        self.generation = 0
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def env(self) -> dict[str, str]:
        """What a client needs to find the server."""
        return {"GOOGLE_BASE_URL": self.url, "GOOGLE_BEARER_TOKEN": self.token}

    def create_bucket(self, name: str) -> None:
        with self.lock:
            self.buckets[name] = {}

    def delete_bucket(self, name: str) -> None:
        with self.lock:
            del self.buckets[name]

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: GcsServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        bucket, key, query, _ = self._request()
        with self.owner.lock:
            if (objects := self._objects(bucket)) is None:
                return None
            if not key:
                return self._list(objects, query)
            found = objects.get(key)
        if found is None:
            return self._error(404, "NoSuchKey")
        headers = {"ETag": found.etag, "Last-Modified": found.modified, "x-goog-generation": str(found.generation)}
        if self.headers.get("If-None-Match") == found.etag:
            return self._send(304, headers=headers)
        return self._send(200, found.data, headers)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        bucket, key, query, body = self._request()
        with self.owner.lock:
            if (objects := self._objects(bucket)) is None:
                return None
            if "uploadId" in query:
                self.owner.uploads[query["uploadId"]].parts[int(query["partNumber"])] = body
                return self._send(200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
            expected = self.headers.get("x-goog-if-generation-match")
            held = objects[key].generation if key in objects else 0
            if expected is not None and int(expected) != held:
                return self._error(412, "PreconditionFailed")
            return self._send(200, headers=self._store(objects, key, body))

    def do_POST(self) -> None:
        bucket, key, query, _ = self._request()
        with self.owner.lock:
            if (objects := self._objects(bucket)) is None:
                return None
            if "uploadId" in query:
                upload = self.owner.uploads.pop(query["uploadId"])
                headers = self._store(objects, key, b"".join(data for _, data in sorted(upload.parts.items())))
                etag = escape(headers["ETag"])
                return self._send(200, self._xml("CompleteMultipartUploadResult", f"<ETag>{etag}</ETag>"), headers)
            name = f"upload-{len(self.owner.uploads)}-{self.owner.generation}-{key}"
            self.owner.uploads[name] = _Upload(key)
            body = f"<UploadId>{escape(name)}</UploadId>"
            return self._send(200, self._xml("InitiateMultipartUploadResult", body))

    def do_DELETE(self) -> None:
        bucket, key, _, _ = self._request()
        with self.owner.lock:
            if (objects := self._objects(bucket)) is None:
                return None
            if objects.pop(key, None) is None:
                return self._error(404, "NoSuchKey")
        return self._send(204)

    def _objects(self, bucket: str) -> dict[str, _Object] | None:
        """What a bucket holds; `None` if the request has been refused."""
        if self.headers.get("Authorization") != f"Bearer {self.owner.token}":
            self._error(401, "AuthenticationRequired")
        elif bucket not in self.owner.buckets:
            self._error(404, "NoSuchBucket")
        else:
            return self.owner.buckets[bucket]
        return None

    def _store(self, objects: dict[str, _Object], key: str, data: bytes) -> dict[str, str]:
        self.owner.generation += 1
        held = objects[key] = _Object(data, self.owner.generation, formatdate(usegmt=True))
        return {"ETag": held.etag, "x-goog-generation": str(held.generation)}

    def _list(self, objects: dict[str, _Object], query: dict[str, str]) -> None:
        after = query.get("continuation-token", "")
        keys = [key for key in sorted(objects) if key.startswith(query.get("prefix", "")) and key > after]
        page = keys[:PAGE]
        body = f"<IsTruncated>{str(len(keys) > PAGE).lower()}</IsTruncated>"
        if len(keys) > PAGE:
            body += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        for key in page:
            body += (
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(objects[key].etag)}</ETag><Size>{len(objects[key].data)}</Size></Contents>"
            )
        self._send(200, self._xml("ListBucketResult", body))

    def _request(self) -> tuple[str, str, dict[str, str], bytes]:
        """Bucket, key, query and body."""
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return bucket, key, query, self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _xml(self, root: str, body: str) -> bytes:
        return f'<?xml version="1.0" encoding="UTF-8"?><{root}>{body}</{root}>'.encode()

    def _error(self, status: int, code: str) -> None:
        self._send(status, self._xml("Error", f"<Code>{code}</Code>"))

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
