# SPDX-License-Identifier: Apache-2.0
"""One training run and its bucket, without a trainer: what the callback drives."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from delta_wire.errors import SetupError
from delta_wire.state import TensorTable, num_changed
from delta_wire.stores import Store
from trl_delta.acks import AckWatcher
from trl_delta.config import DeltaSyncConfig
from trl_delta.content import Content
from trl_delta.detector import Detector
from trl_delta.joint import make_publisher, open_everywhere
from trl_delta.metrics import version_metrics
from trl_delta.names import LiveTensor
from trl_delta.opening import open_run
from trl_delta.pace import Pace
from trl_delta.publisher import Publisher
from trl_delta.ranks import Ranks
from trl_delta.resume import Resumed
from trl_delta.rounds import Opened
from trl_delta.upkeep import Upkeep

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
    publisher: Publisher
    watcher: AckWatcher
    pace: Pace
    _ranks: Ranks

    def __init__(self, bucket: str, config: DeltaSyncConfig | None = None):
        self.bucket = bucket
        self.config = config or DeltaSyncConfig()
        self._content: Content | None = None
        self._closed = False
        self._failure_reported = False
        self._last_step = 0
        self._extracted_step = 0
        self._extract_s = 0.0
        self._changed_frac = 0.0

    @property
    def started(self) -> bool:
        return self._content is not None

    @property
    def content(self) -> Content:
        """What is published; [`~delta_wire.errors.SetupError`] before the start."""
        if self._content is None:
            raise SetupError(f"{self.bucket}: the session has not started")
        return self._content

    @property
    def table(self) -> TensorTable:
        """Tensors of every version."""
        return self.content.table

    @property
    def detector(self) -> Detector:
        """Finds what has changed of what this process owns."""
        return self.content.detector

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
                methods after the same steps. Each publishes what it owns; see [`~trl_delta.rounds.PartWriter`].
            resumed ([`Resumed`], *optional*): what the trainer's checkpoint says, if training resumes from one.
        """
        if self.started:
            raise SetupError(f"{self.bucket}: this session has started already; use a new callback for a second run")
        self._ranks = ranks = Ranks.join(world_size)
        store = open_everywhere(self.bucket, ranks)
        content = Content(model, self.config, ranks, processing_class)
        if resumed is not None:
            resumed.compare(str(content.digest), step)
        made: list[Upkeep] = []
        ranks.all_do(lambda: made.append(Upkeep(self.bucket, self.config, signs=ranks.is_first)))
        (self._upkeep,) = made
        opened = open_run(store, content, ranks, self._upkeep, step=step, resumed=resumed)
        ranks.all_do(lambda: self._begin(store, content, opened, step))
        self._content = content
        if ranks.is_first:
            logger.info("delta sync: version %s is in %s", opened.head.version, store.url)

    def _begin(self, store: Store, content: Content, opened: Opened, step: int) -> None:
        """Start what runs beside the training."""
        self._last_step = self._extracted_step = step
        ranks, writer = self._ranks, opened.writer
        anchors = replayed = None
        if writer is not None:
            files = partial(self._upkeep.save_files, content.save_files)
            if ranks.count > 1:
                replayed = self._upkeep.replayed_anchors(writer, files, content.kept_bits)
            else:
                anchors = self._upkeep.anchors(writer, files)
            self._upkeep.keep(writer)
        self.publisher = make_publisher(
            ranks,
            store,
            content.table,
            opened,
            content.pieces(),
            content.detector,
            step=step,
            encoding=self.config.delta_sync_encoding,
            anchors=anchors,
            replayed=replayed,
            snapshot=content.last_bits(),
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

    def live(self) -> list[LiveTensor]:
        """The model's tensors as they are now, under their checkpoint names. Called by all processes."""
        return self.content.live()

    def step(self, step: int) -> None:
        """Weights have changed: extract and hand over, if it is their turn.

        Waits for servers only where `delta_sync_max_lag_versions` says so.
        """
        self._last_step = step
        due = step % self.config.delta_sync_steps == 0
        turn = self.publisher.take_turn(step, due)
        if not due:
            return
        self._extract(turn)
        # the other processes wait for the first one in the collectives of the next step
        if turn and self.config.delta_sync_max_lag_versions is not None and self._ranks.is_first:
            try:
                self.pace.wait(self.config.delta_sync_max_lag_versions)
            except SetupError as error:
                if self._ranks.count == 1:
                    raise
                # all processes end together, or the others would wait for this one
                self.publisher.stop(error)

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
        # what could not be looked at is nowhere
        return self._ranks.first_does(lambda: self.pace.wait(max_lag) and not self.publisher.left_out, timeout_s)

    def finish(self) -> bool:
        """Publish the last weights, wait until they are durable (bounded), and end the threads.

        Returns:
            `bool`: whether the newest durable version has the model's weights.
        """
        if not self.started or self._closed:
            return False
        try:
            self._extract(self.publisher.take_last_turn(self.config.delta_sync_close_timeout_s))
            published = self.publisher.wait(self.config.delta_sync_close_timeout_s)
            if self.publisher.failure is not None:
                self._report_failure(self.publisher.failure)
            is_base_right = self._require_base_unmoved()
        finally:
            self.close()
        if not published and self.publisher.failure is None:
            self._report_unpublished()
        return published and is_base_right

    def _report_unpublished(self) -> None:
        timeout_s = self.config.delta_sync_close_timeout_s
        logger.warning(
            "delta sync: training has ended, but %s; the newest version of %s is %d, the weights of step %d are not "
            "in it. Save the model itself.",
            "its last weights could not be looked at"
            if self.publisher.left_out
            else f"the bucket could not be written for {timeout_s:.0f} s",
            self.bucket,
            self.publisher.durable_seq,
            self._last_step,
        )

    def _require_base_unmoved(self) -> bool:
        try:
            self.content.require_base_unmoved()
        except Exception as error:
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
        """What the trainer logs; bytes and ratio are those of the newest durable version, and so is the share of what
        has changed where several processes publish a part each."""
        metrics = version_metrics(self.publisher, self.watcher, self.table)
        if self._ranks.count == 1:
            metrics["delta/changed_frac"] = self._changed_frac
        return {"delta/changed_frac": 0.0, **metrics, "delta/extract_s": self._extract_s}

    def _extract(self, turn: bool = True) -> None:
        """Look at the weights and hand over what has changed.

        Args:
            turn (`bool`, *optional*, defaults to `True`): whether it is the turn of these weights. Where looking takes
                all processes each calls this at every step that is due, whatever it knows of turns.
        """
        failure = self.publisher.failure
        if failure is not None:
            turn = False
        if turn:
            self._extracted_step = self._last_step
        try:
            began_s = time.monotonic()
            own = self.content.own(turn)
            if own is not None:
                self._hand_over(own, began_s)
        except Exception as error:
            if not turn:
                raise
            # of one process: it must not hold up the others, and the next version has it all
            stops = self.config.delta_sync_on_failure == "stop"
            self.publisher.skip(error, step=self._last_step, stops=stops)
            failure = self.publisher.failure
        if failure is not None:
            self._report_failure(failure)

    def _hand_over(self, own: list[LiveTensor], began_s: float) -> None:
        with self.publisher.extracting:
            delta = self.detector.extract(own)
            self._extract_s = time.monotonic() - began_s
            self._changed_frac = num_changed(delta) / max(1, self.content.num_owned)
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
