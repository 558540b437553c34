# SPDX-License-Identifier: Apache-2.0
"""The fast CPU forms against the plain references, bit for bit."""

import itertools

import numpy as np
import pytest
import torch

from delta_wire import kernels
from delta_wire.kernels import cpu, dispatch, host_extract, reference

KEYS = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
SIZES = [0, 1, 2, 63, 64, 65, 1000]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def every_pattern() -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)


def ties_and_neighbours() -> torch.Tensor:
    """float32 patterns exactly on, one below and one above every bf16 rounding tie, NaNs included."""
    upper = torch.arange(65536, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    wide = (upper[:, None] | lower).reshape(-1)
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32).view(torch.float32)


def as_bits(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(torch.int16)


def test_rounding_equals_torch_for_every_number():
    wide = ties_and_neighbours()
    numbers = wide[~wide.isnan()]
    assert torch.equal(kernels.round_bits(numbers), numbers.to(torch.bfloat16).view(torch.int16))


def test_rounding_keeps_every_nan_a_nan_with_its_sign():
    wide = ties_and_neighbours()
    nans = wide[wide.isnan()]
    rounded = kernels.round_bits(nans)
    assert rounded.view(torch.bfloat16).isnan().all()
    assert torch.equal(rounded < 0, nans.view(torch.int32) < 0)


def test_rounding_equals_the_reference_on_every_tie():
    wide = ties_and_neighbours()
    assert torch.equal(kernels.round_bits(wide), reference.round_bits(wide))


def test_rounding_leaves_bf16_patterns_alone_and_never_aliases():
    bits = every_pattern()
    rounded = kernels.round_bits(bits.view(torch.bfloat16))
    assert torch.equal(rounded, bits)
    assert rounded.data_ptr() != bits.data_ptr()


def test_rounding_of_fp16_goes_through_fp32():
    half = every_pattern().view(torch.float16)
    finite = half[~half.isnan()]
    assert torch.equal(kernels.round_bits(finite), finite.to(torch.float32).to(torch.bfloat16).view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_extract_equals_reference(size: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(size)
    before = torch.randn(size, generator=generator).to(dtype)
    after = torch.where(torch.rand(size, generator=generator) < 0.3, before * 1.5, before)
    snapshot = kernels.round_bits(before)
    expected_snapshot = snapshot.clone()
    expected = reference.extract(after, expected_snapshot)
    indices, old, new = kernels.extract(after, snapshot)
    assert indices.dtype == torch.int32
    assert torch.equal(indices.long(), expected[0])
    assert torch.equal(old, expected[1])
    assert torch.equal(new, expected[2])
    assert torch.equal(snapshot, expected_snapshot)
    assert torch.equal(snapshot, kernels.round_bits(after))


def test_extract_sees_every_pair_of_signs_zeros_and_nans():
    special = as_bits([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC0, 0x0001, 0x8001])
    pairs = torch.cartesian_prod(special, special)
    before, after = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    snapshot = before.clone()
    indices, old, new = kernels.extract(after.view(torch.bfloat16), snapshot)
    expected = torch.nonzero(before != after).reshape(-1)
    assert torch.equal(indices.long(), expected)
    assert torch.equal(old, before[expected])
    assert torch.equal(new, after[expected])


def test_extract_over_several_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_extract, "_CHUNK", 100)
    param = torch.randn(1001)
    snapshot = torch.zeros(1001, dtype=torch.int16)
    snapshot[::3] = kernels.round_bits(param)[::3]
    indices, _, _ = kernels.extract(param, snapshot)
    assert torch.equal(indices.long(), torch.tensor([i for i in range(1001) if i % 3]))


def several(sizes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters of all types, and snapshots that differ from them in a third of the elements."""
    params = [torch.randn(size, dtype=dtype) for size, dtype in zip(sizes, 3 * list(DTYPES), strict=False)]
    snapshots = [kernels.round_bits(param).clone() for param in params]
    for snapshot in snapshots:
        snapshot[::3] ^= 1
    return params, snapshots


@pytest.mark.parametrize("chunk", [7, 100, 1 << 20])
def test_extract_from_many_tensors_at_once(monkeypatch: pytest.MonkeyPatch, chunk: int):
    monkeypatch.setattr(host_extract, "_CHUNK", chunk)
    monkeypatch.setattr(dispatch, "NUM_THREADS", 4)
    params, snapshots = several((1001, 0, 1, 64, 300, 2000, 8))
    expected = [snapshot.clone() for snapshot in snapshots]
    found = kernels.extract_many(params, snapshots)
    for param, snapshot, before, (indices, old, new) in zip(params, snapshots, expected, found, strict=True):
        wanted = reference.extract(param, before)
        assert torch.equal(indices.long(), wanted[0].long())
        assert torch.equal(old, wanted[1]) and torch.equal(new, wanted[2])
        assert torch.equal(snapshot, before)


def test_an_error_leaves_all_snapshots_as_they_were(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_extract, "_CHUNK", 10)
    monkeypatch.setattr(dispatch, "NUM_THREADS", 4)
    params, snapshots = several((100, 5, 205))
    before = [snapshot.clone() for snapshot in snapshots]
    looks = itertools.count()
    look = host_extract._Tensor.look

    def fail_once(tensor: host_extract._Tensor, piece: int) -> None:
        look(tensor, piece)
        if next(looks) == 20:
            raise MemoryError

    monkeypatch.setattr(host_extract._Tensor, "look", fail_once)
    with pytest.raises(MemoryError):
        kernels.extract_many(params, snapshots)
    assert all(map(torch.equal, snapshots, before))
    monkeypatch.undo()
    assert sum(indices.numel() for indices, _, _ in kernels.extract_many(params, snapshots)) == 34 + 2 + 69


def test_extract_refuses_what_it_would_misread():
    param = torch.randn(4, 6)
    snapshot = torch.zeros(24, dtype=torch.int16)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.extract(param.t(), snapshot)
    with pytest.raises(ValueError, match="dtype"):
        kernels.extract(param.double(), snapshot)
    with pytest.raises(ValueError, match=r"int16 \[24\]"):
        kernels.extract(param, snapshot[:23])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", SIZES)
def test_digest_of_elements_equals_reference(size: int, index_dtype: torch.dtype):
    indices = torch.randperm(size * 3 + 1)[:size].to(index_dtype)
    bits = every_pattern()[torch.randint(65536, (size,))]
    assert kernels.digest_sparse(indices, bits, KEYS) == reference.digest_sparse(indices, bits, KEYS)


def test_digest_beyond_2_to_the_31():
    indices = torch.tensor([(1 << 31) - 1, 1 << 31, (1 << 40) + 7], dtype=torch.int64)
    bits = as_bits([0x8000, 1, 0x7FC1])
    assert kernels.digest_sparse(indices, bits, KEYS) == reference.digest_sparse(indices, bits, KEYS)
    far = kernels.digest_dense(bits[:2], KEYS, start=(1 << 31) - 1)
    assert far == reference.digest_sparse(indices[:2], bits[:2], KEYS)


@pytest.mark.parametrize("shape", [(0,), (7,), (5, 9), (3, 4, 5), (2, 0, 3)])
def test_digest_of_a_block_equals_that_of_its_elements(shape: tuple[int, ...]):
    bits = torch.randint(-32768, 32768, shape, dtype=torch.int16)
    flat = bits.reshape(-1)
    assert kernels.digest_dense(bits, KEYS) == reference.digest_sparse(torch.arange(flat.numel()), flat, KEYS)


def test_digest_of_blocks_adds_up_to_the_whole():
    whole = torch.randint(-32768, 32768, (12, 10), dtype=torch.int16)
    left = kernels.digest_dense(whole[:, :4], KEYS, start=0, steps=(10, 1))
    right = kernels.digest_dense(whole[:, 4:], KEYS, start=4, steps=(10, 1))
    total = kernels.digest_dense(whole, KEYS)
    assert tuple((a + b) % (1 << 64) for a, b in zip(left, right, strict=True)) == total


def test_scatter_returns_what_was_there_and_gather_reads_it_back():
    flat = torch.arange(100, dtype=torch.int16)
    positions = torch.tensor([99, 0, 50], dtype=torch.int64)
    old = kernels.scatter(flat, positions, as_bits([-1, 0x8000, 0x7FC1]))
    assert old.tolist() == [99, 0, 50]
    assert kernels.gather(flat, positions).tolist() == as_bits([-1, 0x8000, 0x7FC1]).tolist()
    kernels.scatter(flat, positions, old)
    assert torch.equal(flat, torch.arange(100, dtype=torch.int16))


@pytest.mark.parametrize(
    ("indices", "size", "expected"),
    [([], 5, -1), ([0, 4], 5, -1), ([0, 5], 5, 1), ([-1], 5, 0), ([1, 1], 5, 1), ([3, 2], 5, 1)],
)
def test_index_check_names_the_first_offender(indices: list[int], size: int, expected: int):
    for dtype in (np.int32, np.int64):
        assert cpu.check_indices(np.array(indices, dtype=dtype), size) == expected
