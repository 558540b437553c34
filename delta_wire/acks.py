# SPDX-License-Identifier: Apache-2.0
"""What servers write into a bucket: one small file each, overwritten, saying what it serves."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, Literal

from delta_wire.digest import Digest
from delta_wire.errors import FormatError, ObjectNotFoundError
from delta_wire.refs import FORMAT_VERSION, VersionId, load_document, take_digest
from delta_wire.stores.base import Store
from delta_wire.strict import dump, take, take_float, take_object, take_text

_MAX_ACKS = 4096
MAX_ACK_BYTES = 16 << 10
MAX_REASON_CHARS = 2000
_SERVER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ack:
    """What a server says about itself.

    Args:
        server (`str`): its id, 1 to 128 letters, digits or `._-`.
        version ([`VersionId`], *optional*), digest ([`Digest`], *optional*): what it serves.
        state (`str`): `"serving"` or `"degraded"`.
        reason (`str`, *optional*): why it is degraded.
        pause_ms (`float`, *optional*): how long the last commit held generation up.
        served_unix_s (`float`): since when, by the server's clock.
        needs_anchor ([`VersionId`], *optional*): newest version that nothing leads to from there: something on the
            way is lost, and there is no anchor after it. Only an anchor of a later version leads on.
    """

    server: str
    version: VersionId | None
    digest: Digest | None
    state: Literal["serving", "degraded"]
    reason: str | None
    pause_ms: float | None
    served_unix_s: float
    needs_anchor: VersionId | None = None

    @property
    def key(self) -> str:
        if not _SERVER.fullmatch(self.server):
            raise FormatError(f"a server id is 1 to 128 letters, digits or ._-, found {self.server!r:.200}")
        return f"acks/{self.server}.json"

    def to_bytes(self) -> bytes:
        value = {
            "format": FORMAT_VERSION,
            "server": self.server,
            "version": self.version and self.version.to_json(),
            "digest": None if self.digest is None else str(self.digest),
            "state": self.state,
            "reason": _printable(self.reason),
            "pause_ms": self.pause_ms,
            "served_unix_s": self.served_unix_s,
        }
        if self.needs_anchor is not None:
            value["needs_anchor"] = self.needs_anchor.to_json()
        return dump(value)

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> Ack:
        value = load_document(raw, source, MAX_ACK_BYTES)
        state = take(value, "state", source)
        if state not in ("serving", "degraded"):
            raise FormatError(f"{source}: state must be serving or degraded, found {state!r:.80}")
        server = take_text(value, "server", source, 128)
        if not _SERVER.fullmatch(server):
            raise FormatError(f"{source}: a server id is 1 to 128 letters, digits or ._-, found {server!r}")
        return cls(
            server=server,
            version=None if take(value, "version", source) is None else _take_version(value, "version", source),
            digest=None if take(value, "digest", source) is None else take_digest(value, source),
            state=state,
            reason=None
            if take(value, "reason", source) is None
            else take_text(value, "reason", source, MAX_REASON_CHARS),
            pause_ms=None if take(value, "pause_ms", source) is None else take_float(value, "pause_ms", source),
            served_unix_s=take_float(value, "served_unix_s", source),
            needs_anchor=None if value.get("needs_anchor") is None else _take_version(value, "needs_anchor", source),
        )


def read_acks(store: Store) -> list[Ack]:
    """What the servers say that they serve. Files that cannot be read are skipped with a warning."""
    found = []
    for info in store.list("acks/")[:_MAX_ACKS]:
        source = f"{store.url}/{info.key}"
        try:
            ack = Ack.from_bytes(store.get(info.key, MAX_ACK_BYTES), source)
        except ObjectNotFoundError:
            continue
        except FormatError as error:
            logger.warning("ignoring an ack: %s", error)
            continue
        if ack.key != info.key:
            logger.warning("ignoring an ack: %s is of server %s", source, ack.server)
            continue
        found.append(ack)
    return found


def _take_version(value: dict[str, Any], key: str, source: str) -> VersionId:
    return VersionId.from_json(take_object(value, key, source), f"{source}: {key}")


def _printable(text: str | None) -> str | None:
    """What the parser accepts: one printable line, not empty."""
    if text is None:
        return None
    line = "".join(char if char.isprintable() else " " for char in text)[:MAX_REASON_CHARS]
    return line or None
