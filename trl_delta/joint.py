# SPDX-License-Identifier: Apache-2.0
"""What a session does together with those of the other training processes when it starts. All call these alike."""

from __future__ import annotations

from math import prod

import numpy as np

from delta_wire import encodings
from delta_wire.digest import Digest
from delta_wire.errors import ModelMismatchError
from delta_wire.state import OldBits, TensorTable
from delta_wire.stores import Store, open_store
from trl_delta.anchors import AnchorMaker
from trl_delta.detector import Detector, entry_bits, gathered
from trl_delta.dtensors import is_sharded
from trl_delta.names import LiveTensor
from trl_delta.publisher import Publisher
from trl_delta.ranks import Ranks
from trl_delta.replica import ReplayedAnchors
from trl_delta.rounds import Opened, PartWriter
from trl_delta.sharded import ShardedPublisher
from trl_delta.shards import coding_shards, own_tensors


def open_everywhere(bucket: str, ranks: Ranks) -> Store:
    """The bucket on every process, made by the first if there is none."""
    stores: list[Store] = []
    ranks.first_does(lambda: stores.append(open_store(bucket, create=True)))
    ranks.all_do(lambda: None if stores else stores.append(open_store(bucket)))
    return stores[0]


def owned(live: list[LiveTensor], ranks: Ranks) -> list[LiveTensor]:
    """What this process looks at and publishes; everything if it is the only one."""
    if ranks.count == 1 and not any(is_sharded(entry.source) for entry in live):
        return live
    return own_tensors(live, ranks.rank, ranks.count)


def agreed_digest(ranks: Ranks, table: TensorTable, digest: Digest) -> Digest:
    """Digest of the whole state.

    Args:
        ranks ([`~trl_delta.ranks.Ranks`]): of the training.
        table ([`~delta_wire.state.TensorTable`]): of this process' model.
        digest ([`~delta_wire.digest.Digest`]): of what this process owns.
    """
    total = Digest()
    for rank, (other, part) in enumerate(ranks.exchange((table.sha256, str(digest)))):
        if other != table.sha256:
            raise ModelMismatchError(
                f"rank {rank} trains a model with other tensors or shapes than rank {ranks.rank}; every process must "
                "hold the same model, replicated or sharded by FSDP2"
            )
        total = total + Digest.parse(part)
    return total


def gather_bits(live: list[LiveTensor], ranks: Ranks) -> dict[str, np.ndarray]:
    """All bits of the model on the first process, nothing elsewhere.

    For the checkpoint that a run begins with if there is no other, and never again: the only time that sharded weights
    are gathered, one tensor at a time. Where the first process has no room for them it goes on to the end with the
    others before all raise.
    """
    bits: dict[str, np.ndarray] = {}
    failure: Exception | None = None
    for entry in gathered(live):
        if ranks.is_first and failure is None:
            try:
                bits |= entry_bits(entry)
            except Exception as error:
                failure = error
                bits.clear()

    def result() -> None:
        if failure is not None:
            raise failure

    ranks.first_does(result)
    return bits


def make_publisher(
    ranks: Ranks,
    store: Store,
    table: TensorTable,
    opened: Opened,
    live: list[LiveTensor],
    detector: Detector,
    *,
    step: int,
    encoding: str,
    anchors: AnchorMaker | None = None,
    replayed: ReplayedAnchors | None = None,
    snapshot: OldBits | None = None,
) -> Publisher:
    """A publisher of what this process owns.

    Args:
        ranks ([`~trl_delta.ranks.Ranks`]): of the training.
        store ([`~delta_wire.stores.Store`]): the bucket.
        table ([`~delta_wire.state.TensorTable`]): the whole model.
        opened ([`~trl_delta.rounds.Opened`]): the run.
        live (list of [`LiveTensor`]): what this process owns.
        detector ([`Detector`]): of the same.
        step (`int`): optimizer step.
        encoding (`str`): of the deltas.
        anchors, snapshot (*optional*): see [`Publisher`]; on one process only, for it takes the whole weights.
        replayed ([`ReplayedAnchors`], *optional*): on the first of several.
    """
    mirror = detector.copy_bits(live) if encodings.get(encoding).needs_old_weights else None
    if opened.writer is not None and ranks.count == 1:
        return Publisher(
            opened.writer, step=step, encoding=encoding, mirror=mirror, anchors=anchors, snapshot=snapshot
        )
    shards = coding_shards(live, table, needs_all_rows=mirror is not None)
    entries = {name: entry for entry in live for name in entry.names}
    return ShardedPublisher(
        ranks,
        PartWriter(ranks.clone(), store, table, opened, shards, replayed),
        starts={name: entry.start for name, entry in entries.items()},
        sizes={name: prod(entry.shape) for name, entry in entries.items()},
        snapshot=lambda name: detector.bits(entries[name]),
        step=step,
        encoding=encoding,
        mirror=mirror,
    )
