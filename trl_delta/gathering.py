# SPDX-License-Identifier: Apache-2.0
"""The collectives of publishing: the factors of sharded adapters, which are small, made whole on every process.

A process that raised before a collective would hold up all others in it. So whatever can fail is done first, then all
processes agree on whether to go on, and every process gets there, with an error if it has one; then nothing is left
but the collective itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from delta_wire.errors import SetupError
from delta_wire.shards import Shard
from delta_wire.state import TensorSpec
from trl_delta.dtensors import sharded_dim
from trl_delta.names import LiveTensor
from trl_delta.ranks import RankError

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


class Answer(IntEnum):
    """What a process says before a collective; the largest answer of all decides."""

    READY = 0
    NO_TURN = 1
    FAILED = 2


class Agreement:
    """Asks all processes of the training whether to go on. In the training thread, after the same step on each.

    Args:
        device (`torch.device`): of the training.
    """

    def __init__(self, device: torch.device):
        import torch

        # made once: nothing that could fail comes before the collective
        self._answer = torch.zeros(1, dtype=torch.int32, device=device)

    def reach(self, own: Answer) -> Answer:
        """The largest answer of all processes."""
        import torch.distributed as dist

        self._answer.fill_(int(own))
        dist.all_reduce(self._answer, op=dist.ReduceOp.MAX)
        return Answer(int(self._answer))


class WholeFactors:
    """Makes the factors of sharded adapters whole at every look at the weights.

    Args:
        live (list of [`LiveTensor`]): the model, the same on every process.
    """

    def __init__(self, live: Iterable[LiveTensor]):
        factors = _factors(live)
        self._agreement = Agreement(factors[0].to_local().device) if factors else None

    @property
    def needed(self) -> bool:
        """Whether a look takes all processes."""
        return self._agreement is not None

    def of(self, read: Callable[[], list[LiveTensor]], turn: bool = True) -> list[LiveTensor] | None:
        """The model with all factors whole; called by all processes after the same step if it is [`needed`].

        Args:
            read (callable): returns the model's tensors as they are now.
            turn (`bool`, *optional*, defaults to `True`): whether this process takes part.

        Returns:
            list of [`LiveTensor`]: or `None` if this process does not take part. If any of the others cannot,
            [`RankError`], and where it fails its own error; all have been here then, and none waits for another.
        """
        if self._agreement is None:
            return read() if turn else None
        failure: Exception | None = None
        live: list[LiveTensor] = []
        gathering = None
        if turn:
            try:
                live = read()
                gathering = Gathering(_factors(live))
            except Exception as error:
                failure = error
        own = Answer.FAILED if failure is not None else Answer.READY if turn else Answer.NO_TURN
        answer = self._agreement.reach(own)
        if failure is not None:
            raise failure
        if gathering is None:
            return None
        if answer is not Answer.READY:
            raise RankError("another process of the training could not look at its weights; see its log")
        gathering.run()
        whole = gathering.whole()
        return [
            entry if entry.merge is None else replace(entry, merge=entry.merge.with_whole(whole)) for entry in live
        ]


def _factors(live: Iterable[LiveTensor]) -> list[DTensor]:
    # parts of one weight have the same adapters
    merges = {id(entry.merge): entry.merge for entry in live if entry.merge is not None}
    return [tensor for merge in merges.values() for tensor in merge.sharded()]


class Gathering:
    """Sharded tensors made whole, in one collective for each mesh and dtype.

    Args:
        tensors (list of `DTensor`): cut along their rows; the same on every process. All memory for the collective is
            taken here.
    """

    def __init__(self, tensors: Iterable[DTensor]):
        self._local: list[DTensor] = []
        by_kind: dict[tuple[Any, int, torch.dtype], list[DTensor]] = {}
        for tensor in tensors:
            dim = sharded_dim(tensor, "the factor of an adapter")
            if dim is None:
                self._local.append(tensor)
            else:
                by_kind.setdefault((tensor.device_mesh, dim, tensor.dtype), []).append(tensor)
        self._batches = [_Batch(batch, mesh, dim) for (mesh, dim, _), batch in by_kind.items()]

    def run(self) -> None:
        """The collectives."""
        for batch in self._batches:
            batch.run()

    def whole(self) -> dict[int, torch.Tensor]:
        """The tensors by the `id` of the sharded ones."""
        found = {id(tensor): tensor.to_local().detach() for tensor in self._local}
        for batch in self._batches:
            found |= batch.whole()
        return found


class _Batch:
    """Tensors of one dtype that the same processes share: the rows of each process are sent as one piece."""

    def __init__(self, tensors: list[DTensor], mesh: Any, dim: int):
        import torch

        self._tensors = tensors
        self._group = mesh.get_group(dim)
        self._shards = [Shard(rank, mesh.size(dim)) for rank in range(mesh.size(dim))]
        rows = torch.cat([tensor.to_local().detach().reshape(-1) for tensor in tensors])
        expected = sum(self._sizes(self._shards[mesh.get_coordinate()[dim]]))
        if rows.numel() != expected:
            raise SetupError(
                f"the factors of adapters: expected {expected} elements on this process, found {rows.numel()}; delta "
                "sync knows shards that are cut as torch.chunk cuts"
            )
        # as long as the longest: shares are not equal
        self._piece_elements = max(sum(self._sizes(shard)) for shard in self._shards)
        self._sent = rows.new_zeros(self._piece_elements)
        self._sent[: rows.numel()] = rows
        self._received = rows.new_empty(len(self._shards) * self._piece_elements)
        if rows.device.type != "cpu":
            # devices work in their own time: what goes wrong there is to be known before all agree
            torch.accelerator.synchronize(rows.device)

    def run(self) -> None:
        import torch.distributed as dist

        dist.all_gather_into_tensor(self._received, self._sent, group=self._group)

    def whole(self) -> dict[int, torch.Tensor]:
        import torch

        pieces = [
            piece[: sum(sizes)].split(sizes)
            for piece, sizes in zip(
                self._received.split(self._piece_elements), map(self._sizes, self._shards), strict=True
            )
        ]
        return {
            id(tensor): torch.cat(parts).view(tensor.shape)
            for tensor, parts in zip(self._tensors, zip(*pieces, strict=True), strict=True)
        }

    def _sizes(self, shard: Shard) -> list[int]:
        """Elements of each tensor that are in a shard."""
        spans = (shard.span(TensorSpec("", tuple(tensor.shape))) for tensor in self._tensors)
        return [stop - start for start, stop in spans]
