# SPDX-License-Identifier: Apache-2.0
"""The live weights of all ranks as one state: mapped, checked against the loaded checkpoint, and digested."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_wire import kernels
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.encodings.warm import warm_up
from delta_wire.state import TensorTable
from vllm_delta.layout import Layout, refuse, total
from vllm_delta.ranks import Ranks

logger = logging.getLogger("vllm.vllm_delta.live")


@dataclass(frozen=True, slots=True)
class Live:
    """What is known about the live weights since the start.

    Args:
        ranks (`Ranks`): side work on the ranks.
        layout (`Layout`): of all ranks.
        table (`TensorTable`): of the loaded checkpoint.
        folder (`Path`): of the loaded checkpoint.
        loaded (`Digest`): of the weights as they were loaded.
    """

    ranks: Ranks
    layout: Layout
    table: TensorTable
    folder: Path
    loaded: Digest

    @classmethod
    def attach(cls, ranks: Ranks, folder: Path) -> Live:
        """Map the live weights, check the map against samples of the loaded checkpoint, and compute what they are.

        Raises:
            LayoutError: some tensors cannot be patched exactly; the message names all of them.
        """
        table = Checkpoint(folder).table()
        traces = ranks.trace()
        # whatever computes tokens is not to wait for what follows the bucket, in this process or on the ranks
        cores = sorted({core for rank in traces for core in rank.cores})
        kernels.keep_off(cores)
        ranks.job("keep_off", *map(str, cores))
        # staging beside generation compiles nothing
        warm_up()
        layout = Layout(table, traces)
        problems: dict[str, str] = {}

        def note(replies: list[dict[str, Any]]) -> None:
            for rank, reply in enumerate(replies):
                for name, reason in reply["problems"].items():
                    problems.setdefault(name, f"{reason} (rank {rank})")

        checked = ranks.job("check")
        note(checked)
        refuse(problems)
        computed = [reply["computed"] for reply in checked]
        for number in range(max(map(len, computed))):
            note(ranks.prove(number))
        refuse(problems)
        if any(computed):
            logger.info(
                "vLLM computes %s from their weights; these are kept in host memory, and what an update touches is "
                "computed anew",
                ", ".join(dict.fromkeys(name for names in computed for name in names)),
            )
        return cls(ranks, layout, table, folder, total(_digests(ranks, layout)))

    def digests(self, share_frac: float = 1.0) -> dict[str, Digest]:
        """Digest of every tensor over all live bits.

        Args:
            share_frac (`float`, *optional*, defaults to `1.0`): of the time that each rank spends on it; the rest is
                the engine's.

        Raises:
            DigestMismatchError: ranks that share a block disagree.
        """
        return _digests(self.ranks, self.layout, share_frac)


def _digests(ranks: Ranks, layout: Layout, share_frac: float = 1.0) -> dict[str, Digest]:
    return layout.combine([reply["lanes"] for reply in ranks.job("digest", str(share_frac))])
