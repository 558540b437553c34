# SPDX-License-Identifier: Apache-2.0
"""How the processes of one training talk to each other about publishing: small JSON values in a key/value store.

It is the store that `torch.distributed` was initialised with, over connections of its own. No process group is made
and no collective runs, so nothing here can come between the trainer's collectives, from whatever thread it is called.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from delta_wire.errors import DeltaError, SetupError

# ranks may still be loading or compiling
_EXCHANGE_TIMEOUT_S = 900.0
_LEAVE_TIMEOUT_S = 5.0
_POLL_MIN_S, _POLL_MAX_S = 0.0005, 0.05
_NUMBERS = itertools.count()


class RankError(DeltaError, RuntimeError):
    """Another process of the training failed, or cannot be reached."""


class Ranks:
    """One process' view of all. Not safe for use by several threads at once; each takes a [`Ranks.clone`].

    Args:
        store (`torch.distributed.Store`, *optional*): none for a training of one process.
        rank (`int`, *optional*, defaults to `0`): this process.
        count (`int`, *optional*, defaults to `1`): all processes.
        prefix (`str`, *optional*): of the keys, so that sessions do not meet.
    """

    def __init__(self, store: Any = None, rank: int = 0, count: int = 1, prefix: str = ""):
        self.rank = rank
        self.count = count
        self._store = store
        self._prefix = prefix
        self._exchanges = 0

    @classmethod
    def join(cls, world_size: int) -> Ranks:
        """The processes of the running training; all of them must make their sessions in the same order."""
        if world_size == 1:
            return cls()
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != world_size:
            found = dist.get_world_size() if dist.is_available() and dist.is_initialized() else "none"
            raise SetupError(
                f"the trainer runs on {world_size} processes, torch.distributed knows {found}; start training by "
                "torchrun or accelerate launch"
            )
        # a clone has a connection of its own: a wait on it holds up nobody else
        store: Any = dist.distributed_c10d._get_default_store()
        return cls(store.clone(), dist.get_rank(), world_size, f"delta_sync/{next(_NUMBERS)}")

    @property
    def is_first(self) -> bool:
        """Whether this process leads: it alone writes manifests."""
        return self.rank == 0

    def clone(self) -> Ranks:
        """The same for another thread."""
        return Ranks(None if self._store is None else self._store.clone(), self.rank, self.count, self._prefix)

    def put(self, key: str, value: Any) -> None:
        """Set a key; values are set once."""
        self._call(lambda store: store.set(self._key(key), json.dumps(value)))

    def find(self, key: str) -> Any | None:
        """Value of a key, `None` if it has not been set."""
        if not self._call(lambda store: store.check([self._key(key)])):
            return None
        return json.loads(self._call(lambda store: store.get(self._key(key))))

    def wait_for(self, key: str, timeout_s: float, cancelled: Callable[[], bool] | None = None) -> Any | None:
        """Value of a key as soon as it is set; `None` when time runs out or it is `cancelled`."""
        until_s = time.monotonic() + timeout_s
        pause_s = _POLL_MIN_S
        while (value := self.find(key)) is None:
            if time.monotonic() > until_s or (cancelled is not None and cancelled()):
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)
        return value

    def remove(self, key: str) -> None:
        """Forget a key that everybody has read."""
        self._call(lambda store: store.delete_key(self._key(key)))

    def exchange(self, value: Any, timeout_s: float = _EXCHANGE_TIMEOUT_S) -> list[Any]:
        """Values of all ranks, in their order. Called by all where training stands still anyway: it waits for the
        slowest."""
        if self.count == 1:
            return [value]
        self._exchanges += 1
        self.put(f"exchange/{self._exchanges}/{self.rank}", [value])
        found = []
        for rank in range(self.count):
            entry = self.wait_for(f"exchange/{self._exchanges}/{rank}", timeout_s)
            if entry is None:
                raise RankError(
                    f"rank {rank} of {self.count} has not come to where rank {self.rank} waits for it within "
                    f"{timeout_s:.0f} s; every process needs the callback. Look at its log."
                )
            found += entry
        # whoever has put something into this one has read all of the one before
        if self._exchanges > 1:
            self.remove(f"exchange/{self._exchanges - 1}/{self.rank}")
        return found

    def all_do(self, action: Callable[[], Any], takes_s: float = 0.0) -> list[Any]:
        """Run an action everywhere; its values of all ranks, or an error everywhere if it failed anywhere.

        The values must be JSON. A rank on which the action failed raises its own error, the others a [`RankError`],
        also if a rank takes much longer than `takes_s`.
        """
        own: Exception | None = None
        value = None
        try:
            value = action()
        except Exception as error:
            if self.count == 1:
                raise
            own = error
        told = {"value": value, "error": own and f"{type(own).__name__}: {own}"}
        try:
            found = self.exchange(told, takes_s + _EXCHANGE_TIMEOUT_S)
        except RankError:
            if own is not None:
                raise own from None
            raise
        failed = next((rank for rank, entry in enumerate(found) if entry["error"] is not None), None)
        if failed is not None:
            # the process that holds the store may end by this: not before all have read why
            with suppress(RankError):
                self.leave()
            raise own or RankError(f"rank {failed} of {self.count} has failed: {found[failed]['error']}")
        return [entry["value"] for entry in found]

    def first_does(self, action: Callable[[], Any], takes_s: float = 0.0) -> Any:
        """Run an action on the first rank; its value everywhere, or an error everywhere."""
        return self.all_do(action if self.is_first else lambda: None, takes_s)[0]

    def leave(self) -> None:
        """Say that nothing more is read; the first rank, which may hold the store, waits for all (bounded)."""
        self.put(f"left/{self.rank}", True)
        if self.is_first:
            until_s = time.monotonic() + _LEAVE_TIMEOUT_S
            for rank in range(self.count):
                self.wait_for(f"left/{rank}", until_s - time.monotonic())

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _call(self, action: Callable[[Any], Any]) -> Any:
        try:
            return action(self._store)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.count} cannot reach the store of torch.distributed: {error}; the process "
                "that holds it has ended"
            ) from error
