# SPDX-License-Identifier: Apache-2.0
"""Whether a version of the bucket is of this model, where the server stands in its run, and whether it leads on."""

from __future__ import annotations

import logging

from delta_wire.errors import BaseMismatchError
from delta_wire.manifest import Manifest, VersionId
from vllm_delta.live import Live
from vllm_delta.subscriber import Position, Subscriber

logger = logging.getLogger("vllm.vllm_delta.course")


class Course:
    """Decisions about versions; nothing here changes a weight.

    Args:
        subscriber (`Subscriber`): the bucket.
        bucket (`str`): what errors call it.
    """

    def __init__(self, subscriber: Subscriber, bucket: str):
        self._subscriber = subscriber
        self._bucket = bucket
        self._ignored: VersionId | None = None
        # what a look at the status should tell although nothing is wrong with what is served
        self.remark: str | None = None

    def require_model(self, live: Live, target: Manifest) -> None:
        """Raise [`ModelMismatchError`] with the names that differ unless the run is of the served model."""
        self._subscriber.table(target).require_same(
            live.table, f"the run in {self._bucket}", f"the served checkpoint {live.folder}"
        )

    def locate(self, live: Live, target: Manifest) -> Position:
        """Find the version of the run that the loaded weights are; [`BaseMismatchError`] if they are none."""
        position = self._subscriber.locate(live.loaded, target, live.folder)
        if position is None:
            raise BaseMismatchError(
                f"the served checkpoint {live.folder} is another base than that of the run in {self._bucket}: its "
                f"digest is {live.loaded}, version {target.version} has {target.digest} and no version before it has "
                "the served one. Start the server on the run's base or on a checkout of one of its versions "
                "(delta-wire checkout), or use another bucket."
            )
        return position

    def leads_on(self, position: Position, target: Manifest) -> bool:
        """Whether the target is ahead. A pointer that went back is ignored, with one warning and a remark."""
        here, there = position.version, target.version
        self.remark = None
        if here.run != there.run or there.seq > here.seq:
            return True
        if there.seq < here.seq:
            self.remark = f"{self._bucket}: the pointer went back to {there}; staying on {here}"
            if self._ignored != there:
                self._ignored = there
                logger.warning("%s", self.remark)
        if there.seq == here.seq and target.digest != position.digest:
            raise BaseMismatchError(
                f"{self._bucket}: version {there} now has digest {target.digest}, this server committed it as {here} "
                f"with {position.digest}; versions never change. Give each run a bucket of its own."
            )
        return False
