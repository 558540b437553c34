# SPDX-License-Identifier: Apache-2.0
"""One public function per primitive; the device of the tensors chooses the form."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_INT32_LIMIT = 1 << 31
# a share of work that amortises a task's start, about 5 ms
_CHUNK = 1 << 22
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="delta-kernels")


def _host(tensor: torch.Tensor, dtype: type[np.generic]) -> np.ndarray:
    """Zero-copy numpy view of a CPU tensor's bits."""
    import torch

    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(integer).numpy().view(dtype)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def round_bits(param: torch.Tensor) -> torch.Tensor:
    """bf16 bit patterns of a parameter.

    Args:
        param (`torch.Tensor`): contiguous, float32, bfloat16 or float16, any shape and device.

    Returns:
        `torch.Tensor`: int16, same shape and device; never an alias of `param`.
    """
    from delta_wire.kernels import reference

    _require(
        param.dtype in reference.ROUNDABLE, f"round_bits: dtype {param.dtype} is not one of {reference.ROUNDABLE}"
    )
    _require(param.is_contiguous(), "round_bits: the parameter must be contiguous")
    import torch

    param = param.detach()
    if param.device.type != "cpu" or param.dtype == torch.bfloat16:
        return reference.round_bits(param)
    from delta_wire.kernels import cpu

    wide = _host(param.to(torch.float32), np.uint32).reshape(-1)
    out = torch.empty(param.shape, dtype=torch.int16)
    cpu.round_f32(wide, _host(out, np.uint16).reshape(-1))
    return out


