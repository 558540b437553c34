# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face bucket: batch writes through `huggingface_hub` and `hf_xet`, reads through the resolver."""

from __future__ import annotations

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from delta_wire.errors import (
    DeltaError,
    ObjectNotFoundError,
    SetupError,
    StoreUnavailableError,
)
from delta_wire.files import COPY_BYTES, arriving, staging
from delta_wire.stores.base import ObjectInfo, check_key, exists_already, is_key, require_whole, too_large
from delta_wire.stores.hf_client import Client, hub_error
from delta_wire.stores.hf_feed import Feed
from delta_wire.stores.patience import Patience, timeout_s
from delta_wire.stores.recent import Recent

_MAX_REDIRECTS = 5
# slower uploads than this count as hung
_LEAST_BYTES_PER_S = 100_000


class _Link(NamedTuple):
    """Where the content of an object lies, by the address of its bytes."""

    xet_hash: str
    size_bytes: int
    location: str


class HubStore:
    """Bucket `hf://buckets/NAMESPACE/NAME/PREFIX` on a Hugging Face hub.

    Hub and token are those of `huggingface_hub`: `HF_ENDPOINT`, `HF_TOKEN`, `hf auth login`. The hub replaces objects
    whole but has no conditional writes: `create_only` is `False`, an object that exists is refused, and of two
    writers at the same moment the later one wins.

    Args:
        bucket (`str`): `namespace/name`.
        prefix (`str`): where in it this bucket's objects lie; may be empty.
    """

    create_only = False
    least_listing_s = 2.0

    def __init__(self, bucket: str, prefix: str):
        if importlib.util.find_spec("huggingface_hub") is None or importlib.util.find_spec("hf_xet") is None:
            raise SetupError(
                f"hf://buckets/{bucket}: buckets of this kind need the packages huggingface_hub and hf-xet; install "
                "this package with its extra: pip install '.[hf]' in a checkout of delta-weight-sync"
            )
        self.url = f"hf://buckets/{bucket}" + (f"/{prefix}" if prefix else "")
        self.patience = Patience()
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._timeout_s = timeout_s()
        self._recent = Recent()
        self._client = Client(self._timeout_s)

    def ensure(self) -> None:
        """Make the bucket, private, unless it exists."""
        self._call(
            "", "create the bucket", lambda hub: hub.create_bucket(self._bucket, visibility="private", exist_ok=True)
        )
        # a token that can write but not list would fail only later
        self.list("LATEST")

    def close(self) -> None:
        self.patience.close()

    def get(self, key: str, max_bytes: int) -> bytes:
        check_key(key, self.url)

        def fetch(hub: Any) -> bytes:
            link = self._resolve(hub, key, max_bytes)
            known = self._recent.find(key)
            if known is not None and known[0] == link.xet_hash:
                return known[1]
            with self._content(key, link) as response:
                data = response.read(link.size_bytes + 1) if response else b""
            require_whole(self.url, key, link.size_bytes, len(data))
            self._recent.keep(key, link.xet_hash, data)
            return data

        return self._call(key, "read", fetch)

    def get_file(self, key: str, path: Path, max_bytes: int) -> None:
        check_key(key, self.url)

        def fetch(hub: Any) -> None:
            link = self._resolve(hub, key, max_bytes)
            with arriving(path) as out:
                with self._content(key, link) as response:
                    while response and out.tell() <= link.size_bytes and (part := response.read(COPY_BYTES)):
                        with staging(path):
                            out.write(part)
                require_whole(self.url, key, link.size_bytes, out.tell())

        self._call(key, "read", fetch)

    def put(self, key: str, data: bytes | Path, *, create_only: bool = False) -> None:
        check_key(key, self.url)
        # a source that cannot be opened is the caller's fault, not the bucket's
        size_bytes = data.stat().st_size if isinstance(data, Path) else len(data)
        if create_only and self.exists(key):
            raise exists_already(self.url, key)

        def send(hub: Any) -> None:
            # parts of an upload have no timeout of their own in the client
            with self._client.upload(self._timeout_s + size_bytes / _LEAST_BYTES_PER_S):
                hub.batch_bucket_files(self._bucket, add=[(data, self._prefix + key)])

        self._call(key, "write", send)
        self._client.prune()

    def list(self, prefix: str) -> list[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return []

        def fetch(hub: Any) -> list[ObjectInfo]:
            found = []
            with suppress(ObjectNotFoundError), self._errors(prefix, "list"):
                for file in hub.list_bucket_tree(self._bucket, self._prefix + prefix or None, recursive=True):
                    key = file.path.removeprefix(self._prefix)
                    if (
                        file.type == "file"
                        and file.path.startswith(self._prefix)
                        and key.startswith(prefix)
                        and is_key(key)
                    ):
                        found.append(ObjectInfo(key, file.size))
            return found

        return sorted(self._call(prefix, "list", fetch), key=lambda info: info.key)

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._prefix + check_key(key, self.url) for key in keys]
        if not paths:
            return

        def remove(hub: Any) -> None:
            from huggingface_hub.errors import BucketBatchError

            try:
                hub.batch_bucket_files(self._bucket, delete=paths)
            except BucketBatchError as error:
                # objects that were not there cannot be removed, and need not be
                failed = [str(failure.get("path")) for failure in error.failures]
                if any(True for _ in hub.get_bucket_paths_info(self._bucket, failed)):
                    raise

        self._call(paths[0].removeprefix(self._prefix), "delete", remove)

    def exists(self, key: str) -> bool:
        check_key(key, self.url)
        try:
            self._call(key, "look for", lambda hub: self._resolve(hub, key, None))
        except ObjectNotFoundError:
            return False
        return True

    def watch(self, prefix: str, on_change: Callable[[], None]) -> Callable[[], None]:
        """Follow the hub's feed of changes in a thread of its own, which the returned function ends."""
        feed = Feed(self._bucket, self._prefix + prefix, on_change)
        feed.start()
        return feed.stop

    def _resolve(self, hub: Any, key: str, max_bytes: int | None) -> _Link:
        """One small request; the content itself is not touched."""
        address = f"{hub.endpoint}/buckets/{self._bucket}/resolve/{quote(self._prefix + key, safe='')}"
        for _ in range(_MAX_REDIRECTS):
            response = self._client.head(address)
            xet_hash, size = response.headers.get("X-Xet-Hash"), response.headers.get("X-Linked-Size")
            target = urljoin(address, response.headers.get("Location", address))
            if xet_hash and size is not None and size.isdecimal():
                if max_bytes is not None and int(size) > max_bytes:
                    raise too_large(self.url, key, int(size), max_bytes)
                return _Link(xet_hash, int(size), target)
            # the token is shown to nobody but the hub
            if target == address or urlsplit(target)[:2] != urlsplit(hub.endpoint)[:2]:
                break
            address = target
        raise StoreUnavailableError(
            f"{self.url}/{key}: cannot read: the hub's answer names no content; check HF_ENDPOINT, which is "
            f"{hub.endpoint}"
        )

    @contextmanager
    def _content(self, key: str, link: _Link) -> Iterator[Any]:
        if link.size_bytes == 0:
            yield None
            return
        # not through the hub's client, which writes addresses into logs: this one is signed
        try:
            with urllib.request.urlopen(
                urllib.request.Request(link.location, headers={"User-Agent": "delta-weight-sync"}),
                timeout=self._timeout_s,
            ) as response:
                yield response
        except urllib.error.HTTPError as error:
            error.close()
            # links expire: the next try gets another one
            raise StoreUnavailableError(
                f"{self.url}/{key}: cannot read: the storage behind the hub answered {error.code}; try again later"
            ) from None

    def _call(self, key: str, action: str, call: Callable[[Any], Any]) -> Any:
        def once() -> Any:
            with self._errors(key, action), self._client.guarded() as hub:
                return call(hub)

        return self.patience(once)

    @contextmanager
    def _errors(self, key: str, action: str) -> Iterator[None]:
        """Translate what the client says into the errors of a store; its own text may contain signed addresses."""
        try:
            yield
        except DeltaError:
            raise
        except Exception as error:
            raise hub_error(error, self.url, self._bucket, key, action, self._timeout_s) from None
