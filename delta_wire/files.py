# SPDX-License-Identifier: Apache-2.0
"""Local files that appear complete or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from delta_wire.errors import StoreUnavailableError

# begins with a dot, so that it can never be the key of an object
TEMPORARY_PREFIX = ".tmp-"
COPY_BYTES = 1 << 20


def temporary_beside(path: Path) -> Path:
    """A new hidden name in the same folder, so that a rename stays inside one file system."""
    return path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(6)}")


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it into place."""
    temporary = temporary_beside(path)
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def staging(path: Path) -> Iterator[None]:
    """A full or missing staging folder is not the bucket's fault, and the message must not say so."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailableError(
            f"{path.parent}: cannot write the downloaded file: {error.strerror or error}; free space there or choose "
            "another folder"
        ) from error


@contextmanager
def arriving(path: Path) -> Iterator[IO[bytes]]:
    """A file to copy a download into, which gets this name once the block has ended well.

    Writing in the block needs [`staging`] around it, reading must not have it.
    """
    temporary = temporary_beside(path)
    try:
        with staging(path):
            out = temporary.open("xb")
        try:
            yield out
        finally:
            # the last bytes are written here
            with staging(path):
                out.close()
        with staging(path):
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
