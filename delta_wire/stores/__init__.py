# SPDX-License-Identifier: Apache-2.0
"""Where buckets lie: one module per kind of store, chosen by the form of the address."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from delta_wire.errors import SetupError
from delta_wire.stores.base import ObjectInfo, Store

__all__ = ["ObjectInfo", "Store", "open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


def open_store(url: str | Path, *, create: bool = False) -> Store:
    """Open a bucket.

    Args:
        url (`str` or `Path`): `file:///folder`, `file:folder`, a plain path, or `memory:NAME`.
        create (`bool`, *optional*, defaults to `False`): make the bucket if it does not exist. Without it a missing
            bucket raises [`~delta_wire.errors.BucketNotFoundError`] on first use.
    """
    store = _choose(str(url))
    if create:
        store.ensure()
    return store


def _choose(url: str) -> Store:
    scheme = _SCHEME.match(url)
    if not url.strip() or "\0" in url:
        raise SetupError(
            f"the bucket's address is empty or no text: {url!r}; give a folder, file:///folder or memory:NAME"
        )
    if url.startswith("memory:"):
        from delta_wire.stores.memory import MemoryStore

        name = url.removeprefix("memory:")
        if not _MEMORY_NAME.fullmatch(name):
            raise SetupError(f"{url!r}: the name of a memory bucket is 1 to 100 letters, digits or ._-")
        return MemoryStore(name)
    from delta_wire.stores.local import LocalStore

    if url.startswith("file:"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
            raise SetupError(f"{url!r}: expected file:///absolute/folder or file:relative/folder")
        return LocalStore(Path(unquote(parts.path)))
    if scheme:
        raise SetupError(
            f"{url!r}: buckets of kind {scheme.group(1)!r} are not supported yet in this release; use a folder that "
            "both sides can reach (file:///folder)"
        )
    return LocalStore(Path(url).expanduser())
