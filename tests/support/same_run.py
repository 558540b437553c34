# SPDX-License-Identifier: Apache-2.0
"""Two runs of the same training, compared version by version."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from delta_wire.bucket import BucketReader
from delta_wire.replay import materialise
from delta_wire.state import resolve
from delta_wire.stores import open_store


def reader_of(bucket: Path) -> BucketReader:
    return BucketReader(open_store(str(bucket)))


def assert_same_run(sharded: BucketReader, single: BucketReader, folder: Path, until: int | None = None) -> list[int]:
    """Every version (up to number `until`) of both has the same delta, element by element; returns the number of
    objects of each."""
    objects = []
    latest = sharded.latest() if until is None else sharded.manifest(until)
    assert latest is not None
    for manifest in reversed(list(sharded.walk(latest))):
        other = single.manifest(manifest.version.seq)
        assert (manifest.digest, manifest.step) == (other.digest, other.step)
        assert manifest.changed_params == other.changed_params
        if manifest.delta is None:
            continue
        objects.append(len(manifest.delta.objects))
        assert manifest.parent is not None
        with materialise(single, single.manifest(manifest.parent.seq)) as state:
            found = sharded.fetch_delta(manifest, folder, state.bits)
            expected = single.fetch_delta(other, folder, state.bits)
            assert found.keys() == expected.keys()
            for name, part in expected.items():
                old = state.bits(name).reshape(-1)[part.indices]
                assert np.array_equal(found[name].indices, part.indices), name
                assert np.array_equal(resolve(found[name], old).new, resolve(part, old).new), name
    return objects
