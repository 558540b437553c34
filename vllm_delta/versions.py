# SPDX-License-Identifier: Apache-2.0
"""Versions in HTTP: which one answered, and a request that must not be answered by an older one.

Runs in each API server process, whatever their number: what is served is asked of the engine core.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from delta_wire.errors import FormatError
from delta_wire.manifest import VersionId
from vllm_delta.adapter_label import ADAPTER_ID, version_for

MIN_VERSION = b"x-min-weight-version"
VERSION = b"x-weight-version"
VERSIONS = b"x-weight-versions"
# one look at the engine serves all requests that wait
_LOOK_S = 0.05


@dataclass(slots=True)
class _Answers:
    """What the current HTTP request has got: versions in order, and the run's adapter if that is what it asked for."""

    versions: list[str] = field(default_factory=list)
    adapter: str | None = None


_answered: ContextVar[_Answers | None] = ContextVar("delta_answered", default=None)


def note_versions(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Wrap `AsyncLLM.generate`: the HTTP request that asks for an answer learns which versions it is of."""

    @functools.wraps(generate)
    def noting(*args: Any, lora_request: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        adapter = None
        if lora_request is not None and lora_request.lora_int_id == ADAPTER_ID:
            adapter = lora_request.lora_name
        # now: a stream has told its version before its first output is asked for
        noted = _answered.get()
        if noted is not None:
            noted.adapter = adapter
        return _noted(generate(*args, lora_request=lora_request, **kwargs), adapter)

    return noting


async def _noted(answers: AsyncIterator[Any], adapter: str | None) -> AsyncIterator[Any]:
    # an inner generator that is not closed would go on for a client that has left
    async with contextlib.aclosing(answers) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            if output.finished:
                for one in output.outputs:
                    one.weight_versions = _spans_for(one.weight_versions, adapter)
                noted = _answered.get()
                if noted is not None:
                    noted.versions += [span.version for one in output.outputs for span in one.weight_versions or ()]
            yield output


def _spans_for(spans: list[Any] | None, adapter: str | None) -> list[Any] | None:
    """Version spans as a request has to see them."""
    seen: list[Any] = []
    for span in spans or ():
        version = version_for(span.version, adapter)
        if seen and seen[-1].version == version:
            seen[-1] = replace(seen[-1], end=span.end)
        else:
            seen.append(replace(span, version=version))
    return seen if spans is not None else None


class Served:
    """What the engine serves, as of at most 50 ms ago."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._status: dict[str, Any] = {}
        self._looked_s = -1.0

    async def look(self, client: Any) -> dict[str, Any]:
        async with self._lock:
            if time.monotonic() - self._looked_s > _LOOK_S:
                self._status = await client.engine_core.call_utility_async("delta_status")
                self._looked_s = time.monotonic()
            return self._status


def parse_minimum(text: str) -> tuple[tuple[str, int] | None, int]:
    """A sequence number, or a whole version: `(run and epoch or None, sequence number)`; [`ValueError`] otherwise."""
    if text.isascii() and text.isdigit() and len(text) < 19:
        return None, int(text)
    try:
        version = VersionId.parse(text)
    except (FormatError, ValueError) as error:
        raise ValueError(
            f"{MIN_VERSION.decode()}: {text!r:.100} is neither a sequence number nor a version such as "
            "'run-epoch-sequence number'"
        ) from error
    return (version.run, version.epoch), version.seq


def reaches(served: str | None, minimum: tuple[tuple[str, int] | None, int]) -> bool:
    """Whether a served version is new enough. A version of another run never is."""
    if served is None:
        return False
    version = VersionId.parse(served)
    run, seq = minimum
    return version.seq >= seq and (run is None or version.run == run[0])


class VersionMiddleware:
    """Adds `x-weight-version` to answers, and holds requests with `x-min-weight-version` until it is served.

    Args:
        app: the application inside.
        wait_s (`float`): how long a request may wait.
    """

    def __init__(self, app: Any, wait_s: float):
        self._app = app
        self._wait_s = wait_s
        self._served = Served()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        if scope["type"] != "http" or scope["method"] != "POST" or client is None or "/delta/" in scope["path"]:
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name.lower() == MIN_VERSION and not await self._admit(value.decode("latin-1").strip(), client, send):
                return
        noted = _Answers()
        token = _answered.set(noted)

        async def send_with_version(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *await _headers(noted, client)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_version)
        finally:
            _answered.reset(token)

    async def _admit(self, text: str, client: Any, send: Any) -> bool:
        try:
            minimum = parse_minimum(text)
        except ValueError as error:
            await _refuse(send, 400, str(error), text, None)
            return False
        deadline_s = time.monotonic() + self._wait_s
        while True:
            served = (await self._served.look(client))["version"]
            if reaches(served, minimum):
                return True
            if time.monotonic() >= deadline_s:
                break
            await asyncio.sleep(_LOOK_S)
        await _refuse(
            send,
            409,
            f"this server serves version {served}, the request demands at least {text}; it waited {self._wait_s:g} s. "
            "Try again later, or another server.",
            text,
            served,
        )
        return False


async def _headers(noted: _Answers, client: Any) -> list[tuple[bytes, bytes]]:
    if not noted.versions:
        # the answer starts before its first token, so it will be of this version or a later one
        label = await client.engine_core.get_weight_version_async()
        return [(VERSION, version_for(label, noted.adapter).encode())]
    several = list(dict.fromkeys(noted.versions))
    headers = [(VERSION, noted.versions[-1].encode())]
    return headers if len(several) == 1 else [*headers, (VERSIONS, ", ".join(several).encode())]


async def _refuse(send: Any, status: int, message: str, required: str, served: str | None) -> None:
    kind = "WeightVersionError" if status == 409 else "BadRequestError"
    body = {"error": {"message": message, "type": kind, "code": status}, "required": required, "served": served}
    raw = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    if status == 409:
        headers.append((b"retry-after", b"1"))
    if served is not None:
        headers.append((VERSION, served.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
