# SPDX-License-Identifier: Apache-2.0
"""Where buckets lie: one module per kind of store, chosen by the form of the address."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from delta_wire.errors import SetupError
from delta_wire.stores.base import ObjectInfo, Store, is_key

__all__ = ["ObjectInfo", "Store", "open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_HUB_ADDRESS = re.compile(
    r"buckets/(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:/(?P<prefix>.+))?"
)
_FORMS = "a folder, file:///folder, hf://buckets/namespace/name/prefix, s3://, gs:// or az://bucket/prefix"
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


def open_store(url: str | Path, *, create: bool = False) -> Store:
    """Open a bucket.

    Args:
        url (`str` or `Path`): `file:///folder`, `file:folder`, a plain path, `hf://buckets/NAMESPACE/NAME/PREFIX`,
            `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, or `memory:NAME`.
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
        raise SetupError(f"the bucket's address is empty or no text: {url!r}; give {_FORMS}")
    if url.startswith("memory:"):
        from delta_wire.stores.memory import MemoryStore

        name = url.removeprefix("memory:")
        if not _MEMORY_NAME.fullmatch(name):
            raise SetupError(f"{url!r}: the name of a memory bucket is 1 to 100 letters, digits or ._-")
        return MemoryStore(name)
    if url.startswith("file:"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
            raise SetupError(f"{url!r}: expected file:///absolute/folder or file:relative/folder")
        return _local(Path(unquote(parts.path)))
    if scheme is None:
        return _local(Path(url).expanduser())
    kind, rest = scheme.group(1), url[scheme.end() :].rstrip("/")
    if re.search(r"[@?#]", rest):
        # not repeated: what stands there may be a key or a signature
        raise SetupError(
            f"the address of the {kind}:// bucket contains '@', '?' or '#'; give only names, credentials come from "
            "the environment"
        )
    if kind == "hf":
        from delta_wire.stores.hf import HubStore

        found = _HUB_ADDRESS.fullmatch(rest)
        if not found or (found["prefix"] and not is_key(found["prefix"])):
            raise SetupError(f"{url!r}: expected hf://buckets/namespace/name or hf://buckets/namespace/name/prefix")
        return HubStore(found["bucket"], found["prefix"] or "")
    if kind in ("s3", "gs", "az"):
        from delta_wire.stores.object import ObjectStore

        bucket, _, prefix = rest.partition("/")
        if not _BUCKET_NAME.fullmatch(bucket) or (prefix and not is_key(prefix)):
            raise SetupError(f"{url!r}: expected {kind}://bucket or {kind}://bucket/prefix")
        return ObjectStore(kind, bucket, prefix)
    raise SetupError(f"{url!r}: there are no buckets of kind {kind!r:.80}; give {_FORMS}")


def _local(folder: Path) -> Store:
    from delta_wire.stores.local import LocalStore

    return LocalStore(folder)
