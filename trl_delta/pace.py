# SPDX-License-Identifier: Apache-2.0
"""The one thing a trainer ever waits for: servers that are too far behind, and only where that is asked for."""

from __future__ import annotations

import logging
import time
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
        the trainer one such time.

        Returns:
            `bool`: whether they are.
        """
        timeout_s, poll_s = self._config.delta_sync_lag_timeout_s, min(self._config.delta_sync_ack_poll_s, _LOOK_S)
        deadline_s = time.monotonic() + (timeout_s if self._waits else 0)
        while self.lag_versions > max_lag:
            if self._publisher.failure is not None:
                return False
            if time.monotonic() >= deadline_s:
                self._report(max_lag, timeout_s)
                return False
            time.sleep(poll_s)
        self._waits = True
        return True

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

    def _report(self, max_lag: int, timeout_s: float) -> None:
        served = self._watcher.seq
        said = (
            f"delta sync: {self._bucket}: expected servers at most {max_lag} version(s) behind version "
            f"{self._publisher.newest_seq}, found {'none that serves' if served is None else f'version {served}'} "
            f"after {timeout_s:g} s (delta_sync_lag_timeout_s). Look at GET /delta/status of the servers."
        )
        if self._config.delta_sync_on_failure == "stop":
            raise SetupError(said)
        if self._waits:
            self._waits = False
            logger.warning("%s Training goes on with what they serve, and waits again once they have caught up.", said)
