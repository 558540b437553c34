# SPDX-License-Identifier: Apache-2.0
"""One public function per primitive; the device of the tensors chooses the form."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from delta_wire.kernels.devices import is_on_host, on_device, require, to_host, to_torch, unbind_thread, uses_triton

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
INT32_LIMIT = 1 << 31
NUM_THREADS = min(16, os.cpu_count() or 1)
_THREADS = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="delta-kernels", initializer=unbind_thread)


def beside(function: Callable[..., T], *args: object) -> Future[T]:
    """Run a function in a thread of the pool."""
    return _THREADS.submit(function, *args)


def round_bits(param: torch.Tensor) -> torch.Tensor:
    """bf16 bit patterns of a parameter.

    Args:
        param (`torch.Tensor`): contiguous, float32, bfloat16 or float16, any shape and device.

    Returns:
        `torch.Tensor`: int16, same shape and device; never an alias of `param`.
    """
    from delta_wire.kernels import reference

    require(param.dtype in reference.ROUNDABLE, f"round_bits: dtype {param.dtype} is not one of {reference.ROUNDABLE}")
    require(param.is_contiguous(), "round_bits: the parameter must be contiguous")
    import torch

    param = param.detach()
    if uses_triton(param):
        from delta_wire.kernels import triton_extract

        with on_device(param):
            return triton_extract.round_bits(param)
    if param.device.type != "cpu" or param.dtype == torch.bfloat16:
        return reference.round_bits(param)
    from delta_wire.kernels import cpu

    wide = to_host(param.to(torch.float32), np.uint32).reshape(-1)
    out = torch.empty(param.shape, dtype=torch.int16)
    cpu.round_f32(wide, to_host(out, np.uint16).reshape(-1))
    return out


def extract(param: torch.Tensor, snapshot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the elements of a parameter whose bf16 bits differ from a snapshot, and bring the snapshot up to date.

    Args:
        param (`torch.Tensor`): contiguous, float32, bfloat16 or float16, any shape, `N` elements.
        snapshot (`torch.Tensor`): int16, `[N]`, same device; updated in place at exactly the changed elements.

    Returns:
        `(indices, old, new)`: flat indices `[K]` in ascending order, int32 (int64 from 2^31 elements on); bits
        before and after, int16 `[K]`. Reads 6 N bytes for float32 and 4 N for bfloat16, once.
    """
    return extract_many([param], [snapshot])[0]


