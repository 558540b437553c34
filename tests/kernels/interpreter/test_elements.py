# SPDX-License-Identifier: Apache-2.0
"""Triton forms of extract, digest and scatter, interpreted, against the references and the CPU forms, bit for bit."""

from functools import partial

import numpy as np
import pytest
import torch
from changes import changes_of, check_changes
from triton.runtime import interpreter

from delta_wire import kernels
from delta_wire.kernels import reference, triton_digest, triton_extract, triton_scatter
from delta_wire.kernels.devices import to_host

KEYS = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
BLOCK = 128
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 45]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAR = 1 << 33
PUBLIC = ("round_bits", "extract_many", "digest_sparse", "digest_dense", "gather", "scatter", "swap")
# zeros, infinities, NaNs of several payloads, smallest and largest subnormals, one
SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0x7FC1, 0xFFC0, 0x0001, 0x8001, 0x007F, 0x3F80]


def as_bits(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(torch.int16)


def every_pattern() -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)


def ties_and_neighbours() -> torch.Tensor:
    """float32 patterns exactly on, one below and one above every bf16 rounding tie, NaNs included."""
    upper = torch.arange(65536, dtype=torch.int64) << 16
    wide = (upper[:, None] | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).reshape(-1)
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32).view(torch.float32)


def random_bits(size: int) -> torch.Tensor:
    return torch.randint(-32768, 32768, (size,), dtype=torch.int16)


def unsigned(lanes: torch.Tensor) -> tuple[int, int]:
    return kernels.lanes_to_ints(lanes)


