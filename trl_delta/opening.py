# SPDX-License-Identifier: Apache-2.0
"""Beginning a run in a bucket, or going on with the one that is there. Only the first of several processes writes."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.manifest import Manifest
from delta_wire.stores import Store
from trl_delta.content import Content
from trl_delta.ranks import Ranks
from trl_delta.resume import Resumed
from trl_delta.rounds import Opened
from trl_delta.upkeep import Upkeep

logger = logging.getLogger(__name__)


def open_run(
    store: Store, content: Content, ranks: Ranks, upkeep: Upkeep, *, step: int, resumed: Resumed | None
) -> Opened:
    """Begin or continue the run; all processes call this.

    Args:
        store ([`~delta_wire.stores.Store`]): the bucket.
        content ([`Content`]): what is published.
        ranks ([`~trl_delta.ranks.Ranks`]): of the training.
        upkeep ([`~trl_delta.upkeep.Upkeep`]): signs, and keeps the files of checkpoints.
        step (`int`): optimizer step of the weights.
        resumed ([`Resumed`], *optional*): what the trainer's checkpoint says, if training resumes from one.
    """

    def needs_bits() -> bool:
        head = BucketReader(store).latest()
        if head is None:
            return not content.is_base_digest
        return resumed is not None and resumed.run == head.version.run and head.digest != content.digest

    needed = ranks.first_does(needs_bits)
    # once, and the only time that sharded weights come together
    bits = content.gather_bits() if needed else {}
    writers: list[BucketWriter] = []

    def start(**kwargs: Any) -> None:
        writers.append(
            BucketWriter.start(
                store,
                table=content.table,
                digest=content.digest,
                step=step,
                signer=upkeep.signer,
                adapter=content.adapter,
                **kwargs,
            )
        )

    def begin() -> tuple[str, int]:
        if not needed:
            start(reference=content.reference)
        elif BucketReader(store).latest() is not None:
            files = upkeep.save_files(content.save_files)
            start(reference=content.reference, bits=content.with_kept(bits).__getitem__, files=files)
        else:
            if content.adapter is None:
                logger.info(
                    "delta sync: the weights are not those of %s; uploading a checkpoint",
                    content.reference or "a known checkpoint",
                )
            with tempfile.TemporaryDirectory(prefix="delta-anchor-") as folder:
                content.save(Path(folder), bits)
                start(reference=None, anchor_dir=Path(folder))
        return writers[0].head.to_bytes().decode(), writers[0].next_seq

    raw, next_seq = ranks.first_does(begin)
    return Opened(Manifest.from_bytes(raw.encode(), store.url), next_seq, writers[0] if writers else None)
