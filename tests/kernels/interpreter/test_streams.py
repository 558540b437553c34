# SPDX-License-Identifier: Apache-2.0
"""Triton forms of the bulk coding, interpreted, against the references and the CPU forms: all bits of all streams."""

import numpy as np
import pytest
import torch

from delta_wire import kernels
from delta_wire.kernels import cpu_rice, triton_pack, triton_rank, triton_steps
from delta_wire.kernels import reference_coding as reference
from delta_wire.kernels.segments import Segments

BLOCK = 64
SLAB = 256
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 21]
# universe and count: empty, full, one short of full, more and less than half, words filled exactly
SEGMENTS = {
    "none": [],
    "one": [(1000, 10)],
    "empty": [(5, 0), (1, 0)],
    "full": [(7, 7), (1, 1)],
    "holes": [(1000, 900), (10, 9), (65, 33)],
    "half": [(64, 32), (63, 32), (2, 1)],
    "mixed": [(1000, 10), (300, 290), (5, 0), (7, 7), (128, 64), (1, 1), (2000, 40), (90, 50)],
    "sparse": [(1 << 20, 3), (1 << 20, 1)],
}


def segments(case: str, seed: int = 0) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    n, count = (np.array([pair[i] for pair in SEGMENTS[case]], dtype=np.int64) for i in (0, 1))
    members = [np.sort(rng.choice(a, b, replace=False)) for a, b in SEGMENTS[case]]
    return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *members])), n, count


