# SPDX-License-Identifier: Apache-2.0
"""Going on with a run from other weights than those of its newest version.

A trainer that resumes from a checkpoint may be behind the bucket (the last versions were published after the
checkpoint was saved) or ahead of it (they were lost). In both cases the chain goes forward: the next version leads
from the newest state to the trainer's own, so that no reader has to go back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from delta_wire.chain import BucketReader
from delta_wire.digest import Digest
from delta_wire.errors import DigestMismatchError
from delta_wire.manifest import Manifest
from delta_wire.replay import materialise
from delta_wire.state import (
    Delta,
    OldBits,
    TensorDelta,
    TensorTable,
    after,
    change_of_digest,
    compose,
    index_dtype,
    inverse,
    resolve,
)


def delta_from(reader: BucketReader, head: Manifest, table: TensorTable, digest: Digest, bits: OldBits) -> Delta:
    """What leads from the newest version to the state at hand.

    Args:
        reader ([`~delta_wire.bucket.BucketReader`]): the run.
        head ([`~delta_wire.manifest.Manifest`]): its newest version.
        table ([`~delta_wire.state.TensorTable`]): of both.
        digest ([`~delta_wire.digest.Digest`]): of the state at hand.
        bits (`Callable`): its whole tensors.

    Returns:
        `Delta`: with old and new bits, proven by both digests.

    A state that is an earlier version of the run costs the deltas since; for any other the newest version is rebuilt
    from its restart point.
    """
    chain = reader.chain(digest, head)
    with tempfile.TemporaryDirectory(prefix="delta-wire-") as folder:
        delta = _difference(reader, head, table, bits) if chain is None else _undo(reader, chain, bits, Path(folder))
    found = head.digest + change_of_digest(delta)
    if found != digest:
        raise DigestMismatchError(
            f"{reader.store.url}: the trainer's weights have digest {digest}, the difference to version "
            f"{head.version} leads to {found}; the weights changed while they were compared. Start again."
        )
    return delta


def _undo(reader: BucketReader, chain: list[Manifest], bits: OldBits, folder: Path) -> Delta:
    """Inverse of the deltas that led away from the state at hand."""
    forward: Delta = {}

    def overlaid(name: str) -> np.ndarray:
        return after(bits(name), forward.get(name))

    for manifest in chain:
        fetched = reader.fetch_delta(manifest, folder, overlaid)
        step = {name: resolve(part, overlaid(name).reshape(-1)[part.indices]) for name, part in fetched.items()}
        forward = compose(forward, step)
    return inverse(forward)


def _difference(reader: BucketReader, head: Manifest, table: TensorTable, bits: OldBits) -> Delta:
    delta: Delta = {}
    with materialise(reader, head) as state:
        for name, spec in table.items():
            old, new = state.bits(name).reshape(-1), bits(name).reshape(-1)
            indices = np.flatnonzero(old != new).astype(index_dtype(spec.num_elements))
            if indices.size:
                delta[name] = TensorDelta(name, indices, new[indices], old[indices])
    return delta
