# SPDX-License-Identifier: Apache-2.0
"""Requests for the digest of all live weights, handed from any thread to the driver's."""

from __future__ import annotations

from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from delta_wire.digest import Digest
from delta_wire.errors import DigestMismatchError
from delta_wire.manifest import VersionId
from vllm_delta.adapter_run import AdapterRun
from vllm_delta.layout import total
from vllm_delta.live import Live

Answer = dict[str, Any]


def _failure(error: BaseException) -> Answer:
    return {"error": str(error) or repr(error)}


class Verifications:
    """Open requests; one pass over the weights answers all of them.

    Args:
        share_frac (`float`): of the time that each rank spends on a pass.
    """

    def __init__(self, share_frac: float) -> None:
        self._share_frac = share_frac
        self._open: SimpleQueue[Future[Answer]] = SimpleQueue()

    def request(self) -> Future[Answer]:
        """Ask; safe from any thread."""
        answer: Future[Answer] = Future()
        self._open.put(answer)
        return answer

    def fail(self, error: BaseException) -> None:
        """Answer all open requests with `{"error"}`: an exception would leave a traceback in the engine's log."""
        for answer in self._take():
            answer.set_result(_failure(error))

    def answer(
        self, live: Live, expected: Digest, version: VersionId | None, adapter: AdapterRun | None = None
    ) -> str | None:
        """Answer all open requests. Returns what is wrong with the live weights, if anything is and somebody asked.

        Args:
            live (`Live`): the weights.
            expected (`Digest`): what they must be.
            version (`VersionId`, *optional*): that they are.
            adapter (`AdapterRun`, *optional*): where versions are those of an adapter, it is compared, too, and the
                answer is about it: the weights are its base.
        """
        waiting = self._take()
        if not waiting:
            return None
        sums: dict[str, Digest] = {}
        problem = wrong = None
        try:
            sums = live.digests(self._share_frac)
            if total(sums) != expected:
                problem = f"a verification found digest {total(sums)}, expected {expected}"
            wrong = None if adapter is None else adapter.prove()
        except DigestMismatchError as error:
            problem = f"a verification found that {error}"
        except Exception as error:
            for answer in waiting:
                answer.set_result(_failure(error))
            raise
        result = {
            "digest": str(total(sums)) if sums else None,
            "expected": str(expected),
            "equal": problem is None,
            "problem": problem,
            "version": None if version is None else str(version),
            "num_params": live.table.num_params,
            "ranks": live.layout.num_ranks,
            "tensors": {name: str(digest) for name, digest in sorted(sums.items())},
        }
        at = None if adapter is None else adapter.position
        if at is not None:
            problem = problem or (wrong and f"a verification found that {wrong}")
            result |= {
                "digest": None if wrong else str(at.digest),
                "expected": str(at.digest),
                "equal": problem is None,
                "problem": problem,
                "version": str(at.version),
                "base_digest": result["digest"],
            }
        for answer in waiting:
            answer.set_result(result)
        return problem

    def _take(self) -> list[Future[Answer]]:
        taken = []
        while True:
            try:
                taken.append(self._open.get_nowait())
            except Empty:
                return taken
