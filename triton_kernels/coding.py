# SPDX-License-Identifier: Apache-2.0
"""The bulk of the encodings over tensors, one public function per primitive; the device chooses the form.

Streams are int64 tensors of little-endian 64-bit words, bit `i` in word `i // 64`; universes, counts and groups are
host arrays (int64), because they are part of the file. See `cpu_rice` for the codes and their sources.

Letters: `S` segments, `P` listed positions, `G` groups, `K` changed elements, `N` elements, `Q` slabs, `M` levels'
entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_wire.kernels.devices import on_device, require, to_host, to_torch, uses_triton

if TYPE_CHECKING:
    import torch


def rice_encode(positions: torch.Tensor, n: np.ndarray, count: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Code segments of positions.

    Args:
        positions (`torch.Tensor`): int32 or int64 `[P]`, strictly ascending within each segment, one after another.
        n, count: `[S]`, universe and number of positions of each segment.

    Returns:
        `(low, high)`: the stream of low bits and the unary stream. On a GPU the host reads one number, the size of
        the latter.
    """
    _check_segments(n, count)
    if uses_triton(positions):
        from delta_wire.kernels import triton_pack

        with on_device(positions):
            low, high, high_bits = triton_pack.rice_encode(positions, n, count)
            return low, high[: (int(high_bits) + 63) // 64]
    from delta_wire.kernels import cpu_rice

    positions = positions.cpu()
    low_bits, high_bits = cpu_rice.stream_bounds(n, count)
    low = np.zeros(low_bits // 64 + 1, dtype=np.uint64)
    high = np.zeros(high_bits // 64 + 1, dtype=np.uint64)
    low_bits, high_bits = cpu_rice.rice_encode(positions.numpy(), n, count, low, high)
    return to_torch(low[: (low_bits + 63) // 64]), to_torch(high[: (high_bits + 63) // 64])


def rice_decode(low: torch.Tensor, high: torch.Tensor, n: np.ndarray, count: np.ndarray) -> tuple[torch.Tensor, int]:
    """Inverse of [`rice_encode`].

    Returns:
        `(positions, end)`: int64 `[P]` and the number of bits of `high` read, −1 where the streams do not fit the
        segments; the positions mean nothing then.
    """
    _check_segments(n, count)
    if uses_triton(low):
        from delta_wire.kernels import triton_pack

        with on_device(low):
            positions, end = triton_pack.rice_decode(low, high, n, count)
            return positions, int(end)
    import torch

    from delta_wire.kernels import cpu_rice

    positions = torch.zeros(int(count.sum()), dtype=torch.int64)
    words = to_host(low.cpu(), np.uint64), to_host(high.cpu(), np.uint64)
    return positions, int(cpu_rice.rice_decode(*words, n, count, positions.numpy()))


def encode_steps(
    old: torch.Tensor, new: torch.Tensor, group: np.ndarray
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """Steps on the monotone bf16 line as signs, top bits and low bits.

    Args:
        old, new (`torch.Tensor`): int16 `[K]`, different everywhere, in group order.
        group: `[G]`, sizes of the groups with statistics of their own.

    Returns:
        `(counts, levels, raw)`: int64 `[G, 16]`, how many magnitudes have their top bit above each level; int64
        `[counts.sum()]`, for each group and level the ranks of these among the magnitudes that reach the level; the
        words of signs and low bits. On a GPU the host reads the counts, which are part of the file.
    """
    if uses_triton(old):
        from delta_wire.kernels import triton_steps

        with on_device(old):
            return triton_steps.encode_steps(old, new, group)
    import torch

    from delta_wire.kernels import cpu_steps

    num_changed = int(group.sum())
    require(old.numel() == new.numel() == num_changed, f"encode_steps: {num_changed} elements in groups")
    bits = to_host(old.cpu(), np.uint16), to_host(new.cpu(), np.uint16)
    counts, levels, raw = cpu_steps.encode_steps(*bits, group, np.empty(0, dtype=np.int64))
    return counts, torch.from_numpy(levels), to_torch(raw)


def decode_steps(levels: torch.Tensor, group: np.ndarray, counts: np.ndarray, raw: torch.Tensor) -> torch.Tensor:
    """Inverse of [`encode_steps`].

    Args:
        levels (`torch.Tensor`): int64, ranks that [`rice_decode`] found to lie within their universes.
        group, counts, raw: see [`encode_steps`].

    Returns:
        `torch.Tensor`: int16 `[K]`, steps modulo 2^16.
    """
    num_changed, num_levels = int(group.sum()), int(counts.sum())
    num_words = (num_changed + num_levels + 63) // 64
    require(
        levels.numel() == num_levels and raw.numel() == num_words,
        f"decode_steps: the counts ask for {num_levels} levels and {num_words} words, "
        f"found {levels.numel()} and {raw.numel()}",
    )
    if uses_triton(levels):
        from delta_wire.kernels import triton_steps

        with on_device(levels):
            return triton_steps.decode_steps(levels, group, counts, raw)
    import torch

    from delta_wire.kernels import cpu_steps

    step = torch.empty(num_changed, dtype=torch.int16)
    words = np.append(to_host(raw.cpu(), np.uint64), np.uint64(0))
    cpu_steps.decode_steps(levels.cpu().numpy(), group, counts, words, to_host(step, np.uint16))
    return step


def apply_steps(old: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Bits (`[K]`, int16) moved by `step` (`[K]`, int16, modulo 2^16) along the monotone bf16 line."""
    require(old.numel() == step.numel(), f"apply_steps: {old.numel()} elements, {step.numel()} steps")
    if uses_triton(old):
        from delta_wire.kernels import triton_steps

        with on_device(old):
            return triton_steps.apply_steps(old, step)
    import torch

    from delta_wire.kernels import cpu_steps

    new = torch.empty(old.numel(), dtype=torch.int16)
    cpu_steps.apply_steps(to_host(old.cpu(), np.uint16), to_host(step.cpu(), np.uint16), to_host(new, np.uint16))
    return new


def class_counts(bits: torch.Tensor, slab_elements: int) -> torch.Tensor:
    """Elements of each exponent in each slab (`[Q, 256]`, int64) of a tensor's bits (`[N]`, int16)."""
    if uses_triton(bits):
        from delta_wire.kernels import triton_rank

        with on_device(bits):
            return triton_rank.class_counts(bits, slab_elements)
    import torch

    from delta_wire.kernels import cpu_rank

    host = to_host(bits.cpu(), np.uint16)
    counts = torch.zeros((-(-host.size // slab_elements), 256), dtype=torch.int64)
    for slab, own in enumerate(counts.numpy()):
        cpu_rank.class_counts(host[slab * slab_elements : (slab + 1) * slab_elements], own)
    return counts


def class_ranks(bits: torch.Tensor, indices: torch.Tensor, slab_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where changed elements stand among those of the same exponent.

    Args:
        bits (`torch.Tensor`): int16 `[N]`, the old values.
        indices (`torch.Tensor`): int32 or int64 `[K]`, ascending flat indices.
        slab_elements (`int`): ranks restart here.

    Returns:
        `(exponent, rank)`: uint8 and int64 `[K]`.
    """
    if uses_triton(bits):
        from delta_wire.kernels import triton_rank

        with on_device(bits):
            return triton_rank.class_ranks(bits, indices, slab_elements)
    import torch

    from delta_wire.kernels import cpu_rank

    host, listed = to_host(bits.cpu(), np.uint16), indices.cpu().numpy()
    exponent = torch.empty(listed.size, dtype=torch.uint8)
    rank = torch.empty(listed.size, dtype=torch.int64)
    for base in range(0, host.size, slab_elements):
        own = slice(*np.searchsorted(listed, [base, base + slab_elements]))
        slab = host[base : base + slab_elements]
        cpu_rank.class_ranks(slab, base, listed[own], exponent.numpy()[own], rank.numpy()[own])
    return exponent, rank


def class_select(
    bits: torch.Tensor, ranks: torch.Tensor, changed: torch.Tensor, slab_elements: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of [`class_ranks`].

    Args:
        bits (`torch.Tensor`): int16 `[N]`, the old values.
        ranks (`torch.Tensor`): int64 `[K]`, slab by slab and exponent by exponent, ascending, each below the number
            of elements that its slab holds of its exponent.
        changed (`torch.Tensor`): int64 `[Q, 256]`, how many ranks there are of each.
        slab_elements (`int`): see [`class_ranks`].

    Returns:
        `(indices, slot)`: int64 `[K]`, the flat indices in ascending order and where in `ranks` each came from.
    """
    if uses_triton(bits):
        from delta_wire.kernels import triton_rank

        with on_device(bits):
            return triton_rank.class_select(bits, ranks, changed.to(bits.device), slab_elements)
    import torch

    from delta_wire.kernels import cpu_rank

    host, coded = to_host(bits.cpu(), np.uint16), ranks.cpu().numpy()
    starts = np.concatenate([[0], np.cumsum(changed.cpu().numpy())])
    indices = torch.empty(coded.size, dtype=torch.int64)
    slot = torch.empty(coded.size, dtype=torch.int64)
    for slab, base in enumerate(range(0, host.size, slab_elements)):
        start = starts[slab * 256 : slab * 256 + 257].copy()
        own = slice(start[0], start[-1])
        elements = host[base : base + slab_elements]
        cpu_rank.class_select(elements, base, coded, start, indices.numpy()[own], slot.numpy()[own])
    return indices, slot


def _check_segments(n: np.ndarray, count: np.ndarray) -> None:
    require(
        n.shape == count.shape and bool((count >= 0).all()) and bool((count <= n).all()),
        "segments: every count must lie between zero and its universe",
    )
