# SPDX-License-Identifier: Apache-2.0
"""A bucket in an object store: Amazon S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_wire.errors import (
    BucketNotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
    RateLimitedError,
    SetupError,
    StoreError,
    StorePermissionError,
    StoreRefusedError,
    StoreUnavailableError,
)
from delta_wire.files import COPY_BYTES, arriving, staging
from delta_wire.stores.base import ObjectInfo, check_key, exists_already, is_key, no_object, require_whole, too_large
from delta_wire.stores.patience import CONNECT_TIMEOUT_S, TIMEOUT_VARIABLE, Patience, timeout_s
from delta_wire.stores.recent import Recent

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,100})</Code>")
_MISSING_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified (?:bucket|container) does not exist")
# without other credentials a client asks the machine for those of its role
_METADATA = re.compile(r"/latest/api/token|/latest/meta-data|metadata\.google\.internal|/metadata/identity")
# a single request holds the whole object in memory and must be sent within the timeout
_MULTIPART_FROM_BYTES = 32 << 20
_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 4
_DELETE_AT_ONCE = 1000
# (name of the service, environment variables that may name another address of it, where its credentials come from)
_SERVICES = {
    "s3": (
        "S3",
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role of the machine",
    ),
    "gs": (
        "Google Cloud Storage",
        ("GOOGLE_BASE_URL",),
        "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or a role of the machine",
    ),
    "az": (
        "Azure Blob Storage",
        ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or another credential, or a role of the machine",
    ),
}


class ObjectStore:
    """Bucket `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`, through `obstore`.

    Endpoint, region and credentials come from the places that client reads: environment variables and the roles of
    the machine. An object appears complete or not at all; create-only writes are conditional requests.

    Args:
        scheme (`str`): `s3`, `gs` or `az`.
        bucket (`str`): name of the bucket or container, which must exist.
        prefix (`str`): where in it this bucket's objects lie; may be empty.
    """

    least_listing_s = 1.0

    def __init__(self, scheme: str, bucket: str, prefix: str):
        if importlib.util.find_spec("obstore") is None:
            raise SetupError(
                f"{scheme}://{bucket}: buckets of this kind need the package obstore, which is not installed; "
                "install this package with its extra: pip install '.[s3]' in a checkout of delta-weight-sync"
            )
        self.url = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
        self.create_only = True
        self._scheme, self._bucket, self._prefix = scheme, bucket, prefix
        self._service, self._endpoints, self._credentials = _SERVICES[scheme]
        self._timeout_s = timeout_s()
        self.patience = Patience()
        self._recent = Recent()
        # made at the first use: the client's threads do not survive a fork
        self._made: tuple[int, S3Store | GCSStore | AzureStore] | None = None

    def ensure(self) -> None:
        """Find out whether the bucket can be written to, and whether it honours conditions.

        The bucket itself is never made: where it lies and who may read it is its owner's choice.
        """
        # a hidden name, which is no key
        key = f".probe-{secrets.token_hex(8)}"
        self._put(key, b"1", create_only=True)
        try:
            self._put(key, b"2", create_only=True)
        except ObjectExistsError:
            self.create_only = True
        else:
            # some services ignore the condition; claiming a fence that is not there would be worse than none
            self.create_only = False
        finally:
            with suppress(StoreError):
                self._call("", "delete", lambda client, obstore: obstore.delete(client, key))

    def watch(self, prefix: str, on_change: Callable[[], None]) -> Callable[[], None] | None:
        """There is no feed of changes."""
        return None

    def close(self) -> None:
        self.patience.close()
        self._made = None

    def get(self, key: str, max_bytes: int) -> bytes:
        check_key(key, self.url)

        def fetch(client: Any, obstore: Any) -> bytes:
            known = self._recent.find(key)
            try:
                result = obstore.get(client, key, options={"if_none_match": known[0]} if known else None)
            except obstore.exceptions.NotModifiedError:
                assert known is not None, "only a conditional request is answered with 304"
                data = known[1]
            else:
                self._require_size(key, result.meta["size"], max_bytes)
                data = bytes(result.bytes())
                require_whole(self.url, key, result.meta["size"], len(data))
                self._recent.keep(key, result.meta["e_tag"], data)
            self._require_size(key, len(data), max_bytes)
            return data

        return self._call(key, "read", fetch)

    def get_file(self, key: str, path: Path, max_bytes: int) -> None:
        check_key(key, self.url)

        def fetch(client: Any, obstore: Any) -> None:
            result = obstore.get(client, key)
            size_bytes = result.meta["size"]
            self._require_size(key, size_bytes, max_bytes)
            with arriving(path) as out:
                for part in result.stream(min_chunk_size=COPY_BYTES):
                    with staging(path):
                        out.write(part)
                require_whole(self.url, key, size_bytes, out.tell())

        self._call(key, "read", fetch)

    def put(self, key: str, data: bytes | Path, *, create_only: bool = False) -> None:
        check_key(key, self.url)
        if create_only and not self.create_only and self.exists(key):
            raise exists_already(self.url, key)
        self._put(key, data, create_only=create_only and self.create_only)

    def list(self, prefix: str) -> list[ObjectInfo]:
        # these clients list folders, not prefixes of keys
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return []

        def fetch(client: Any, obstore: Any) -> list[ObjectInfo]:
            return [
                ObjectInfo(meta["path"], meta["size"])
                for page in obstore.list(client, folder or None)
                for meta in page
                if meta["path"].startswith(prefix) and is_key(meta["path"])
            ]

        return sorted(self._call(prefix, "list", fetch), key=lambda info: info.key)

    def delete(self, keys: Iterable[str]) -> None:
        checked = [check_key(key, self.url) for key in keys]
        for start in range(0, len(checked), _DELETE_AT_ONCE):
            batch = checked[start : start + _DELETE_AT_ONCE]

            def remove(client: Any, obstore: Any, batch: list[str] = batch) -> None:
                if self._scheme == "s3":
                    obstore.delete(client, batch)
                    return
                # only S3 does not mind objects that do not exist
                for key in batch:
                    try:
                        obstore.delete(client, key)
                    except FileNotFoundError as error:
                        if _MISSING_BUCKET.search(str(error)):
                            raise

            self._call(batch[0], "delete", remove)

    def exists(self, key: str) -> bool:
        check_key(key, self.url)
        try:
            self._call(key, "look for", lambda client, obstore: obstore.head(client, key))
        except ObjectNotFoundError:
            # an answer without a body does not tell a missing object from a missing bucket
            self._call(key, "look for", lambda client, obstore: next(iter(obstore.list(client, chunk_size=1)), None))
            return False
        return True

    def _put(self, key: str, data: bytes | Path, *, create_only: bool) -> None:
        # a source that cannot be opened is the caller's fault, not the bucket's
        size_bytes = data.stat().st_size if isinstance(data, Path) else len(data)
        multipart = size_bytes > _MULTIPART_FROM_BYTES and not create_only
        unsure = False

        def send(client: Any, obstore: Any) -> None:
            nonlocal unsure
            again, unsure = unsure, True
            try:
                obstore.put(
                    client,
                    key,
                    data,
                    mode="create" if create_only else "overwrite",
                    use_multipart=multipart,
                    chunk_size=_PART_BYTES,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            except obstore.exceptions.AlreadyExistsError:
                # a try before this one may have written it although its answer was lost
                if not (create_only and again and self._holds(client, obstore, key, data)):
                    raise

        self._call(key, "create" if create_only else "write", send)

    def _holds(self, client: Any, obstore: Any, key: str, data: bytes | Path) -> bool:
        expected = data.read_bytes() if isinstance(data, Path) else data
        return bytes(obstore.get(client, key).bytes()) == expected

    def _call(self, key: str, action: str, call: Callable[[Any, Any], Any]) -> Any:
        def once() -> Any:
            with self._errors(key, action) as obstore:
                return call(self._client(), obstore)

        return self.patience(once)

    def _client(self) -> S3Store | GCSStore | AzureStore:
        if self._made is None or self._made[0] != os.getpid():
            self._made = os.getpid(), self._make_client()
        return self._made[1]

    def _make_client(self) -> S3Store | GCSStore | AzureStore:
        from datetime import timedelta

        from obstore.store import AzureStore, GCSStore, S3Store

        endpoint = next((os.environ[name] for name in self._endpoints if os.environ.get(name)), "")
        options: Any = {
            "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, self._timeout_s)),
            "read_timeout": timedelta(seconds=self._timeout_s),
            # of a whole transfer, which is as long as the object is large
            "timeout": timedelta(days=1),
            # whoever names an address without encryption means it
            "allow_http": endpoint.startswith("http://"),
            "user_agent": "delta-weight-sync",
        }
        # repeated here, where a lost answer can be told from a refusal
        once: Any = {"max_retries": 0}
        prefix = self._prefix or None
        try:
            if self._scheme == "s3":
                return S3Store(self._bucket, prefix=prefix, client_options=options, retry_config=once)
            if self._scheme == "gs":
                return GCSStore(self._bucket, prefix=prefix, client_options=options, retry_config=once)
            return AzureStore(self._bucket, prefix=prefix, client_options=options, retry_config=once)
        except Exception as error:
            raise SetupError(
                f"{self.url}: the client cannot be set up ({type(error).__name__}); credentials come from "
                f"{self._credentials}"
            ) from None

    def _require_size(self, key: str, size_bytes: int, max_bytes: int) -> None:
        if size_bytes > max_bytes:
            raise too_large(self.url, key, size_bytes, max_bytes)

    @contextmanager
    def _errors(self, key: str, action: str) -> Iterator[Any]:
        """Translate what the client says into the errors of a store.

        Its own text is not passed on and not chained: it may contain addresses with signatures.
        """
        import obstore

        began_s = time.monotonic()
        refused = obstore.exceptions
        try:
            yield obstore
        except (StoreError, SetupError):
            raise
        except FileNotFoundError as error:
            raise self._missing(key, str(error)) from None
        except refused.BaseError as error:
            text = str(error)
            # with S3 a 409 says that another conditional write is just being decided
            undecided = self._scheme == "s3" and "status code: 409" in text
            if action == "create" and isinstance(error, refused.AlreadyExistsError) and not undecided:
                raise exists_already(self.url, key) from None
            raise self._translate(key, action, text, time.monotonic() - began_s) from None

    def _missing(self, key: str, text: str) -> StoreError:
        # only a missing bucket can be missing for a write
        if _MISSING_BUCKET.search(text) or "performing PUT" in text or "performing POST" in text:
            return BucketNotFoundError(
                f"{self.url}: {self._service} knows no bucket {self._bucket!r}; check the name, region and endpoint, "
                "or create it with the tools of the service"
            )
        return no_object(self.url, key)

    def _translate(self, key: str, action: str, text: str, took_s: float) -> StoreError:
        status = _STATUS.search(text)
        code = _CODE.search(text)
        number = int(status.group(1)) if status else None
        where = f"{self.url}/{key}: cannot {action}: "
        said = f"{self._service} answered {number}" + (f" {code.group(1)}" if code else "")
        if _METADATA.search(text):
            return StorePermissionError(f"{where}there are no credentials; set {self._credentials}, for this process")
        if number is None:
            if "TimedOut" in text or took_s >= self._timeout_s:
                reason = f"no answer from {self._service} within {self._timeout_s:g} s ({TIMEOUT_VARIABLE})"
            elif "ConnectionRefused" in text or "dns error" in text or "Connect" in text:
                reason = f"{self._service} cannot be reached; check the network and the endpoint"
            else:
                reason = f"the answer of {self._service} was cut short"
            return StoreUnavailableError(where + reason)
        if number == 404:
            return self._missing(key, text)
        if number in (401, 403):
            return StorePermissionError(
                f"{where}{said}; credentials come from {self._credentials}. Grant them reading and writing of objects "
                "below this address, listing and deleting, or use others"
            )
        if number == 429 or (code and code.group(1) in ("SlowDown", "ServerBusy", "TooManyRequests")):
            return RateLimitedError(f"{where}{said}: asked too often; poll more slowly or use fewer readers")
        if number >= 500 or number in (408, 409):
            return StoreUnavailableError(f"{where}{said}; try again later")
        return StoreRefusedError(f"{where}{said}; check the bucket's address, region and endpoint")
