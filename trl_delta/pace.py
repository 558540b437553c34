# SPDX-License-Identifier: Apache-2.0
"""The one thing a trainer ever waits for: servers that are too far behind, and only where that is asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf

from delta_wire.errors import SetupError
from trl_delta.acks import AckWatcher
from trl_delta.config import DeltaSyncConfig
from trl_delta.publisher import Publisher

logger = logging.getLogger(__name__)
# longest pause between two looks at how far the servers are
_LOOK_S = 0.05


class Pace:
    """How far the servers are behind the trainer, and waiting for them. Used by the training thread.

    Args:
        bucket (`str`): its address, for errors.
        config ([`DeltaSyncConfig`]): bounds and policy.
        publisher ([`Publisher`]): knows the newest version.
        watcher ([`AckWatcher`]): knows what is served.
    """

    def __init__(self, bucket: str, config: DeltaSyncConfig, publisher: Publisher, watcher: AckWatcher):
        self._bucket = bucket
        self._config = config
        self._publisher = publisher
        self._watcher = watcher
        self._waits = True

    @property
    def lag_versions(self) -> float:
        """Versions between the newest weights handed over and the slowest server; infinite while none serves."""
        served = self._watcher.seq
        return inf if served is None else max(0, self._publisher.newest_seq - served)

    def wait(self, max_lag: int) -> bool:
        """Wait until no live server is more than so many versions behind; bounded by `delta_sync_lag_timeout_s`.

        After a wait in vain there is no other one before the servers have caught up: an outage of the bucket costs
        the trainer one such time. There is none while a server needs an anchor that only the next step can bring.

        Returns:
            `bool`: whether they are.
        """
        reached = self._wait(
            lambda: self.lag_versions <= max_lag,
            lambda: (
                f"expected servers at most {max_lag} version(s) behind version {self._publisher.newest_seq}, found "
                f"{self._served()}"
            ),
        )
        # whether there is room says nothing of the servers
        self._waits = self._waits or reached
        return reached

    def wait_for_room(self) -> bool:
        """Wait until the publisher can take another delta; bounded likewise.

        Returns:
            `bool`: whether it can.
        """
        return self._wait(
            lambda: self._publisher.has_room,
            lambda: f"expected version {self._publisher.durable_seq + 1} in the bucket, found {self._served()}",
        )

    def require_served(self, seq: int, timeout_s: float) -> None:
        """Wait until servers serve a version; [`SetupError`] with what they say instead when time is up."""
        if timeout_s <= 0 or self._watcher.wait_for(seq, timeout_s):
            return
        found = [
            f"{server} serves {ack.version} and is {ack.state}" + (f" ({ack.reason})" if ack.reason else "")
            for server, ack in self._watcher.servers.items()
        ]
        raise SetupError(
            f"{self._bucket}: expected {self._config.delta_sync_expected_servers} server(s) to serve version {seq} "
            f"within {timeout_s:.0f} s (delta_sync_start_timeout_s), found {'; '.join(found) or 'none'}. Start 'vllm "
            "serve MODEL --worker-extension-cls vllm_delta.DeltaWorkerExtension' with "
            f"DELTA_SYNC_BUCKET={self._bucket} in its environment, or look at its log."
        )

    def _served(self) -> str:
        return "none that serves" if self._watcher.seq is None else f"version {self._watcher.seq}"

    def _wait(self, reached: Callable[[], bool], missing: Callable[[], str]) -> bool:
        timeout_s, poll_s = self._config.delta_sync_lag_timeout_s, min(self._config.delta_sync_ack_poll_s, _LOOK_S)
        deadline_s = time.monotonic() + (timeout_s if self._waits else 0)
        while not reached():
            if self._publisher.stopped is not None or self._publisher.needs_step:
                return False
            if time.monotonic() >= deadline_s:
                self._report(missing(), timeout_s)
                return False
            time.sleep(poll_s)
        return True

    def _report(self, missing: str, timeout_s: float) -> None:
        said = (
            f"delta sync: {self._bucket}: {missing} after {timeout_s:g} s (delta_sync_lag_timeout_s). Look at GET "
            "/delta/status of the servers."
        )
        if self._config.delta_sync_on_failure == "stop":
            raise SetupError(said)
        if self._waits:
            self._waits = False
            logger.warning("%s Training goes on with what they serve, and waits again once they have caught up.", said)