def extract(param: torch.Tensor, snapshot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the elements of a parameter whose bf16 bits differ from a snapshot, and bring the snapshot up to date.

    Args:
        param (`torch.Tensor`): contiguous, float32, bfloat16 or float16, any shape, `N` elements.
        snapshot (`torch.Tensor`): int16, `[N]`, same device; updated in place at exactly the changed elements.

    Returns:
        `(indices, old, new)`: flat indices `[K]` in ascending order, int32 (int64 from 2^31 elements on); bits
        before and after, int16 `[K]`. On a CPU reads 6 N bytes for float32 and 4 N for bfloat16, twice.
    """
    import torch

    from delta_wire.kernels import reference

    _require(param.dtype in reference.ROUNDABLE, f"extract: dtype {param.dtype} is not one of {reference.ROUNDABLE}")
    _require(param.is_contiguous() and snapshot.is_contiguous(), "extract: parameter and snapshot must be contiguous")
    _require(
        snapshot.dtype == torch.int16 and snapshot.numel() == param.numel() and snapshot.dim() == 1,
        f"extract: the snapshot must be int16 [{param.numel()}], found {snapshot.dtype} {list(snapshot.shape)}",
    )
    index_dtype = torch.int32 if param.numel() < _INT32_LIMIT else torch.int64
    if param.device.type != "cpu":
        indices, old, new = reference.extract(param.detach(), snapshot)
        return indices.to(index_dtype), old, new
    from delta_wire.kernels import cpu

    if param.dtype == torch.bfloat16:
        source, count, fill = _host(param, np.uint16).reshape(-1), cpu.count_bits, cpu.fill_bits
    else:
        source, count, fill = _host(param.to(torch.float32), np.uint32).reshape(-1), cpu.count_f32, cpu.fill_f32
    held = _host(snapshot, np.uint16)
    bounds = [(at, min(at + _CHUNK, source.size)) for at in range(0, source.size, _CHUNK)]
    counts = list(_THREADS.map(lambda b: count(source, held, b[0], b[1]), bounds))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    num_changed = int(offsets[-1])
    indices = torch.empty(num_changed, dtype=index_dtype)
    old = torch.empty(num_changed, dtype=torch.int16)
    new = torch.empty(num_changed, dtype=torch.int16)
    views = (indices.numpy(), _host(old, np.uint16), _host(new, np.uint16))
    tasks = [
        _THREADS.submit(fill, source, held, start, stop, *views, at)
        for (start, stop), at, changed in zip(bounds, offsets, counts, strict=False)
        if changed
    ]
    for task in tasks:
        task.result()
    return indices, old, new


def digest_sparse(indices: torch.Tensor | np.ndarray, bits: torch.Tensor | np.ndarray, keys: tuple[int, int]):
    """Sum of the element hashes of `K` elements.

    Args:
        indices: `[K]`, int32 or int64, flat checkpoint indices.
        bits: `[K]`, 16-bit integers.
        keys: the two 64-bit keys of the tensor's name.

    Returns:
        `(int, int)`: two lanes modulo 2^64.
    """
    from delta_wire.kernels import cpu

    if not isinstance(indices, np.ndarray):
        indices = indices.cpu().numpy()
    bits = bits.view(np.uint16) if isinstance(bits, np.ndarray) else _host(bits.cpu(), np.uint16)
    lanes = cpu.digest_sparse(indices, bits, np.uint64(keys[0]), np.uint64(keys[1]))
    return int(lanes[0]), int(lanes[1])


def digest_dense(
    bits: torch.Tensor | np.ndarray, keys: tuple[int, int], start: int = 0, steps: tuple[int, ...] | None = None
) -> tuple[int, int]:
    """Sum of the element hashes of a block.

    Args:
        bits: 16-bit integers, up to three dimensions, any strides.
        keys: the two 64-bit keys of the tensor's name.
        start (`int`): flat checkpoint index of the block's first element.
        steps: for each dimension of `bits`, the distance in checkpoint elements between neighbours; defaults to the
            distances of a contiguous tensor of the block's own shape.

    Returns:
        `(int, int)`: two lanes modulo 2^64. Reads 2 N bytes.
    """
    from delta_wire.kernels import cpu

    array = bits if isinstance(bits, np.ndarray) else bits.detach().cpu().numpy()
    array = array.view(np.uint16)
    if array.ndim > 3:
        raise ValueError(f"digest_dense: blocks have at most three dimensions, found {array.ndim}")
    if steps is None:
        steps = tuple(int(np.prod(array.shape[axis + 1 :], dtype=np.int64)) for axis in range(array.ndim))
    pad = 3 - array.ndim
    array = array.reshape((1,) * pad + array.shape)
    all_steps = (0,) * pad + tuple(steps)
    lanes = cpu.digest_block(array, start, *all_steps, np.uint64(keys[0]), np.uint64(keys[1]))
    return int(lanes[0]), int(lanes[1])


def gather(flat: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Bits of `flat` (int16, `[M]`) at `positions` (int64, `[K]`): int16 `[K]` on the same device."""
    import torch

    from delta_wire.kernels import reference

    if flat.device.type != "cpu":
        return reference.gather(flat, positions)
    from delta_wire.kernels import cpu

    out = torch.empty(positions.numel(), dtype=torch.int16)
    cpu.gather(_host(flat, np.uint16), positions.numpy(), _host(out, np.uint16))
    return out


def scatter(flat: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Write bits into a live parameter.

    Args:
        flat (`torch.Tensor`): int16 view `[M]` of the parameter's storage.
        positions (`torch.Tensor`): int64 `[K]`, no repeats, already checked to lie in `[0, M)`.
        new (`torch.Tensor`): int16 `[K]`.

    Returns:
        `torch.Tensor`: int16 `[K]`, the bits that were there before.
    """
    import torch

    from delta_wire.kernels import reference

    if flat.device.type != "cpu":
        return reference.scatter(flat, positions, new)
    from delta_wire.kernels import cpu

    old = torch.empty(positions.numel(), dtype=torch.int16)
    cpu.scatter(_host(flat, np.uint16), positions.numpy(), _host(new, np.uint16), _host(old, np.uint16))
    return old


def warm_up() -> None:
    """Compile (or load from the cache) every CPU form, so that no step or commit pays for it later."""
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        param = torch.ones(8, dtype=dtype)
        snapshot = torch.zeros(8, dtype=torch.int16)
        indices, _, new = extract(param, snapshot)
        round_bits(param)
    digest_sparse(indices, new, (1, 2))
    digest_sparse(indices.to(torch.int64), new, (1, 2))
    digest_dense(snapshot.reshape(2, 4), (1, 2))
    digest_dense(snapshot.reshape(2, 4)[:, :2], (1, 2))
    positions = torch.zeros(1, dtype=torch.int64)
    scatter(snapshot, positions, gather(snapshot, positions))
