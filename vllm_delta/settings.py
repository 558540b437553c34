# SPDX-License-Identifier: Apache-2.0
"""What the environment of a server says."""

from __future__ import annotations

import math
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from delta_wire.errors import SetupError
from delta_wire.signing import Verifier
from delta_wire.stores import open_store

CachePolicy = Literal["forget", "reset", "keep"]
BUCKET = "DELTA_SYNC_BUCKET"
PUBLIC_KEY = "DELTA_SYNC_PUBLIC_KEY"
_SERVER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one server.

    Args:
        bucket (`str`): address of the bucket to follow (`DELTA_SYNC_BUCKET`).
        poll_s (`float`): seconds between two looks at the pointer (`DELTA_SYNC_POLL_S`).
        cache_policy (`str`): what happens to the prefix cache at a commit (`DELTA_SYNC_CACHE_POLICY`). `forget` drops
            what is cached and lets running requests keep their keys and values, `reset` also recomputes those under
            the new weights, `keep` does nothing.
        ack (`bool`): whether the server reports what it serves to the bucket (`DELTA_SYNC_ACK`).
        stage_dir (`Path`): folder for downloads (`DELTA_SYNC_STAGE_DIR`); every rank must see it.
        min_version_wait_s (`float`): how long a request with the header `x-min-weight-version` waits before it is
            answered with 409 (`DELTA_SYNC_MIN_VERSION_WAIT_S`).
        verify_frac (`float`): share of the time that each rank spends on a verification of its live weights while it
            lasts; the rest is left to generation (`DELTA_SYNC_VERIFY_FRAC`).
        server_id (`str`): name of this server in the bucket (`DELTA_SYNC_SERVER_ID`).
        verifier ([`~delta_wire.signing.Verifier`], *optional*): refuses versions that are not signed by one of the
            keys in `DELTA_SYNC_PUBLIC_KEY`: 64 hex digits or files that hold them, separated by commas.
    """

    bucket: str
    poll_s: float = 0.5
    cache_policy: CachePolicy = "forget"
    ack: bool = True
    stage_dir: Path = Path(tempfile.gettempdir())
    server_id: str = ""
    min_version_wait_s: float = 10.0
    verify_frac: float = 0.1
    verifier: Verifier | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the environment.

        Raises:
            SetupError: a variable is missing or cannot be used; the message says which and what to set.
        """
        env = os.environ if env is None else env
        bucket = env.get(BUCKET, "").strip()
        if not bucket:
            raise SetupError(
                f"{BUCKET} is not set, but the server was started with the delta-weight-sync extension. Set it to the "
                "bucket of the training run, or start without --worker-extension-cls."
            )
        server_id = env.get("DELTA_SYNC_SERVER_ID", "").strip() or _default_server_id()
        if not _SERVER_ID.fullmatch(server_id):
            raise SetupError(
                f"DELTA_SYNC_SERVER_ID={server_id!r:.200} is no server id: use up to 128 letters, digits, '.', '_' or "
                "'-', starting with a letter or digit"
            )
        stage_dir = Path(env.get("DELTA_SYNC_STAGE_DIR", "").strip() or tempfile.gettempdir())
        if not stage_dir.is_dir() or not _can_write(stage_dir):
            raise SetupError(
                f"DELTA_SYNC_STAGE_DIR={stage_dir} is no folder that can be written to: create it or name another one"
            )
        # an address that no store understands is refused now; whether the bucket exists is seen later
        open_store(bucket).close()
        return cls(
            bucket=bucket,
            poll_s=_seconds(env, "DELTA_SYNC_POLL_S", 0.5),
            cache_policy=cast(
                CachePolicy, _choice(env, "DELTA_SYNC_CACHE_POLICY", get_args(CachePolicy), default="forget")
            ),
            ack=_choice(env, "DELTA_SYNC_ACK", ("1", "0"), default="1") == "1",
            stage_dir=stage_dir,
            server_id=server_id,
            min_version_wait_s=_seconds(env, "DELTA_SYNC_MIN_VERSION_WAIT_S", 10.0),
            verify_frac=_number(env, "DELTA_SYNC_VERIFY_FRAC", 0.1, 0.01, 1, "share of the time"),
            verifier=_verifier(env),
        )


def _verifier(env: Mapping[str, str]) -> Verifier | None:
    keys = env.get(PUBLIC_KEY)
    if keys is None:
        return None
    try:
        return Verifier(keys)
    except SetupError as error:
        raise SetupError(f"{PUBLIC_KEY}: {error}") from None


def _can_write(folder: Path) -> bool:
    # asking for permissions is not enough: some file systems grant them and refuse the file
    try:
        with tempfile.TemporaryDirectory(prefix="delta-stage-", dir=folder):
            return True
    except OSError:
        return False


def _default_server_id() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-") or "host"
    return f"{host[:100]}-{os.getpid()}"


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    return _number(env, name, default, 0.01, 3600, "number of seconds")


def _number(env: Mapping[str, str], name: str, default: float, least: float, most: float, what: str) -> float:
    text = env.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise SetupError(f"{name}={text!r} is no {what} between {least:g} and {most:g}")
    return value


def _choice(env: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = env.get(name, "").strip() or default
    if value not in allowed:
        raise SetupError(f"{name}={value!r} is not one of {', '.join(allowed)}")
    return value
