# SPDX-License-Identifier: Apache-2.0
"""`huggingface_hub` with time limits, without long silent waits, and with errors that have names.

By itself that client waits for ever for an answer, sleeps for minutes when it is rate limited, and raises whatever the
layers below it raise. What is changed here holds inside [`Client.guarded`] only: other users of the client in the same
process see it as it is.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPException
from pathlib import Path
from typing import Any

from delta_wire.errors import (
    BucketNotFoundError,
    RateLimitedError,
    SetupError,
    StoreError,
    StorePermissionError,
    StoreRefusedError,
    StoreUnavailableError,
)
from delta_wire.stores.base import no_object
from delta_wire.stores.patience import CONNECT_TIMEOUT_S, TIMEOUT_VARIABLE

# what `hf_xet` says about an answer, for example `(403 Forbidden)`
_XET_STATUS = re.compile(r"\((\d{3}) [A-Za-z ]+\)")
_KEEP_SHARDS = 64
_PRUNE_EVERY = 64
_ABORT_AGAIN_S = 1.0
_limit_s: ContextVar[float | None] = ContextVar("delta_wire_hub_limit_s", default=None)
_scratch_lock = threading.Lock()
_scratch: Path | None = None


class Unanswered(Exception):
    """The hub could not be reached, or did not answer in time, or not in full."""


class Client:
    """The hub's client for one store.

    Args:
        timeout_s (`float`): seconds without a byte after which a request counts as lost.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._num_uploads = 0

    @contextmanager
    def guarded(self) -> Iterator[Any]:
        """The `HfApi`, with limits on what this thread asks for."""
        from huggingface_hub import HfApi, constants

        if constants.is_offline_mode():
            raise SetupError(
                "HF_HUB_OFFLINE is set, which forbids every request to a hub; unset it to use hf:// buckets"
            )
        _prepare_xet(self._timeout_s)
        self._guard_session()
        token = _limit_s.set(self._timeout_s)
        try:
            yield HfApi()
        finally:
            _limit_s.reset(token)

    def head(self, address: str) -> Any:
        """Answer to a HEAD request with the user's token; a redirect is not followed."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        response = get_session().request("HEAD", address, headers=headers, follow_redirects=False)
        hf_raise_for_status(response)
        return response

    @contextmanager
    def upload(self, seconds: float) -> Iterator[None]:
        """For an upload: no progress bars, and an end after so many seconds.

        Another upload of this process that is under way at that moment ends, too.
        """
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
        from huggingface_hub.utils._xet import abort_xet_session, get_xet_session

        session, ended = get_xet_session(), threading.Event()

        def watch() -> None:
            if not ended.wait(seconds):
                abort_xet_session()
            # that ends and forgets the session: what has only begun since runs in another one, and must end, too
            while not ended.wait(_ABORT_AGAIN_S):
                session.sigint_abort()
                abort_xet_session()

        threading.Thread(target=watch, name="delta-upload-limit", daemon=True).start()
        quiet = are_progress_bars_disabled()
        try:
            if not quiet:
                disable_progress_bars()
            yield
        finally:
            ended.set()
            if not quiet:
                enable_progress_bars()

    def prune(self) -> None:
        """Remove old notes of `hf_xet`, which keeps one file an upload and never removes any."""
        self._num_uploads += 1
        if _scratch is None or self._num_uploads % _PRUNE_EVERY:
            return
        notes = sorted(_scratch.rglob("*.mdb"), key=lambda path: path.stat().st_mtime)
        for path in notes[:-_KEEP_SHARDS]:
            path.unlink(missing_ok=True)

    def _guard_session(self) -> None:
        import httpx2
        from huggingface_hub.utils import get_session, hf_raise_for_status

        session = get_session()
        if getattr(session, "delta_wire_guard", False):
            return
        send = session.send

        def guarded_send(request: httpx2.Request, **how: Any) -> httpx2.Response:
            limit_s = _limit_s.get()
            if limit_s is None:
                return send(request, **how)
            request.extensions["timeout"] = {
                "connect": min(CONNECT_TIMEOUT_S, limit_s),
                "read": limit_s,
                "write": limit_s,
                "pool": limit_s,
            }
            try:
                response = send(request, **how)
            except httpx2.TimeoutException:
                raise Unanswered(f"no answer from the hub within {limit_s:g} s ({TIMEOUT_VARIABLE})") from None
            except httpx2.ConnectError:
                raise Unanswered("the hub cannot be reached; check the network and HF_ENDPOINT") from None
            except httpx2.HTTPError:
                raise Unanswered("the answer of the hub was cut short") from None
            # raised here, because further up such answers are slept over
            if response.status_code == 429 or response.status_code >= 500:
                hf_raise_for_status(response)
            return response

        session.send = guarded_send
        session.delta_wire_guard = True  # type: ignore[attr-defined]


def hub_error(error: Exception, url: str, bucket: str, key: str, action: str, timeout_s: float) -> Exception:
    """What an exception of the client means; the exception itself if it is none of the client's.

    Args:
        error (`Exception`): what the client raised.
        url (`str`), bucket (`str`), key (`str`): what was asked about.
        action (`str`): what was wanted of it.
        timeout_s (`float`): how long was waited.
    """
    import httpx2
    from huggingface_hub.errors import BucketBatchError, HfHubHTTPError

    where = f"{url}/{key}: cannot {action}: "
    if isinstance(error, Unanswered):
        return StoreUnavailableError(where + str(error))
    if isinstance(error, BucketBatchError):
        told = "; ".join(
            f"{failure.get('path')!r:.200}: {failure.get('error')!r:.200}" for failure in error.failures[:3]
        )
        return StoreUnavailableError(f"{where}the hub could not apply it ({told}); try again later")
    if isinstance(error, HfHubHTTPError):
        headers = error.response.headers
        code = headers.get("X-Error-Code", "")
        return _refused(error.response.status_code, code, _retry_after_s(headers), url, bucket, key, where)
    status = _XET_STATUS.search(str(error))
    if isinstance(error, (ConnectionError, RuntimeError)) and status:
        # asked for leave to upload, the hub answers 404 only where there is no bucket
        code = "RepoNotFound" if status.group(1) == "404" and "-token" in str(error) else ""
        return _refused(int(status.group(1)), code, None, url, bucket, key, where)
    if isinstance(error, RuntimeError) and "cancelled" in str(error):
        return StoreUnavailableError(f"{where}the upload did not end in time ({TIMEOUT_VARIABLE} is {timeout_s:g})")
    if isinstance(error, TimeoutError) or "timed out" in str(error):
        return StoreUnavailableError(f"{where}no answer from the hub within {timeout_s:g} s ({TIMEOUT_VARIABLE})")
    if isinstance(error, (httpx2.HTTPError, HTTPException, OSError, RuntimeError)):
        return StoreUnavailableError(
            f"{where}the hub cannot be reached, or its answer was cut short; check the network"
        )
    if isinstance(error, (ValueError, KeyError)):
        return StoreUnavailableError(f"{where}the hub's answer was not understood ({type(error).__name__})")
    return error


def _refused(
    status: int, code: str, retry_after_s: float | None, url: str, bucket: str, key: str, where: str
) -> StoreError:
    said = f"the hub answered {status}" + (f" {code}" if code else "")
    if status == 404 and code == "RepoNotFound":
        return BucketNotFoundError(
            f"{url}: the hub shows no bucket {bucket!r} to this token; check the name, log in (`hf auth login`, "
            "HF_TOKEN), or let the trainer create it at its start"
        )
    if status == 404:
        return no_object(url, key)
    if status in (401, 403):
        return StorePermissionError(
            f"{where}{said}; give HF_TOKEN a token that may read this bucket, and on the trainer write it"
        )
    if status == 429:
        message = f"{where}{said}: asked too often; poll more slowly or use fewer readers"
        return RateLimitedError(message) if retry_after_s is None else RateLimitedError(message, retry_after_s)
    if status >= 500 or status == 408:
        return StoreUnavailableError(f"{where}{said}; try again later")
    return StoreRefusedError(f"{where}{said}; check the bucket's address, its storage quota and HF_ENDPOINT")


def _retry_after_s(headers: Any) -> float | None:
    from huggingface_hub.utils import parse_ratelimit_headers

    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds) + 1.0
    text = headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None


def _prepare_xet(timeout_s: float) -> None:
    """Settings of `hf_xet`, which reads them from the environment when it begins; the user's own are left alone."""
    global _scratch
    with _scratch_lock:
        os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{round(1000 * timeout_s)}ms")
        os.environ.setdefault("HF_XET_CLIENT_CONNECT_TIMEOUT", f"{round(1000 * min(CONNECT_TIMEOUT_S, timeout_s))}ms")
        # one more try for each of the parts of a large upload; patience is our own
        os.environ.setdefault("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
        os.environ.setdefault("HF_XET_CLIENT_RETRY_BASE_DELAY", "200ms")
        if _scratch is None and "HF_XET_CACHE" not in os.environ:
            _scratch = Path(tempfile.mkdtemp(prefix="delta-xet-"))
            os.environ["HF_XET_CACHE"] = str(_scratch)
            atexit.register(_remove_scratch, _scratch, os.getpid())


def _remove_scratch(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
