# SPDX-License-Identifier: Apache-2.0
"""One training run and its bucket, without a trainer: what the callback drives."""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_wire import kernels
from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.errors import BaseMismatchError, SetupError
from delta_wire.manifest import Manifest
from delta_wire.state import OldBits, TensorTable, num_changed
from delta_wire.stores import Store
from trl_delta.acks import AckWatcher
from trl_delta.base import base_checkpoint, require_base, save_anchor, save_files
from trl_delta.config import DeltaSyncConfig
from trl_delta.detector import Detector
from trl_delta.joint import agreed_digest, gather_bits, make_publisher, open_everywhere, owned
from trl_delta.names import LiveTensor, Naming, table_of
from trl_delta.pace import Pace
from trl_delta.publisher import Publisher
from trl_delta.ranks import Ranks
from trl_delta.resume import Resumed
from trl_delta.separate import SeparateAdapter
from trl_delta.shards import refuse_wrappers
from trl_delta.snapshot import choose, training_bytes
from trl_delta.upkeep import Upkeep
from trl_delta.wrappers import unwrap

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)


class DeltaSyncSession:
    """Publishes a model's weights into a bucket while they are trained. Driven by the training thread.

    Args:
        bucket (`str`): address of the bucket; a folder is created if it does not exist.
        config ([`DeltaSyncConfig`], *optional*): settings.
    """

    # from the start on
    table: TensorTable
    detector: Detector
    publisher: Publisher
    watcher: AckWatcher
    pace: Pace
    _naming: Naming | SeparateAdapter
    _ranks: Ranks

    def __init__(self, bucket: str, config: DeltaSyncConfig | None = None):
        self.bucket = bucket
        self.config = config or DeltaSyncConfig()
        self._model: torch.nn.Module | None = None
        # what is published, if it is not the whole model
        self._separate: SeparateAdapter | None = None
        self._closed = False
        self._failure_reported = False
        self._last_step = 0
        self._extracted_step = 0
        self._owned_params = 0
        self._extract_s = 0.0
        self._changed_frac = 0.0

    @property
    def started(self) -> bool:
        return self._model is not None

    @property
    def last_step(self) -> int:
        """Optimizer step of the newest weights looked at."""
        return self._last_step

    def start(
        self,
        model: torch.nn.Module,
        *,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        step: int = 0,
        world_size: int = 1,
        resumed: Resumed | None = None,
    ) -> None:
        """Take the model's weights as they are now for the first version.

        An empty bucket gets version 0: a reference to the checkpoint that the model was loaded from if the weights
        still equal it in every bit, or else a checkpoint of its own. A bucket with a run is continued if its newest
        version is exactly these weights, or if they come from a trainer's checkpoint of this run: what they differ by
        is the next version then, whether the checkpoint is older than the bucket or newer.

        Args:
            model (`torch.nn.Module`): the training model; on several processes replicated, or sharded by FSDP2.
            processing_class (*optional*): tokenizer or processor; goes into a checkpoint that is uploaded.
            step (`int`, *optional*, defaults to `0`): optimizer step of the weights.
            world_size (`int`, *optional*, defaults to `1`): training processes, which all call this, and the other
                methods after the same steps. Each publishes what it owns; see [`~trl_delta.sharded.PartWriter`].
            resumed ([`Resumed`], *optional*): what the trainer's checkpoint says, if training resumes from one.
        """
        if self.started:
            raise SetupError(f"{self.bucket}: this session has started already; use a new callback for a second run")
        self._ranks = ranks = Ranks.join(world_size)
        store = open_everywhere(self.bucket, ranks)
        reference, base = base_checkpoint(model)
        if self.config.delta_sync_adapter == "separate":
            self._separate = self._take_adapter(model, reference, base)
            # version 0 is an adapter, which is nowhere yet
            reference = base = None
        ranks.all_do(lambda: self._take_in(model, reference, base))
        live = self._naming.live(model)
        digest = agreed_digest(ranks, self.table, self.detector.digest)
        if resumed is not None and resumed.digest not in ("", str(digest)):
            logger.warning(
                "delta sync: the weights of step %d have digest %s, those that the checkpoint was saved with had %s; "
                "they were saved in another precision, or something has changed them since (an adapter that was "
                "merged twice?). What is published is what they are now.",
                step,
                digest,
                resumed.digest,
            )
        self._upkeep = Upkeep(self.bucket, self.config)
        head, next_seq, writer = self._open_run(
            store, live, model, processing_class, reference, base, digest, step, resumed
        )
        self._model = model
        self._last_step = self._extracted_step = step
        anchors = replayed = None
        if writer is not None:
            if ranks.count > 1:
                replayed = self._upkeep.replayed_anchors(writer)
            else:
                anchors = self._upkeep.anchors(writer, lambda: self._save_files(model, processing_class, base))
            self._upkeep.keep(writer)
        self.publisher = make_publisher(
            ranks,
            store,
            self.table,
            head,
            next_seq,
            writer,
            owned(live, ranks),
            self.detector,
            step=step,
            encoding=self.config.delta_sync_encoding,
            anchors=anchors,
            replayed=replayed,
            snapshot=self._bits_of(live, base),
        )
        self.watcher = AckWatcher(
            # one process asks the bucket; the others never learn what is served
            list if writer is None else writer.acks,
            self.publisher,
            expected_servers=self.config.delta_sync_expected_servers,
            server_timeout_s=self.config.delta_sync_server_timeout_s,
            poll_s=max(self.config.delta_sync_ack_poll_s, store.least_listing_s),
            watch=None if writer is None else partial(store.watch, "acks/"),
        )
        self.pace = Pace(self.bucket, self.config, self.publisher, self.watcher)
        if ranks.is_first:
            logger.info("delta sync: version %s is in %s", head.version, store.url)

    def live(self) -> list[LiveTensor]:
        """The model's tensors as they are now, under their checkpoint names."""
        if self._model is None:
            raise SetupError(f"{self.bucket}: the session has not started")
        return self._naming.live(self._model)

    def step(self, step: int) -> None:
        """Weights have changed: extract and hand over, if it is their turn.

        Waits for servers only where `delta_sync_max_lag_versions` says so.
        """
        self._last_step = step
        if self.publisher.take_turn(step, due=step % self.config.delta_sync_steps == 0):
            self._extract()
            # the other processes wait for the first one in the collectives of the next step
            if self.config.delta_sync_max_lag_versions is not None and self._ranks.is_first:
                self.pace.wait(self.config.delta_sync_max_lag_versions)

    def require_served(self) -> None:
        """Wait until servers serve the newest version (`delta_sync_start_timeout_s`); [`SetupError`] if none does."""
        timeout_s = self.config.delta_sync_start_timeout_s
        seq = self.publisher.durable_seq
        self._ranks.first_does(lambda: self.pace.require_served(seq, timeout_s), timeout_s)

    def sync(self) -> bool:
        """Hand over the newest weights, whoever's turn it is, and wait for the servers to serve them.

        Returns:
            `bool`: whether the servers are as near as `delta_sync_max_lag_versions` (else `0`) demands.
        """
        # the first process knows what is served, the others wait for its word
        timeout_s = self.config.delta_sync_lag_timeout_s
        if self._extracted_step != self._last_step:
            if not self._ranks.first_does(self.pace.wait_for_room, timeout_s):
                return False
            self._extract()
        max_lag = self.config.delta_sync_max_lag_versions or 0
        return self._ranks.first_does(lambda: self.pace.wait(max_lag), timeout_s)

    def finish(self) -> bool:
        """Publish the last weights, wait until they are durable (bounded), and end the threads.

        Returns:
            `bool`: whether the newest durable version has the model's weights.
        """
        if not self.started or self._closed:
            return False
        try:
            if self.publisher.take_last_turn(self.config.delta_sync_close_timeout_s):
                self._extract()
            published = self.publisher.wait(self.config.delta_sync_close_timeout_s)
            if self.publisher.failure is not None:
                self._report_failure(self.publisher.failure)
            is_base_right = self._require_base_unmoved()
        finally:
            self.close()
        if not published and self.publisher.failure is None:
            logger.warning(
                "delta sync: training has ended, but %s could not be written for %.0f s; its newest version is %d, "
                "the weights of step %d are not in it. Save the model itself.",
                self.bucket,
                self.config.delta_sync_close_timeout_s,
                self.publisher.durable_seq,
                self._last_step,
            )
        return published and is_base_right

    def _require_base_unmoved(self) -> bool:
        if self._separate is None or self._model is None:
            return True
        try:
            self._separate.require_base_unmoved(self._model)
        except BaseMismatchError as error:
            if self.config.delta_sync_on_failure == "stop":
                raise
            logger.warning("delta sync: %s", error)
            return False
        return True

    def close(self) -> None:
        """End the threads without waiting for anything. Safe to call again."""
        if not self.started or self._closed:
            return
        self._closed = True
        self.publisher.close(timeout_s=0)
        self.watcher.close()
        self._upkeep.close()

    def resume_state(self) -> dict[str, Any]:
        """What a trainer's checkpoint of these weights must hold, see [`Resumed`]."""
        version = self.publisher.writer.version
        # of several processes each knows the digest of what it owns
        digest = str(self.detector.digest) if self._ranks.count == 1 else ""
        return asdict(Resumed(version.run, self.publisher.durable_seq, digest, self._last_step))

    def metrics(self) -> dict[str, float]:
        """What the trainer logs; bytes and ratio are those of the newest durable version."""
        metrics: dict[str, float] = {
            "delta/changed_frac": self._changed_frac,
            "delta/extract_s": self._extract_s,
            "delta/version": self.publisher.durable_seq,
        }
        if self.publisher.records:
            record = self.publisher.records[-1]
            metrics["delta/bytes"] = record.delta_bytes
            metrics["delta/ratio"] = record.delta_bytes / self.table.full_bytes
            metrics["delta/publish_s"] = record.publish_s
        served = self.watcher.seq
        if served is not None:
            metrics["delta/served_version"] = served
            metrics["delta/lag_versions"] = max(0, self.publisher.durable_seq - served)
        return metrics

    def _extract(self) -> None:
        self._extracted_step = self._last_step
        failure = self.publisher.failure
        if failure is not None:
            self._report_failure(failure)
            return
        began_s = time.monotonic()
        with self.publisher.extracting:
            delta = self.detector.extract(owned(self.live(), self._ranks))
            self._extract_s = time.monotonic() - began_s
            self._changed_frac = num_changed(delta) / max(1, self._owned_params)
            self.publisher.submit(delta, digest=self.detector.digest, step=self._last_step)

    def _report_failure(self, failure: Exception) -> None:
        if self.config.delta_sync_on_failure == "stop":
            raise failure
        if not self._failure_reported:
            self._failure_reported = True
            logger.warning(
                "delta sync: publishing to %s has stopped at version %d, training goes on without it: %s",
                self.bucket,
                self.publisher.durable_seq,
                failure,
            )

    def _bits_of(self, live: list[LiveTensor], base: Checkpoint | None) -> OldBits:
        """Tensors of the last extraction by checkpoint name, copied one at a time."""
        entries = {name: entry for entry in live for name in entry.names}
        kept = self._naming.kept
        return lambda name: base.bits(name) if base is not None and name in kept else self.detector.bits(entries[name])

    def _save_files(
        self,
        model: torch.nn.Module,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
        base: Checkpoint | None,
    ) -> Path:
        """What an anchor needs beside the weights."""
        separate = self._separate
        if separate is not None:
            return self._upkeep.save_files(lambda folder: separate.save_files(folder, model))
        others = {base} if base is not None and self._naming.kept else set()
        return self._upkeep.save_files(lambda folder: save_files(folder, others, unwrap(model), processing_class))

    def _take_adapter(self, model: torch.nn.Module, reference: str | None, base: Checkpoint | None) -> SeparateAdapter:
        if self._ranks.count > 1:
            raise SetupError(
                "delta_sync_adapter is 'separate', which is supported on one training process only; use "
                "delta_sync_adapter=merged"
            )
        return SeparateAdapter(model, self.config, reference, base)

    def _take_in(self, model: torch.nn.Module, reference: str | None, base: Checkpoint | None) -> None:
        """Find out what the model holds and remember its bits."""
        refuse_wrappers(model)
        kernels.warm_up()
        base_table = None if base is None else base.table()
        self._naming = self._separate or Naming(model, base_table)
        live = self._naming.live(model)
        kept = self._naming.kept
        self.table = table_of(live, [] if base_table is None else [base_table[name] for name in kept])
        if base_table is not None:
            require_base(base_table, self.table, reference)
        own = owned(live, self._ranks)
        # what nobody trains is counted once
        bits = {name: base.bits(name) for name in kept} if base is not None and self._ranks.is_first else {}
        self._owned_params = sum(prod(entry.shape) * len(entry.names) for entry in own) + sum(
            array.size for array in bits.values()
        )
        placement = choose(self.config.delta_sync_snapshot, own, to_come_bytes=training_bytes(live))
        self.detector = Detector(own, bits, placement)

    def _open_run(
        self,
        store: Store,
        live: list[LiveTensor],
        model: torch.nn.Module,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
        reference: str | None,
        base: Checkpoint | None,
        digest: Digest,
        step: int,
        resumed: Resumed | None,
    ) -> tuple[Manifest, int, BucketWriter | None]:
        """Begin or continue the run on the first process.

        Returns:
            Its newest version, the number of the next, and on that process the writer.
        """
        kept = self._naming.kept

        def needs_bits() -> bool:
            head = BucketReader(store).latest()
            if head is None:
                return base is None or base.digest() != digest
            return resumed is not None and resumed.run == head.version.run and head.digest != digest

        needed = self._ranks.first_does(needs_bits)
        # once, and the only time that sharded weights come together
        bits = gather_bits(live, self._ranks) if needed else {}
        writers: list[BucketWriter] = []

        def begin() -> tuple[str, int]:
            def start(**kwargs: Any) -> None:
                writers.append(
                    BucketWriter.start(
                        store,
                        table=self.table,
                        digest=digest,
                        step=step,
                        signer=self._upkeep.signer,
                        adapter=None if self._separate is None else self._separate.described,
                        **kwargs,
                    )
                )

            if not needed:
                start(reference=reference)
            elif BucketReader(store).latest() is not None:
                whole = bits | {name: base.bits(name) for name in kept if base is not None}
                files = self._save_files(model, processing_class, base)
                start(reference=reference, bits=whole.__getitem__, files=files)
            else:
                if self._separate is None:
                    logger.info(
                        "delta sync: the weights are not those of %s; uploading a checkpoint",
                        reference or "a known checkpoint",
                    )
                with tempfile.TemporaryDirectory(prefix="delta-anchor-") as folder:
                    if self._separate is not None:
                        self._separate.save(Path(folder), bits, model)
                    else:
                        others = {} if base is None else dict.fromkeys(kept, base)
                        save_anchor(Path(folder), bits, others, unwrap(model), processing_class)
                    start(reference=None, anchor_dir=Path(folder))
            return writers[0].head.to_bytes().decode(), writers[0].next_seq

        raw, next_seq = self._ranks.first_does(begin)
        return Manifest.from_bytes(raw.encode(), store.url), next_seq, writers[0] if writers else None
