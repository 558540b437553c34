# SPDX-License-Identifier: Apache-2.0
"""One training run and its bucket, without a trainer: what the callback drives."""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_wire import encodings, kernels
from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.checkpoint import Checkpoint
from delta_wire.errors import SetupError
from delta_wire.state import OldBits, num_changed
from delta_wire.stores import Store, open_store
from trl_delta.acks import AckWatcher
from trl_delta.base import base_checkpoint, require_base, save_anchor
from trl_delta.config import DeltaSyncConfig
from trl_delta.detector import Detector
from trl_delta.names import LiveTensor, Naming, refuse_unsupported, table_of
from trl_delta.pace import Pace
from trl_delta.publisher import Publisher
from trl_delta.resume import Resumed
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

    def __init__(self, bucket: str, config: DeltaSyncConfig | None = None):
        self.bucket = bucket
        self.config = config or DeltaSyncConfig()
        self._model: torch.nn.Module | None = None
        self._naming: Naming | None = None
        self._closed = False
        self._failure_reported = False
        self._last_step = 0
        self._extracted_step = 0
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
            model (`torch.nn.Module`): the training model, on one process.
            processing_class (*optional*): tokenizer or processor; goes into a checkpoint that is uploaded.
            step (`int`, *optional*, defaults to `0`): optimizer step of the weights.
            world_size (`int`, *optional*, defaults to `1`): training processes; more than one is refused.
            resumed ([`Resumed`], *optional*): what the trainer's checkpoint says, if training resumes from one.
        """
        if self.started:
            raise SetupError(f"{self.bucket}: this session has started already; use a new callback for a second run")
        refuse_unsupported(model, world_size)
        kernels.warm_up()
        store = open_store(self.bucket, create=True)
        reference, base = base_checkpoint(model)
        base_table = None if base is None else base.table()
        self._naming = Naming(model, base_table)
        live = self._naming.live(model)
        self.table = table_of(live, [] if base_table is None else [base_table[name] for name in self._naming.kept])
        if base_table is not None:
            require_base(base_table, self.table, reference)
        kept = {} if base is None else {name: base.bits(name) for name in self._naming.kept}
        self.detector = Detector(live, kept)
        self._upkeep = Upkeep(self.bucket, self.config)
        writer = self._open_run(store, live, model, processing_class, reference, base, step, resumed)
        self._model = model
        self._last_step = self._extracted_step = step
        encoding = self.config.delta_sync_encoding
        mirror = self.detector.copy_bits(live) if encodings.get(encoding).needs_old_weights else None
        files = self._upkeep.save_files(
            unwrap(model), processing_class, {base} if base and self._naming.kept else set()
        )
        self.publisher = Publisher(
            writer,
            step=step,
            encoding=encoding,
            mirror=mirror,
            anchors=self._upkeep.anchors(writer, files),
            snapshot=self._bits_of(live, base),
        )
        self._upkeep.keep(writer)
        self.watcher = AckWatcher(
            writer.acks,
            self.publisher,
            expected_servers=self.config.delta_sync_expected_servers,
            server_timeout_s=self.config.delta_sync_server_timeout_s,
            poll_s=max(self.config.delta_sync_ack_poll_s, store.least_listing_s),
            watch=partial(store.watch, "acks/"),
        )
        self.pace = Pace(self.bucket, self.config, self.publisher, self.watcher)
        logger.info("delta sync: version %s is in %s", writer.version, store.url)

    def live(self) -> list[LiveTensor]:
        """The model's tensors as they are now, under their checkpoint names."""
        if self._model is None or self._naming is None:
            raise SetupError(f"{self.bucket}: the session has not started")
        return self._naming.live(self._model)

    def step(self, step: int) -> None:
        """Weights have changed: extract and hand over, if it is their turn.

        Waits for servers only where `delta_sync_max_lag_versions` says so.
        """
        self._last_step = step
        if step % self.config.delta_sync_steps == 0:
            self._extract()
            if self.config.delta_sync_max_lag_versions is not None:
                self.pace.wait(self.config.delta_sync_max_lag_versions)

    def sync(self) -> bool:
        """Hand over the newest weights, whoever's turn it is, and wait for the servers to serve them.

        Returns:
            `bool`: whether the servers are as near as `delta_sync_max_lag_versions` (else `0`) demands.
        """
        if self._extracted_step != self._last_step:
            self._extract()
        return self.pace.wait(self.config.delta_sync_max_lag_versions or 0)

    def finish(self) -> bool:
        """Publish the last weights, wait until they are durable (bounded), and end the threads.

        Returns:
            `bool`: whether the newest durable version has the model's weights.
        """
        if not self.started or self._closed:
            return False
        try:
            self._extract()
            durable = self.publisher.wait(self.config.delta_sync_close_timeout_s)
            if self.publisher.failure is not None:
                self._report_failure(self.publisher.failure)
        finally:
            self.close()
        if not durable and self.publisher.failure is None:
            logger.warning(
                "delta sync: training has ended, but %s could not be written for %.0f s; its newest version is %d, "
                "the weights of step %d are not in it. Save the model itself.",
                self.bucket,
                self.config.delta_sync_close_timeout_s,
                self.publisher.durable_seq,
                self._last_step,
            )
        return durable

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
        return asdict(Resumed(version.run, self.publisher.durable_seq, str(self.detector.digest), self._last_step))

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
            delta = self.detector.extract(self.live())
            self._extract_s = time.monotonic() - began_s
            self._changed_frac = num_changed(delta) / max(1, self.table.num_params)
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
        kept = () if base is None or self._naming is None else self._naming.kept
        entries = {name: entry for entry in live for name in entry.names}
        return lambda name: base.bits(name) if base is not None and name in kept else self.detector.bits(entries[name])

    def _open_run(
        self,
        store: Store,
        live: list[LiveTensor],
        model: torch.nn.Module,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
        reference: str | None,
        base: Checkpoint | None,
        step: int,
        resumed: Resumed | None,
    ) -> BucketWriter:
        digest, signer = self.detector.digest, self._upkeep.signer
        if resumed is not None and resumed.digest != str(digest):
            logger.warning(
                "delta sync: the weights of step %d have digest %s, those that the checkpoint was saved with had %s; "
                "they were saved in another precision, or something has changed them since (an adapter that was "
                "merged twice?). What is published is what they are now.",
                step,
                digest,
                resumed.digest,
            )
        head = BucketReader(store).latest()
        if head is not None:
            bits = None
            if resumed is not None and resumed.run == head.version.run:
                bits = self._bits_of(live, base)
            return BucketWriter.start(
                store, table=self.table, digest=digest, reference=reference, step=step, bits=bits, signer=signer
            )
        if base is not None and base.digest() == digest:
            return BucketWriter.start(
                store, table=self.table, digest=digest, reference=reference, step=step, signer=signer
            )
        logger.info(
            "delta sync: the weights are not those of %s; uploading a checkpoint", reference or "a known checkpoint"
        )
        with tempfile.TemporaryDirectory(prefix="delta-anchor-") as folder:
            kept = {} if base is None or self._naming is None else dict.fromkeys(self._naming.kept, base)
            save_anchor(Path(folder), live, kept, unwrap(model), processing_class)
            return BucketWriter.start(
                store,
                table=self.table,
                digest=digest,
                reference=None,
                anchor_dir=Path(folder),
                step=step,
                signer=signer,
            )