def triton_encode(positions: torch.Tensor, n: np.ndarray, count: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    low, high, high_bits = triton_pack.rice_encode(positions, n, count, block=BLOCK)
    # what lies behind the end must not reach a file
    assert not high[(int(high_bits) + 63) // 64 :].any()
    return low, high[: (int(high_bits) + 63) // 64]


def assert_equal(found: tuple, expected: tuple) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


@pytest.mark.parametrize("case", SEGMENTS)
def test_rice_streams_and_back(case: str):
    positions, n, count = segments(case)
    streams = triton_encode(positions, n, count)
    assert_equal(streams, kernels.rice_encode(positions, n, count))
    assert_equal(triton_encode(positions.to(torch.int32), n, count), streams)
    if case != "sparse":
        assert_equal(streams, reference.rice_encode(positions, n, count))
        assert_equal(streams, kernels.rice_encode(positions.to(torch.int32), n, count))
    found, end = triton_pack.rice_decode(*streams, n, count, block=BLOCK)
    assert torch.equal(found, positions)
    assert int(end) == kernels.rice_decode(*streams, n, count)[1]


@pytest.mark.parametrize("size", SIZES)
def test_rice_of_any_size(size: int):
    positions = torch.randperm(4 * size + 1)[:size].sort().values
    n, count = np.array([4 * size + 1]), np.array([size])
    streams = triton_encode(positions, n, count)
    assert_equal(streams, reference.rice_encode(positions, n, count))
    assert torch.equal(triton_pack.rice_decode(*streams, n, count, block=BLOCK)[0], positions)


def test_rice_beyond_2_to_the_31():
    positions = torch.tensor([0, (1 << 31) - 1, 1 << 31, (1 << 40) - 1, 5, 1 << 35])
    n, count = np.array([1 << 40, 1 << 36]), np.array([4, 2])
    streams = triton_encode(positions, n, count)
    assert_equal(streams, kernels.rice_encode(positions, n, count))
    assert torch.equal(triton_pack.rice_decode(*streams, n, count, block=BLOCK)[0], positions)


def test_rice_of_many_low_bits_and_a_whole_word():
    # 32 low bits an element: every other value ends with its word
    n, count = np.array([1 << 33]), np.array([4])
    assert Segments.of(n, count).table[0, 5] == 30
    positions = torch.tensor([(1 << 30) - 1, (1 << 31) - 1, (1 << 32) - 1, (1 << 33) - 1])
    streams = triton_encode(positions, n, count)
    assert_equal(streams, kernels.rice_encode(positions, n, count))
    assert torch.equal(triton_pack.rice_decode(*streams, n, count, block=BLOCK)[0], positions)


def test_layout_of_segments_is_that_of_the_cpu_form():
    rng = np.random.default_rng(1)
    n = rng.integers(1, 1 << 40, 500)
    count = (n * rng.random(500) ** 8).astype(np.int64)
    layout = Segments.of(n, count)
    assert (layout.low_bits, layout.high_bits) == cpu_rice.stream_bounds(n, count)
    for row, a, b in zip(layout.table, n, np.minimum(count, n - count), strict=True):
        assert row[5] == cpu_rice.rice_parameter(a, b) == reference.rice_parameter(int(a), int(b))


@pytest.mark.parametrize("case", ["one", "holes", "mixed"])
def test_torn_streams_are_found_out_as_on_the_cpu(case: str):
    positions, n, count = segments(case)
    low, high = triton_encode(positions, n, count)
    rng = np.random.default_rng(2)
    torn = [(low[:-1], high), (low, high[:-1]), (low[:0], high), (low, high[:0]), (low, torch.zeros_like(high))]
    for _ in range(6):
        words = [stream.clone() for stream in (low, high)]
        for stream in words:
            stream[rng.integers(stream.numel())] ^= 1 << int(rng.integers(63))
        torn.append((words[0], words[1]))
    verdicts = set()
    for streams in torn:
        expected, expected_end = kernels.rice_decode(*streams, n, count)
        found, end = triton_pack.rice_decode(*streams, n, count, block=BLOCK)
        assert int(end) == expected_end == reference.rice_decode(*streams, n, count)[1]
        verdicts.add(expected_end < 0)
        if expected_end >= 0:
            assert torch.equal(found, expected)
    assert verdicts == {True, False}


def steps_of(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Old bits and steps: mostly one up or down, some of any size."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, size).astype(np.uint16)
    step = np.where(rng.random(size) < 0.8, rng.choice([1, 0xFFFF], size), rng.integers(1, 1 << 16, size))
    return torch.from_numpy(old.view(np.int16)), torch.from_numpy(step.astype(np.uint16).view(np.int16))


def check_steps(old: torch.Tensor, new: torch.Tensor, group: list[int], block: int = BLOCK) -> torch.Tensor:
    sizes = np.array(group, dtype=np.int64)
    found = triton_steps.encode_steps(old, new, sizes, block=block)
    assert_equal(found, kernels.encode_steps(old, new, sizes))
    if old.numel() < 5000:
        assert_equal(found, reference.encode_steps(old, new, sizes))
        assert torch.equal(reference.decode_steps(found[1], sizes, found[0], found[2]), kernels.decode_steps(
            found[1], sizes, found[0], found[2]
        ))  # fmt: skip
    step = triton_steps.decode_steps(found[1], sizes, found[0], found[2], block=block)
    assert torch.equal(step, kernels.decode_steps(found[1], sizes, found[0], found[2]))
    assert torch.equal(triton_steps.apply_steps(old, step, block=block), new)
    assert torch.equal(kernels.apply_steps(old, step), new)
    return step


@pytest.mark.parametrize("size", SIZES)
def test_steps_of_any_size(size: int):
    old, step = steps_of(size)
    new = reference.apply_steps(old, step)
    assert torch.equal(check_steps(old, new, [size]), step)


@pytest.mark.parametrize(
    "group", [[], [0], [0, 0, 1], [1, 2, 0, 63, 64, 65, 100], [1] * 70, [64, 0, 64, 0, 0, 64], [200, 0]]
)
def test_steps_in_groups(group: list[int]):
    old, step = steps_of(sum(group), seed=len(group))
    check_steps(old, reference.apply_steps(old, step), group)


def test_steps_of_every_magnitude_and_both_signs():
    powers = [1 << level for level in range(16)]
    magnitudes = sorted({m for power in powers for m in (power - 1, power, power + 1) if 1 <= m <= 32768})
    step = torch.tensor(magnitudes + [-m for m in magnitudes if m < 32768], dtype=torch.int32).to(torch.int16)
    old, _ = steps_of(step.numel())
    assert torch.equal(check_steps(old, reference.apply_steps(old, step), [50, step.numel() - 50]), step)


def test_steps_from_every_pattern():
    old = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    new = old[torch.randperm(65536)]
    keep = old != new
    check_steps(old[keep], new[keep], [1000, int(keep.sum()) - 1000], block=1 << 16)


def weights(size: int) -> torch.Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 0.02
    return values.to(torch.bfloat16).view(torch.int16)


@pytest.mark.parametrize(
    ("size", "changed"),
    [(1, 0), (1, 1), (63, 20), (65, 65), (SLAB - 1, 3), (SLAB, 200), (SLAB + 1, SLAB + 1), (1001, 90), (3 * SLAB, 0)],
)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_ranks_within_exponents_and_back(size: int, changed: int, index_dtype: torch.dtype):
    bits = weights(size)
    indices = torch.randperm(size)[:changed].sort().values.to(index_dtype)
    held = triton_rank.class_counts(bits, SLAB, block=BLOCK)
    assert torch.equal(held, kernels.class_counts(bits, SLAB))
    assert torch.equal(held, reference.class_counts(bits, SLAB))
    exponent, rank = triton_rank.class_ranks(bits, indices, SLAB, block=BLOCK)
    assert_equal((exponent, rank), kernels.class_ranks(bits, indices, SLAB))
    assert_equal((exponent, rank), reference.class_ranks(bits, indices, SLAB))
    slab = indices.long() // SLAB
    order = torch.from_numpy(np.lexsort((exponent.numpy(), slab.numpy())))
    counts = torch.bincount(slab * 256 + exponent, minlength=held.numel()).reshape(held.shape)
    found = triton_rank.class_select(bits, rank[order], counts, SLAB, block=BLOCK)
    assert_equal(found, kernels.class_select(bits, rank[order], counts, SLAB))
    assert_equal(found, reference.class_select(bits, rank[order], counts, SLAB))
    assert torch.equal(found[0], indices.long())
    assert torch.equal(order[found[1]], torch.arange(changed))


def test_ranks_of_every_pattern():
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)[torch.randperm(65536)]
    indices = torch.arange(0, 65536, 997)
    expected = kernels.class_ranks(bits, indices, 1 << 15)
    assert_equal(triton_rank.class_ranks(bits, indices, 1 << 15, block=1 << 12), expected)
    assert torch.equal(triton_rank.class_counts(bits, 1 << 15, block=1 << 12), kernels.class_counts(bits, 1 << 15))


@pytest.mark.usefixtures("as_on_gpu")
def test_what_would_be_misread_is_refused():
    positions, n, count = segments("one")
    bits = weights(SLAB)
    group = np.array([SLAB // 2])
    with pytest.raises(ValueError, match="contiguous"):
        kernels.rice_encode(torch.arange(20)[::2], n, count)
    with pytest.raises(ValueError, match="between zero and its universe"):
        kernels.rice_encode(positions, n, n + 1)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.encode_steps(bits[::2], bits[::2], group)
    with pytest.raises(ValueError, match="levels"):
        kernels.decode_steps(positions, group, np.zeros((1, 16), dtype=np.int64), positions)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.apply_steps(bits[::2], bits[::2])
    with pytest.raises(ValueError, match="contiguous"):
        kernels.class_counts(bits[::2], 1 << 20)
    with pytest.raises(ValueError, match="whole blocks"):
        kernels.class_counts(bits, 1000)


@pytest.mark.usefixtures("as_on_gpu")
def test_the_public_functions_ask_the_device_for_no_more_than_they_must(host_reads: list[str]):
    positions, n, count = segments("mixed")
    old, step = steps_of(300)
    bits = weights(3000)
    indices = torch.arange(0, 3000, 7)
    host_reads.clear()
    new = kernels.apply_steps(old, step)
    assert host_reads == []
    counts, levels, raw = kernels.encode_steps(old, new, np.array([100, 200]))
    # the counts, which are part of the file
    assert host_reads == ["cpu"]
    host_reads.clear()
    kernels.decode_steps(levels, np.array([100, 200]), counts, raw)
    exponent, rank = kernels.class_ranks(bits, indices, 1 << 20)
    order = torch.argsort(exponent, stable=True)
    changed = torch.zeros((1, 256), dtype=torch.int64).index_add_(
        1, exponent.long(), torch.ones((1, indices.numel()), dtype=torch.int64)
    )
    found, _ = kernels.class_select(bits, rank[order], changed, 1 << 20)
    assert host_reads == []
    assert torch.equal(found, indices)
    host_reads.clear()
    low, high = kernels.rice_encode(positions, n, count)
    assert host_reads == ["__int__"]
    decoded, _ = kernels.rice_decode(low, high, n, count)
    assert host_reads == ["__int__", "__int__"]
    assert torch.equal(decoded, positions)
