# SPDX-License-Identifier: Apache-2.0
"""Finding what changed on a CPU: all tensors of a call are cut into pieces, which threads take as they are free."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_wire.kernels import dispatch
from delta_wire.kernels.devices import to_host, to_torch

if TYPE_CHECKING:
    import torch

# elements of a piece: a share of work that amortises its start; 8 bytes of scratch an element and thread
_CHUNK = 1 << 20
_LOCAL = threading.local()
Found = tuple[np.ndarray, np.ndarray, np.ndarray]


class _Tensor:
    """One tensor, its snapshot, and what has been found in its pieces."""

    def __init__(self, param: torch.Tensor, snapshot: torch.Tensor):
        import torch

        from delta_wire.kernels import cpu

        self._find: Any
        if param.dtype == torch.bfloat16:
            self._bits, self._find = to_host(param, np.uint16).reshape(-1), cpu.extract_bits
        else:
            self._bits, self._find = to_host(param.to(torch.float32), np.uint32).reshape(-1), cpu.extract_f32
        self._held = to_host(snapshot, np.uint16)
        self._index_dtype = np.int32 if param.numel() < dispatch.INT32_LIMIT else np.int64
        self.starts = range(0, self._bits.size, _CHUNK)
        self._found: list[Found | None] = [None] * len(self.starts)

    def look(self, piece: int) -> None:
        """Find the changes of a piece and bring its part of the snapshot up to date."""
        start, scratch = self.starts[piece], _scratch(self._index_dtype)
        size = self._find(self._bits, self._held, start, min(start + _CHUNK, self._bits.size), *scratch)
        # kept first as views: without memory for copies they tell what to put back
        self._found[piece] = views = (scratch[0][:size], scratch[1][:size], scratch[2][:size])
        try:
            self._found[piece] = (views[0].copy(), views[1].copy(), views[2].copy())
        except BaseException:
            self.put_back(piece)
            raise

    def put_back(self, piece: int) -> None:
        """Let the snapshot hold what it held before."""
        found, self._found[piece] = self._found[piece], None
        if found is not None:
            self._held[found[0]] = found[1]

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch

        found = [pieces for pieces in self._found if pieces is not None]
        indices, old, new = (
            np.concatenate([np.empty(0, dtype=dtype), *(pieces[part] for pieces in found)])
            for part, dtype in enumerate((self._index_dtype, np.uint16, np.uint16))
        )
        return torch.from_numpy(indices), to_torch(old), to_torch(new)


def extract_many(
    params: Sequence[torch.Tensor], snapshots: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """See [`~delta_wire.kernels.dispatch.extract_many`]. An error leaves all snapshots as they were."""
    tensors = [_Tensor(*each) for each in zip(params, snapshots, strict=True)]
    pieces = [(tensor, piece) for tensor in tensors for piece in range(len(tensor.starts))]
    # its next item goes to one thread only
    work = iter(pieces)
    # one piece is not worth a thread
    others = min(dispatch.NUM_THREADS, -(-sum(param.numel() for param in params) // _CHUNK)) - 1
    beside = [dispatch.beside(_take, work) for _ in range(others)]
    try:
        _take(work)
        for future in beside:
            future.result()
        return [tensor.result() for tensor in tensors]
    except BaseException:
        # whoever still looks would change a snapshot again
        wait(beside)
        for tensor, piece in pieces:
            tensor.put_back(piece)
        raise


def _take(work: Iterator[tuple[_Tensor, int]]) -> None:
    for tensor, piece in work:
        tensor.look(piece)


def _scratch(index_dtype: type[np.generic]) -> Found:
    """This thread's room for the changes of one piece."""
    held = getattr(_LOCAL, "scratch", None)
    if held is None or held[0].dtype != index_dtype or held[0].size < _CHUNK:
        held = (np.empty(_CHUNK, index_dtype), np.empty(_CHUNK, np.uint16), np.empty(_CHUNK, np.uint16))
        _LOCAL.scratch = held
    return held