def change(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter and an older snapshot of it."""
    before = torch.randn(size).to(dtype)
    return torch.where(torch.rand(size) < 0.3, before * 1.5, before), reference.round_bits(before)


def assert_same_parts(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.long(), theirs.long())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_of_every_pattern_and_tie(dtype: torch.dtype):
    param = ties_and_neighbours() if dtype == torch.float32 else every_pattern().view(dtype)
    rounded = triton_extract.round_bits(param)
    assert torch.equal(rounded, reference.round_bits(param))
    assert torch.equal(rounded, kernels.round_bits(param))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rounding_of_any_size(size: int, dtype: torch.dtype):
    param = torch.randn(size).to(dtype)
    assert torch.equal(triton_extract.round_bits(param, block=BLOCK), reference.round_bits(param))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_extract_of_any_size(size: int, dtype: torch.dtype):
    param, snapshot = change(size, dtype)
    of_reference, of_cpu = snapshot.clone(), snapshot.clone()
    (found,) = triton_extract.extract_many([param], [snapshot], block=BLOCK)
    assert found[0].dtype == torch.int32
    assert_same_parts(found, reference.extract(param, of_reference))
    assert_same_parts(found, kernels.extract(param, of_cpu))
    assert torch.equal(snapshot, of_reference) and torch.equal(snapshot, of_cpu)


def test_extract_of_every_tie():
    param = ties_and_neighbours()
    snapshot = torch.zeros(param.numel(), dtype=torch.int16)
    expected_snapshot = snapshot.clone()
    (found,) = triton_extract.extract_many([param], [snapshot], block=1 << 15)
    assert_same_parts(found, reference.extract(param, expected_snapshot))
    assert torch.equal(snapshot, expected_snapshot)


def test_extract_sees_every_pair_of_signs_zeros_and_nans():
    pairs = torch.cartesian_prod(as_bits(SPECIAL), as_bits(SPECIAL))
    before, after = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    snapshot = before.clone()
    ((indices, old, new),) = triton_extract.extract_many([after.view(torch.bfloat16)], [snapshot], block=BLOCK)
    expected = torch.nonzero(before != after).reshape(-1)
    assert torch.equal(indices.long(), expected)
    assert torch.equal(old, before[expected]) and torch.equal(new, after[expected])


def test_extract_of_a_whole_model_in_one_go(host_reads: list[str]):
    shapes = [(3, 50), (0,), (1,), (129,), (2, 64), (7,)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32]
    pairs = [change(int(torch.tensor(shape).prod()), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    # begins two bytes or four after a multiple of 16
    shifted = [change(201, dtype) for dtype in DTYPES]
    pairs += [(param[1:], snapshot[1:]) for param, snapshot in shifted]
    # nothing changed, everything changed
    pairs.append((torch.ones(300), reference.round_bits(torch.ones(300))))
    pairs.append((torch.ones(300), reference.round_bits(-torch.ones(300))))
    params = [param for param, _ in pairs]
    snapshots = [snapshot for _, snapshot in pairs]
    expected_snapshots = [snapshot.clone() for snapshot in snapshots]
    expected = [reference.extract(param, held) for param, held in zip(params, expected_snapshots, strict=True)]
    host_reads.clear()
    found = triton_extract.extract_many(params, snapshots, block=64)
    assert host_reads == ["tolist"]
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_parts(ours, theirs)
    for ours, theirs in zip(snapshots, expected_snapshots, strict=True):
        assert torch.equal(ours, theirs)
    assert triton_extract.extract_many([], []) == []


def test_extract_of_empty_tensors_only():
    empty = torch.empty(0)
    assert [part.numel() for part in triton_extract.extract_many([empty], [empty.to(torch.int16)])[0]] == [0, 0, 0]


def test_extract_beyond_2_to_the_31():
    param, snapshot = change(3 * BLOCK - 5, torch.float32)
    expected_snapshot = snapshot.clone()
    expected = reference.extract(param, expected_snapshot)
    first = FAR // BLOCK
    # the table of a tensor of which only the last elements exist
    table = torch.tensor(
        [[param.data_ptr() - 4 * FAR, snapshot.data_ptr() - 2 * FAR, FAR + param.numel(), -first, -first]]
    )
    row = torch.zeros(3, dtype=torch.int32)
    words = torch.empty((3, BLOCK // 32), dtype=torch.int32)
    counts = torch.empty(3, dtype=torch.int32)
    constants = {"KIND": 0, "ALIGNED": True, "BLOCK": BLOCK}
    triton_extract.mark_kernel[(3,)](table, row, words, counts, **constants)
    assert int(counts.sum()) == expected[0].numel()
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    indices = torch.empty(expected[0].numel(), dtype=torch.int64)
    old, new = torch.empty_like(expected[1]), torch.empty_like(expected[2])
    triton_extract.compact_kernel[(3,)](table, row, words, ends, indices, old, new, **constants)
    assert_same_parts((indices - FAR, old, new), expected)
    assert torch.equal(snapshot, expected_snapshot)


@pytest.mark.usefixtures("as_on_gpu")
def test_what_would_be_misread_is_refused():
    param = torch.randn(4, 6)
    snapshot = torch.zeros(24, dtype=torch.int16)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.extract(param.t(), snapshot)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.extract(param, torch.zeros(48, dtype=torch.int16)[::2])
    with pytest.raises(ValueError, match="contiguous"):
        kernels.round_bits(param.t())
    with pytest.raises(ValueError, match="dtype"):
        kernels.extract_many([param.double()], [snapshot])
    positions = torch.arange(8)
    for flat, listed in ((snapshot[::2], positions), (snapshot, positions[::2]), (snapshot, positions.int())):
        with pytest.raises(ValueError, match="contiguous"):
            kernels.gather(flat, listed)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.scatter(snapshot, positions, snapshot[:16:2])
    with pytest.raises(ValueError, match=r"int16 \[8\]"):
        kernels.swap(snapshot, positions, snapshot[:7], positions, KEYS)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.digest_sparse(positions[::2], snapshot[:4], KEYS)
    with pytest.raises(ValueError, match="three dimensions"):
        kernels.digest_dense(snapshot.reshape(2, 3, 2, 2), KEYS)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", SIZES)
def test_digest_of_elements(size: int, index_dtype: torch.dtype):
    indices = torch.randperm(size * 3 + 1)[:size].to(index_dtype)
    bits = random_bits(size)
    found = unsigned(triton_digest.digest_sparse(indices, bits, KEYS, block=BLOCK))
    assert found == reference.digest_sparse(indices, bits, KEYS) == kernels.digest_sparse(indices, bits, KEYS)


def test_digest_of_every_pattern_beyond_2_to_the_31():
    bits = every_pattern()
    indices = torch.arange(65536) * 3 + FAR
    found = unsigned(triton_digest.digest_sparse(indices, bits, KEYS, block=1 << 14))
    assert found == reference.digest_sparse(indices, bits, KEYS)
    dense = unsigned(triton_digest.digest_dense(bits, KEYS, FAR, (1,), block=1 << 14))
    assert dense == kernels.digest_dense(bits, KEYS, FAR)


@pytest.mark.parametrize("size", SIZES)
def test_digest_of_a_run(size: int):
    bits = random_bits(size)
    found = unsigned(triton_digest.digest_dense(bits, KEYS, 7, (1,), block=BLOCK))
    assert found == reference.digest_sparse(torch.arange(size) + 7, bits, KEYS)


def strided_blocks() -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    whole = random_bits(6 * 10 * 9).reshape(6, 10, 9)
    return [
        (whole, (90, 9, 1)),
        (whole[:, 2:5], (90, 9, 1)),
        (whole[:, :, 3:7], (100, 10, 1)),
        (whole.permute(2, 0, 1), (5, 77, 8)),
        (whole[::2, ::3, ::4], (7, 9, 1000)),
        (whole[1, 2:3, :], (9, 1)),
        (whole[:, 0, 0], (FAR,)),
        (whole[0, 0, 0], ()),
        (whole[:0], (90, 9, 1)),
        # rows wider than a tile
        (random_bits(3 * 200).reshape(3, 200)[:, :150], (150, 1)),
    ]


@pytest.mark.parametrize("case", range(10))
def test_digest_of_strided_blocks(case: int):
    bits, steps = strided_blocks()[case]
    found = unsigned(triton_digest.digest_dense(bits, KEYS, 11, steps, block=BLOCK))
    assert found == kernels.digest_dense(bits, KEYS, 11, steps)
    index = torch.tensor(11)
    for size, step in zip(bits.shape, steps, strict=True):
        index = index[..., None] + torch.arange(size) * step
    assert found == reference.digest_sparse(index.reshape(-1), bits.reshape(-1), KEYS)


@pytest.mark.parametrize("size", SIZES)
def test_gather_scatter_and_swap(size: int):
    start = random_bits(1000)
    positions = torch.randperm(1000)[:size]
    new = random_bits(size)
    indices = torch.randperm(5000)[:size]
    assert torch.equal(triton_scatter.gather(start, positions, block=BLOCK), reference.gather(start, positions))
    assert torch.equal(kernels.gather(start, positions), reference.gather(start, positions))
    expected_flat = start.clone()
    expected = reference.swap(expected_flat, positions, new, indices, KEYS)
    for index_dtype in (torch.int32, torch.int64):
        listed = indices.to(index_dtype)
        for swap in (partial(triton_scatter.swap, block=BLOCK), kernels.swap):
            flat = start.clone()
            old, lanes = swap(flat, positions, new, listed, KEYS)
            assert torch.equal(old, expected[0]) and torch.equal(lanes, expected[1])
            assert torch.equal(flat, expected_flat)
    flat = start.clone()
    old = triton_scatter.scatter(flat, positions, new, block=BLOCK)
    assert torch.equal(old, expected[0]) and torch.equal(flat, expected_flat)
    triton_scatter.scatter(flat, positions, old, block=BLOCK)
    assert torch.equal(flat, start)


@pytest.mark.parametrize("size", SIZES)
def test_exchange_at_addresses(size: int):
    flats = [random_bits(1000), random_bits(700)]
    positions = [torch.randperm(1000)[: size - size // 2], torch.randperm(700)[: size // 2]]
    before = [flat.clone() for flat in flats]
    addresses = torch.cat([flat.data_ptr() + 2 * listed for flat, listed in zip(flats, positions, strict=True)])
    old = torch.cat([reference.gather(flat, listed) for flat, listed in zip(flats, positions, strict=True)])
    new, found, counts = random_bits(size), torch.empty_like(old), torch.empty(2, dtype=torch.int32)
    assert torch.equal(triton_scatter.gather_at(addresses, block=BLOCK), old)
    expected = old.clone()
    # a few that are not what is there
    expected[:: BLOCK - 1] ^= 1
    triton_scatter.exchange(addresses, new, expected, found, counts, block=BLOCK)
    assert torch.equal(found, old) and counts.tolist() == [len(expected[:: BLOCK - 1]), 0]
    assert torch.equal(triton_scatter.gather_at(addresses, block=BLOCK), new)
    for flat, start, listed, bits in zip(
        flats, before, positions, new.split([len(p) for p in positions]), strict=True
    ):
        assert torch.equal(flat, start.index_put((listed,), bits))
    triton_scatter.exchange(addresses, old, new, found, counts)
    assert counts.tolist() == [0, 0] and all(map(torch.equal, flats, before))


def test_what_is_not_there_afterwards_is_counted():
    flat, counts = random_bits(8), torch.zeros(2, dtype=torch.int32)
    # two writes to one element: one of them is not what is there
    addresses = flat.data_ptr() + torch.tensor([4, 4, 6])
    old = triton_scatter.gather_at(addresses)
    new = old ^ torch.tensor([1, 2, 3], dtype=torch.int16)
    triton_scatter.exchange(addresses, new, old, torch.empty_like(old), counts)
    assert counts.tolist()[1] == 1


@pytest.mark.parametrize("wrong", ["addresses", "new", "old", "found", "counts"])
def test_exchange_refuses_what_it_would_misread(wrong: str):
    flat = random_bits(8)
    arguments = {
        "addresses": flat.data_ptr() + 2 * torch.arange(8),
        **{name: random_bits(8) for name in ("new", "old", "found")},
        "counts": torch.zeros(2, dtype=torch.int32),
    }
    before = flat.clone()
    arguments[wrong] = torch.cat([arguments[wrong], arguments[wrong]])[::2]
    with pytest.raises(ValueError, match=wrong if wrong != "addresses" else "exchange"):
        triton_scatter.exchange(**arguments)
    assert torch.equal(flat, before)


def test_scatter_beyond_2_to_the_31(monkeypatch: pytest.MonkeyPatch):
    flat = random_bits(500)
    expected_flat = flat.clone()
    positions = torch.randperm(500)[:300]
    new = random_bits(300)
    expected = reference.swap(expected_flat, positions, new, positions, KEYS)
    convert = interpreter._implicit_cvt

    def shifted(argument):
        # the pointer of a storage of which only the last elements exist
        value = convert(argument)
        if getattr(argument, "data_ptr", int)() == flat.data_ptr():
            value.handle.data = value.handle.data - 2 * FAR
        return value

    monkeypatch.setattr(interpreter, "_implicit_cvt", shifted)
    found = triton_scatter.swap(flat, positions + FAR, new, positions, KEYS, block=BLOCK)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert torch.equal(flat, expected_flat)
    assert torch.equal(triton_scatter.gather(flat, positions + FAR, block=BLOCK), new)
    assert torch.equal(triton_scatter.scatter(flat, positions + FAR, expected[0], block=BLOCK), new)


@pytest.mark.usefixtures("as_on_gpu")
def test_the_public_functions_reach_the_kernels(monkeypatch: pytest.MonkeyPatch):
    used: list[str] = []
    for module in (triton_extract, triton_digest, triton_scatter):
        for name in (*PUBLIC, "gather_at", "exchange"):
            if real := module.__dict__.get(name):
                monkeypatch.setattr(
                    module, name, lambda *args, _real=real, _name=name: used.append(_name) or _real(*args)
                )
    kernels.warm_up()
    # nothing that trainers and servers do needs it
    kernels.swap(random_bits(4), torch.arange(2), random_bits(2), torch.arange(2), KEYS)
    assert set(used) == {*PUBLIC, "gather_at", "exchange"}
    param, snapshot = change(300, torch.bfloat16)
    expected = reference.extract(param, snapshot.clone())
    assert_same_parts(kernels.extract(param, snapshot), expected)
    # the server's indices are host arrays
    lanes = kernels.digest_sparse(expected[0].numpy(), expected[2], KEYS)
    assert lanes == reference.digest_sparse(expected[0], expected[2], KEYS)


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("steps", [False, True])
def test_changes_are_prepared_written_counted_and_taken_back(steps: bool):
    check_changes(changes_of((10, 7000, 5000, 3), (1, 6000, 3, 0), steps))


@pytest.mark.usefixtures("as_on_gpu")
def test_what_must_be_there_is_counted_if_it_is_not():
    flat, zeros = as_bits([0, 0x8005, 0]), np.zeros(3, dtype=np.uint16)
    changes = kernels.replacements([kernels.Change(flat, np.arange(3), zeros, expected=0)])
    assert changes.lanes == [(0, 0)]
    assert changes.run() == {0: (1, 0)} and flat.tolist() == [0, 0, 0]
    assert changes.undo() and torch.equal(flat, as_bits([0, 0x8005, 0]))
    outside = kernels.Change(flat, np.array([3]), zeros[:1])
    with pytest.raises(kernels.OutsideError):
        kernels.replacements([outside])


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("sizes", [(0,), (1, 0, 700), (300, 300)])
def test_replacements_of_a_device_are_one_wait_of_its_host(sizes: tuple[int, ...], host_reads: list[str]):
    storages = [random_bits(size + 50) for size in sizes]
    positions = [torch.randperm(size + 50)[:size] for size in sizes]
    before = [flat.clone() for flat in storages]
    old = [flat[listed] for flat, listed in zip(storages, positions, strict=True)]
    new = [bits ^ 1 for bits in old]
    items = [
        kernels.Change(flat, listed.numpy(), to_host(bits, np.uint16))
        for flat, listed, bits in zip(storages, positions, new, strict=True)
    ]
    changes, again = kernels.replacements(items), kernels.replacements(items)
    host_reads.clear()
    assert changes.run() == {}
    assert host_reads == ["tolist"]
    for flat, listed, bits, start in zip(storages, positions, new, before, strict=True):
        assert torch.equal(flat, start.index_put((listed,), bits))
    # what is there now is not what the same changes expect: it is told, and put back
    assert again.run() == {at: (size, 0) for at, size in enumerate(sizes) if size}
    assert again.undo()
    for flat, listed, bits, start in zip(storages, positions, new, before, strict=True):
        assert torch.equal(flat, start.index_put((listed,), bits))
    assert changes.undo() and all(map(torch.equal, storages, before))
