# SPDX-License-Identifier: Apache-2.0
"""What tests do to a bucket: calls that fail, manifests that are rewritten, a replay by deltas alone."""

import json

import numpy as np

from delta_wire.checkpoint import Checkpoint
from delta_wire.errors import (
    StoreUnavailableError,
)
from delta_wire.manifest import Manifest, ObjectRef, Pointer, manifest_key


class FaultyStore:
    """A store that fails at chosen calls, before or after they took effect, and remembers the order of writes."""

    create_only = True

    def __init__(self, inner):
        self.inner = inner
        self.url = inner.url
        self.writes = []
        self.fail_at = None
        self.after = False
        self.calls = 0

    def __getattr__(self, name):
        call = getattr(self.inner, name)

        def counted(*args, **kwargs):
            self.calls += 1
            fails = self.calls == self.fail_at
            if fails and not self.after:
                raise StoreUnavailableError(f"{self.url}: injected before {name}")
            try:
                result = call(*args, **kwargs)
                if name == "put":
                    self.writes.append(args[0])
                return result
            finally:
                if fails:
                    raise StoreUnavailableError(f"{self.url}: injected after {name}")

        return counted


def write_through(run, store) -> None:
    """Let the writer's calls go through another store from now on."""
    run.writer._head.store = store


def replay(run, reader=None) -> dict[str, np.ndarray]:
    """Bits of the newest version, rebuilt from the base by deltas alone."""
    reader = reader or run.reader()
    base = Checkpoint(run.base)
    bits = {name: base.bits(name).copy() for name in run.table}
    for manifest in reader.chain(run.base_digest, reader.latest()):
        for name, part in reader.fetch_delta(manifest, run.base).items():
            bits[name].reshape(-1)[part.indices] = part.new
    return bits


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def rewrite(run, seq: int, **changes) -> Manifest:
    """Replace fields of a manifest in the bucket and let the pointer follow, as a hostile writer could."""
    value = json.loads(run.store.get(manifest_key(seq), 1 << 20))
    for path, new in changes.items():
        *parents, last = path.split("__")
        inner = value
        for name in parents:
            inner = inner[int(name)] if isinstance(inner, list) else inner[name]
        inner[last] = new
    raw = json.dumps(value).encode()
    run.store.put(manifest_key(seq), raw)
    manifest = Manifest.from_bytes(raw, "rewritten")
    run.store.put(
        "LATEST", Pointer(manifest.version, ObjectRef(manifest_key(seq), len(raw), manifest.sha256)).to_bytes()
    )
    return manifest
