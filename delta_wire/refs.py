# SPDX-License-Identifier: Apache-2.0
"""What the JSON objects of a bucket share: version ids, references to objects, keys, the format's number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from delta_wire.digest import Digest
from delta_wire.errors import FormatError, UnsupportedFormatError
from delta_wire.stores.base import MAX_KEY_CHARS, is_key
from delta_wire.strict import load_object, take, take_int, take_sha256, take_text

FORMAT_VERSION = 1
MAX_SEQ = 10**12 - 1
MAX_EPOCH = 10**15 - 1
_RUN = re.compile(r"[A-Za-z0-9]{1,64}")
_VERSION = re.compile(r"([A-Za-z0-9]{1,64})-([0-9]{1,15})-([0-9]{1,12})")


@dataclass(frozen=True, slots=True)
class VersionId:
    """Names a version of a run.

    Args:
        run (`str`): random, one per bucket.
        epoch (`int`): grows by one each time a trainer takes the run over.
        seq (`int`): grows with every version; sorts as an integer.
    """

    run: str
    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.run}-{self.epoch}-{self.seq}"

    @classmethod
    def parse(cls, text: str) -> VersionId:
        """Read what `str()` writes."""
        match = _VERSION.fullmatch(text)
        if not match:
            raise FormatError(f"expected a version of the form run-epoch-seq, found {text!r:.120}")
        return cls(match[1], int(match[2]), int(match[3]))

    def to_json(self) -> dict[str, Any]:
        return {"run": self.run, "epoch": self.epoch, "seq": self.seq}

    @classmethod
    def from_json(cls, value: dict[str, Any], source: str) -> VersionId:
        run = take_text(value, "run", source, 64)
        if not _RUN.fullmatch(run):
            raise FormatError(f"{source}: run must be 1 to 64 letters or digits, found {run!r}")
        return cls(run, take_int(value, "epoch", source, 1, MAX_EPOCH), take_int(value, "seq", source, 0, MAX_SEQ))


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object by key, size and hash; a reader takes nothing else for it."""

    key: str
    size_bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "size_bytes": self.size_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: object, source: str, prefix: str) -> ObjectRef:
        if not isinstance(value, dict):
            raise FormatError(f"{source}: expected a reference to an object, found {value!r:.80}")
        key = take_text(value, "key", source, MAX_KEY_CHARS)
        if not is_key(key) or not key.startswith(prefix):
            raise FormatError(f"{source}: the key {key!r} is not allowed here, expected {prefix}…")
        return cls(key, take_int(value, "size_bytes", source), take_sha256(value, "sha256", source))


def manifest_key(seq: int) -> str:
    """Key of a version's manifest; zero-padded, so that names sort as numbers."""
    return f"versions/{seq:012d}.json"


def table_key(sha256: str) -> str:
    """Key of a tensor table."""
    return f"tables/{sha256}.json"


def load_document(raw: bytes, source: str, max_bytes: int) -> dict[str, Any]:
    """Parse a JSON object of the bucket whose `format` this release reads."""
    value = load_object(raw, source, max_bytes)
    written = take_int(value, "format", source, 1)
    if written > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{source}: written in format {written}, this release reads up to {FORMAT_VERSION}; upgrade "
            "delta-weight-sync here"
        )
    return value


def take_digest(value: dict[str, Any], source: str) -> Digest:
    """The field `digest`."""
    try:
        return Digest.parse(take(value, "digest", source))
    except FormatError as error:
        raise FormatError(f"{source}: digest: {error}") from None
