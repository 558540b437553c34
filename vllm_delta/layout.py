# SPDX-License-Identifier: Apache-2.0
"""What all ranks hold together: whether it is the whole checkpoint, and who answers for which block.

Pure bookkeeping over the traces of all ranks; runs in the engine core, imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from delta_wire.digest import Digest
from delta_wire.errors import DigestMismatchError, LayoutError
from delta_wire.state import TensorTable
from vllm_delta.blocks import Block, coverage

_SHOWN = 6

# of every region of a rank (by its position in the rank's trace): two lanes
Lanes = Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank's answer to the trace.

    Args:
        regions: `(checkpoint name, block of the checkpoint tensor)` in the rank's own order.
        problems: name → reason.
        cores: that its computing threads are bound to, if they are to any.
    """

    regions: list[tuple[str, Block]]
    problems: dict[str, str]
    cores: list[int] = field(default_factory=list)


class Layout:
    """The regions of all ranks, matched.

    Blocks that several ranks hold (norms, shared heads) form a group: its first holder answers for the digest, the
    others must agree with it.

    Args:
        table (`TensorTable`): what the checkpoint holds.
        traces: one per rank.

    Raises:
        LayoutError: a tensor cannot be patched, or the ranks do not hold every element once; all names are told.
    """

    def __init__(self, table: TensorTable, traces: Sequence[RankTrace]):
        self.table = table
        self.num_ranks = len(traces)
        problems: dict[str, str] = {}
        for rank, found in enumerate(traces):
            for name, reason in found.problems.items():
                problems.setdefault(name, f"{reason} on rank {rank}")
        groups: dict[tuple[str, Block], int] = {}
        self._group_of: list[list[int]] = []
        for found in traces:
            self._group_of.append([groups.setdefault((n, b.merged()), len(groups)) for n, b in found.regions])
        self._tensor_of = [name for name, _ in groups]
        self._holders = [0] * len(groups)
        for rank_groups in self._group_of:
            for group in rank_groups:
                self._holders[group] += 1
        blocks: dict[str, list[Block]] = {name: [] for name in table}
        for name, block in groups:
            blocks[name].append(block)
        for name, held in blocks.items():
            if name not in problems and (problem := _coverage_problem(table[name].num_elements, held)):
                problems[name] = problem
        refuse(problems)

    def combine(self, replies: Sequence[Lanes]) -> dict[str, Digest]:
        """Add up what the ranks report, each block once.

        Args:
            replies: one per rank, regions without an entry count as zero.

        Returns:
            `dict[str, Digest]`: the sum per tensor, of the tensors that some region reported.

        Raises:
            DigestMismatchError: holders of the same block disagree.
        """
        # a change may reach few of the regions: only what was reported is looked at
        found: dict[int, tuple[tuple[int, int], int]] = {}
        for rank, lanes in enumerate(replies):
            for region, value in lanes.items():
                group = self._group_of[rank][region]
                first, count = found.get(group, (value, 0))
                if first != value:
                    self._raise_disagreement(group)
                found[group] = (first, count + 1)
        sums: dict[str, Digest] = {}
        for group, (value, count) in found.items():
            if count != self._holders[group] and value != (0, 0):
                self._raise_disagreement(group)
            name = self._tensor_of[group]
            sums[name] = sums.get(name, Digest()) + Digest(*value)
        return sums

    def _raise_disagreement(self, group: int) -> NoReturn:
        raise DigestMismatchError(
            f"{self._tensor_of[group]}: ranks that hold the same block of it report different bits"
        )


def _coverage_problem(num_elements: int, blocks: list[Block]) -> str | None:
    if not blocks and num_elements:
        return (
            "no rank of the server copies it into a live parameter; if it is tied to another tensor, save the "
            "checkpoint without it"
        )
    try:
        found = coverage(num_elements, blocks)
    except ValueError as error:
        return str(error)
    if found.overlaps:
        return "ranks hold blocks of it that overlap without being equal"
    if found.num_elements != num_elements:
        return f"the ranks together hold {found.num_elements} of its {num_elements} elements"
    return None


def refuse(problems: Mapping[str, str]) -> None:
    """Raise [`LayoutError`] with every name and reason, unless there is none."""
    if not problems:
        return
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(problems.items())[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise LayoutError(
        f"the server cannot patch {len(problems)} tensors exactly: {shown}{more}. Serve a bf16 checkpoint with "
        "--dtype bfloat16 (or float32) and without options that repack weights."
    )


def total(sums: Mapping[str, Digest]) -> Digest:
    """Sum over tensors."""
    result = Digest()
    for part in sums.values():
        result = result + part
    return result
