# SPDX-License-Identifier: Apache-2.0
"""A second thread for what is over in a millisecond or two.

A pool takes a twentieth of that to be told of work, this a fiftieth: while generation stands still, that counts.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from delta_wire.kernels.devices import unbind_thread


class Handed:
    """Work that the second thread does, or will do when it comes to it.

    Args:
        work: takes nothing; what it returns is lost.
    """

    def __init__(self, work: Callable[[], object]):
        self._work = work
        self._outcome: SimpleQueue[BaseException | None] = SimpleQueue()

    def do(self) -> None:
        """For the second thread."""
        try:
            self._work()
        except BaseException as error:
            self._outcome.put(error)
        else:
            self._outcome.put(None)

    def join(self) -> BaseException | None:
        """Wait until it is over, once. Returns what it raised."""
        return self._outcome.get()


def hand(work: Callable[[], object]) -> Handed:
    """Let the second thread of this process do something, after what it was handed before."""
    handed = Handed(work)
    # threads do not come along when a process forks
    _queue(os.getpid()).put(handed)
    return handed


@functools.cache
def _queue(process: int) -> SimpleQueue[Handed]:
    queue: SimpleQueue[Handed] = SimpleQueue()
    threading.Thread(target=_serve, args=(queue,), name="delta-second", daemon=True).start()
    return queue


def _serve(queue: SimpleQueue[Handed]) -> None:
    unbind_thread()
    while True:
        queue.get().do()
