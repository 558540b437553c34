# SPDX-License-Identifier: Apache-2.0
"""A second thread for what is over in a millisecond or two.

A pool takes a twentieth of that to be told of work, this a fiftieth: while generation stands still, that counts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from delta_wire.kernels.devices import unbind_thread


class Handed:
    """Work that the second thread does when it comes to it, unless it is stopped before.

    Args:
        work: takes nothing; what it returns is lost.
    """

    def __init__(self, work: Callable[[], object]):
        self._work = work
        # who gets the first says whether the work begins; the second is held until it is over, as an event would say
        # that takes ten times as long to make
        self._beginning, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        self._error: BaseException | None = None

    def do(self) -> None:
        """For the second thread."""
        if not self._beginning.acquire(blocking=False):
            return
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._over.release()

    def stop(self) -> BaseException | None:
        """Let it not begin any more, or wait until it is over. Returns what it raised."""
        if self._beginning.acquire(blocking=False):
            self._over.release()
        with self._over:
            return self._error


def hand(handed: Handed) -> None:
    """Let the second thread of this process do something, after what it was handed before; it may never come to it."""
    try:
        # threads do not come along when a process forks
        queue = _queue(os.getpid())
    except RuntimeError:
        # the system has no thread to give: whoever hands this over does it alone
        return
    queue.put(handed)


@functools.cache
def _queue(process: int) -> SimpleQueue[Handed]:
    queue: SimpleQueue[Handed] = SimpleQueue()
    threading.Thread(target=_serve, args=(queue,), name="delta-second", daemon=True).start()
    return queue


def _serve(queue: SimpleQueue[Handed]) -> None:
    # without it the thread is slower; if it ended here, all that it is handed would be kept and nothing done
    with contextlib.suppress(OSError):
        unbind_thread()
    while True:
        queue.get().do()