def extract_many(
    params: Sequence[torch.Tensor], snapshots: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """As [`extract`] for all tensors of a model, on one device, whose host learns all sizes in one go.

    Args:
        params (list of `torch.Tensor`): see [`extract`].
        snapshots (list of `torch.Tensor`): one for each, no two sharing memory.

    Returns:
        For each tensor what [`extract`] returns. On a GPU these are views of common arrays.
    """
    for param, snapshot in zip(params, snapshots, strict=True):
        _check_extract(param, snapshot)
    if params and uses_triton(params[0]):
        from delta_wire.kernels import triton_extract

        devices = {tensor.device for tensor in (*params, *snapshots)}
        require(
            len(devices) == 1, f"extract_many: all tensors must be on one device, found {sorted(map(str, devices))}"
        )
        with on_device(params[0]):
            return triton_extract.extract_many([param.detach() for param in params], snapshots)
    if all(is_on_host(param) for param in params):
        from delta_wire.kernels import host_extract

        return host_extract.extract_many(params, snapshots)
    return [_extract(param, snapshot) for param, snapshot in zip(params, snapshots, strict=True)]


def _extract(param: torch.Tensor, snapshot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    from delta_wire.kernels import reference

    indices, old, new = reference.extract(param.detach(), snapshot)
    return indices.to(torch.int32 if param.numel() < INT32_LIMIT else torch.int64), old, new


def _check_extract(param: torch.Tensor, snapshot: torch.Tensor) -> None:
    import torch

    from delta_wire.kernels import reference

    require(param.dtype in reference.ROUNDABLE, f"extract: dtype {param.dtype} is not one of {reference.ROUNDABLE}")
    require(param.is_contiguous() and snapshot.is_contiguous(), "extract: parameter and snapshot must be contiguous")
    require(
        snapshot.dtype == torch.int16 and snapshot.numel() == param.numel() and snapshot.dim() == 1,
        f"extract: the snapshot must be int16 [{param.numel()}], found {snapshot.dtype} {list(snapshot.shape)}",
    )


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

    if not isinstance(bits, np.ndarray) and uses_triton(bits):
        import torch

        from delta_wire.kernels import triton_digest

        with on_device(bits):
            on_gpu = torch.as_tensor(indices).to(bits.device)
            return lanes_to_ints(triton_digest.digest_sparse(on_gpu, bits.detach(), keys))
    if not isinstance(indices, np.ndarray):
        indices = indices.cpu().numpy()
    bits = bits.view(np.uint16) if isinstance(bits, np.ndarray) else to_host(bits.cpu(), np.uint16)
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

    require(bits.ndim <= 3, f"digest_dense: blocks have at most three dimensions, found {bits.ndim}")
    if steps is None:
        steps = tuple(int(np.prod(bits.shape[axis + 1 :], dtype=np.int64)) for axis in range(bits.ndim))
    if not isinstance(bits, np.ndarray) and uses_triton(bits):
        from delta_wire.kernels import triton_digest

        with on_device(bits):
            return lanes_to_ints(triton_digest.digest_dense(bits.detach(), keys, start, tuple(steps)))
    array = bits if isinstance(bits, np.ndarray) else bits.detach().cpu().numpy()
    array = array.view(np.uint16)
    pad = 3 - array.ndim
    array = array.reshape((1,) * pad + array.shape)
    all_steps = (0,) * pad + tuple(steps)
    lanes = cpu.digest_block(array, start, *all_steps, np.uint64(keys[0]), np.uint64(keys[1]))
    return int(lanes[0]), int(lanes[1])


def lanes_to_ints(lanes: torch.Tensor) -> tuple[int, int]:
    """Two int64 sums, read from their device, as lanes modulo 2^64."""
    lane_0, lane_1 = lanes.tolist()
    return lane_0 % (1 << 64), lane_1 % (1 << 64)


def gather(flat: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Bits of `flat` (int16, `[M]`) at `positions` (int64, `[K]`): int16 `[K]` on the same device."""
    import torch

    from delta_wire.kernels import reference

    if uses_triton(flat):
        from delta_wire.kernels import triton_scatter

        with on_device(flat):
            return triton_scatter.gather(flat, positions)
    if flat.device.type != "cpu":
        return reference.gather(flat, positions)
    from delta_wire.kernels import cpu

    out = torch.empty(positions.numel(), dtype=torch.int16)
    cpu.gather(to_host(flat, np.uint16), positions.numpy(), to_host(out, np.uint16))
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

    if uses_triton(flat):
        from delta_wire.kernels import triton_scatter

        with on_device(flat):
            return triton_scatter.scatter(flat, positions, new)
    if flat.device.type != "cpu":
        return reference.scatter(flat, positions, new)
    from delta_wire.kernels import cpu

    old = torch.empty(positions.numel(), dtype=torch.int16)
    cpu.scatter(to_host(flat, np.uint16), positions.numpy(), to_host(new, np.uint16), to_host(old, np.uint16))
    return old


def swap(
    flat: torch.Tensor, positions: torch.Tensor, new: torch.Tensor, indices: torch.Tensor, keys: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write bits into a live parameter, and hash what was there and what is there now, read back.

    Args:
        flat, positions, new: see [`scatter`].
        indices (`torch.Tensor`): int32 or int64 `[K]`, the flat checkpoint indices of the elements.
        keys: the two 64-bit keys of the tensor's name.

    Returns:
        `(old, lanes)`: int16 `[K]`, the bits that were there before; int64 `[2, 2]` on the parameter's device, the
        two lanes of the old bits and of those read back. Lanes of several calls may be added up before
        [`lanes_to_ints`] reads them, so that a commit of many tensors waits for its device once.
    """
    import torch

    from delta_wire.kernels import reference

    if uses_triton(flat):
        from delta_wire.kernels import triton_scatter

        with on_device(flat):
            return triton_scatter.swap(flat, positions, new, indices, keys)
    if flat.device.type != "cpu":
        return reference.swap(flat, positions, new, indices, keys)
    from delta_wire.kernels import cpu

    old = torch.empty(positions.numel(), dtype=torch.int16)
    lanes = np.zeros(4, dtype=np.uint64)
    bits, written, before = to_host(flat, np.uint16), to_host(new, np.uint16), to_host(old, np.uint16)
    cpu.swap(bits, positions.numpy(), written, indices.numpy(), np.uint64(keys[0]), np.uint64(keys[1]), before, lanes)
    return old, to_torch(lanes).reshape(2, 2)


def warm_up(device: torch.device | str = "cpu") -> None:
    """Compile (or load from the cache) the forms that serve a device, so that no step or commit pays for it later.

    Args:
        device (`torch.device` or `str`, *optional*): of the weights.
    """
    import torch

    from delta_wire.kernels import second
    from delta_wire.kernels.replacement import Change, replacements

    # starts it
    second.hand(second.Handed(lambda: None))
    for dtype in (torch.float32, torch.bfloat16):
        param = torch.ones(8, dtype=dtype, device=device)
        snapshot = torch.zeros(8, dtype=torch.int16, device=device)
        indices, _, new = extract(param, snapshot)
        round_bits(param)
    digest_sparse(indices, new, (1, 2))
    digest_sparse(indices.to(torch.int64), new, (1, 2))
    digest_dense(snapshot.reshape(2, 4), (1, 2))
    digest_dense(snapshot.reshape(2, 4)[:, :2], (1, 2))
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    bits = gather(snapshot, positions)
    scatter(snapshot, positions, bits)
    at, values = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint16)
    for index_dtype in (np.int32, np.int64):
        change = Change(snapshot, at, values, np.ones(1, dtype=np.bool_), np.zeros(1, dtype=index_dtype))
        replacements([change]).run()
