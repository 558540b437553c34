# SPDX-License-Identifier: Apache-2.0
"""The trace of a loader: where elements go, what is refused, and that the map is complete."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_server import HIDDEN, FakeModel, as_loaded, parameter, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.errors import DigestMismatchError, LayoutError
from vllm_delta.blocks import Block, coverage
from vllm_delta.layout import Layout, RankTrace
from vllm_delta.regions import Region, Trace, trace


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(write_checkpoint(tmp_path / "base"))


def rank_trace(found: Trace) -> RankTrace:
    return RankTrace([(region.tensor, region.source) for region in found.regions], found.problems)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trace_writes_nothing_and_every_element_is_where_it_says(checkpoint: Checkpoint, ranks: int):
    bits = {name: checkpoint.bits(name) for name in checkpoint.table()}
    traces = []
    for rank in range(ranks):
        model = as_loaded(bits, rank, ranks)
        before = {name: param.clone() for name, param in model.named_parameters()}
        found = trace(model, checkpoint.table())
        assert not found.problems
        assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
        for region in found.regions:
            flat = bits[region.tensor].reshape(-1)
            chosen, positions = region.locate(np.arange(flat.size))
            live = found.storages[region.storage].numpy().view(np.uint16)[positions]
            assert live.size == region.source.num_elements
            assert np.array_equal(live, flat[np.arange(flat.size)[chosen]])
        traces.append(rank_trace(found))
    Layout(checkpoint.table(), traces)


def test_a_missing_rank_leaves_elements_uncovered(checkpoint: Checkpoint):
    found = trace(FakeModel(0, 2), checkpoint.table())
    with pytest.raises(LayoutError, match=r"q\.weight: the ranks together hold 64 of its 128 elements"):
        Layout(checkpoint.table(), [rank_trace(found)])


class Adds(FakeModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm.weight":
            self.norm.data.copy_(tensor + 1)
        else:
            super().load(name, tensor)


class AddsInPlace(FakeModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm.weight":
            self.norm.data.add_(tensor)
        else:
            super().load(name, tensor)


class Wide(FakeModel):
    """All in float32, as `--dtype float32` does."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__(rank, ranks)
        for name, param in list(self.named_parameters()):
            setattr(self, name, parameter(*param.shape, dtype=torch.float32))


class Half(FakeModel):
    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__(rank, ranks)
        self.norm = parameter(HIDDEN, dtype=torch.float16)


class OverwritesWide(Wide):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == "norm.weight":
            self.norm.data[:2].fill_(1)


class Skips(FakeModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name != "norm.weight":
            super().load(name, tensor)


class Derives(FakeModel):
    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__(rank, ranks)
        self.norm_copy = parameter(HIDDEN)


class Absorbs(FakeModel):
    """As latent attention does: a factor computed from a weight after loading, used in its place."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__(rank, ranks)
        self.absorbed = self.o.data.t().contiguous()


class Packs(FakeModel):
    """As vLLM does with an embedding that is the head, too, on a CPU: the weight stays, and a kernel has its own."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__(rank, ranks)
        self.head = torch.nn.Module()
        packed = self.embed.data.clone()
        self.head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)


class Collides(FakeModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == "norm.weight":
            self.qkv.data[0].copy_(tensor)


class Overwrites(FakeModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == "norm.weight":
            self.norm.data[:2].fill_(1)


class Repeats(FakeModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm.weight":
            self.norm.data.copy_(tensor[:1].expand(HIDDEN))
        else:
            super().load(name, tensor)


class Fails(FakeModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm.weight":
            raise RuntimeError("no such layer")
        super().load(name, tensor)


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_float32_the_same_elements_are_upper_halves(checkpoint: Checkpoint, ranks: int):
    for rank in range(ranks):
        narrow, wide = trace(FakeModel(rank, ranks), checkpoint.table()), trace(Wide(rank, ranks), checkpoint.table())
        assert not wide.problems and all(region.widened for region in wide.regions)
        for one, other in zip(narrow.regions, wide.regions, strict=True):
            assert (one.tensor, one.source) == (other.tensor, other.source)
            assert other.target == (one.target if one.widened else one.target.halves(upper=True))
            # little end first
            assert other.lower.start == other.target.start - 1 and other.lower.start % 2 == 0


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        (Adds, "norm.weight", "computes a new tensor"),
        (AddsInPlace, "norm.weight", "computes with aten.add_"),
        (Half, "norm.weight", "torch.float16"),
        (Skips, "norm.weight", "no rank of the server copies it"),
        (Skips, "norm", "no tensor of the checkpoint"),
        (Derives, "norm_copy", "no tensor of the checkpoint"),
        (Absorbs, "absorbed", "beside the parameters"),
        (Packs, "head.weight", "packed copy"),
        (Collides, "norm.weight", "several writes of the loader meet"),
        (Overwrites, "norm.weight", "several writes of the loader meet"),
        (OverwritesWide, "norm.weight", "several writes of the loader meet"),
        (Repeats, "norm.weight", "repeats or folds"),
        (Fails, "norm.weight", "no such layer"),
    ],
)
def test_what_cannot_be_patched_is_named(checkpoint: Checkpoint, model: type[FakeModel], name: str, reason: str):
    found = trace(model(), checkpoint.table())
    with pytest.raises(LayoutError) as error:
        Layout(checkpoint.table(), [rank_trace(found)])
    entries = [entry for entry in str(error.value).split("; ") if f"{name}: " in entry]
    assert entries and reason in entries[0], str(error.value)


def test_views_of_weights_and_caches_are_no_copies(checkpoint: Checkpoint):
    model = FakeModel()
    model.turned, model.kv_cache = model.o.data.t(), torch.zeros(4, 4)
    model.limit, model.order = torch.tensor(0.5), torch.arange(3)
    assert not trace(model, checkpoint.table()).problems


def test_a_tied_parameter_follows_its_alias(checkpoint: Checkpoint):
    class Tied(FakeModel):
        def __init__(self, rank: int = 0, ranks: int = 1):
            super().__init__(rank, ranks)
            self.head = self.embed

    found = trace(Tied(), checkpoint.table())
    assert not found.problems
    Layout(checkpoint.table(), [rank_trace(found)])


def test_overlapping_blocks_of_two_ranks_are_refused(checkpoint: Checkpoint):
    table = checkpoint.table()
    whole = [(name, Block(0, (spec.num_elements,), (1,))) for name, spec in table.items() if name != "norm.weight"]
    first = RankTrace([*whole, ("norm.weight", Block(0, (5,), (1,)))], {})
    second = RankTrace([("norm.weight", Block(3, (5,), (1,)))], {})
    with pytest.raises(LayoutError, match=r"norm\.weight: ranks hold blocks of it that overlap"):
        Layout(table, [first, second])


@pytest.mark.parametrize(
    ("first", "second"),
    [((5, 7), (5, 8)), ((5, 7), None), (None, (5, 7))],
    ids=["other bits", "not on the second", "not on the first"],
)
def test_all_that_hold_a_block_must_report_the_same(
    checkpoint: Checkpoint, first: tuple[int, int] | None, second: tuple[int, int] | None
):
    table = checkpoint.table()
    whole = [(name, Block(0, (spec.num_elements,), (1,))) for name, spec in table.items()]
    layout = Layout(table, [RankTrace(whole, {}), RankTrace(whole[::-1], {})])
    last = len(whole) - 1
    replies = [{} if lanes is None else {at: lanes} for lanes, at in ((first, 0), (second, last))]
    with pytest.raises(DigestMismatchError, match=f"{whole[0][0]}: ranks that hold the same block"):
        layout.combine(replies)
    # what leaves the digest as it is need not be told; what is the same counts once
    assert layout.combine([{0: (0, 0)}, {}]) == {whole[0][0]: Digest()}
    assert layout.combine([{0: (5, 7)}, {last: (5, 7)}]) == {whole[0][0]: Digest(5, 7)}


@st.composite
def regions(draw: st.DrawFn) -> tuple[Region, torch.Tensor, torch.Tensor]:
    """A region between views of a source and of a target, and both views."""
    from vllm_delta.regions import _blocks_of

    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    views = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape))))
        pads = [draw(st.integers(0, 2)) for _ in shape]
        full = [shape[dim] + pads[dim] for dim in order]
        base = torch.arange(int(np.prod(full)), dtype=torch.int64).reshape(full)
        for at, dim in enumerate(order):
            base = base.narrow(at, draw(st.integers(0, pads[dim])), shape[dim])
        views.append(base.permute([order.index(dim) for dim in range(len(shape))]))
    source, target = _blocks_of(views)
    return Region("t", "p", 0, source, target), views[0], views[1]


@given(regions(), st.randoms(use_true_random=False))
def test_locating_equals_copying(found: tuple[Region, torch.Tensor, torch.Tensor], random):
    region, source, target = found
    goes_to = dict(zip(source.flatten().tolist(), target.flatten().tolist(), strict=True))
    size = max(goes_to) + 5
    indices = np.array(sorted(random.sample(range(size), random.randint(0, size))), dtype=np.int32)
    chosen, positions = region.locate(indices)
    expected = {int(i): goes_to[int(i)] for i in indices if int(i) in goes_to}
    assert dict(zip(indices[chosen].tolist(), positions.tolist(), strict=True)) == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6), st.integers(1, 4), st.integers(5, 9)), max_size=5))
def test_coverage_counts_like_a_set(found: list[tuple[int, int, int, int]]):
    blocks = [Block(start, (rows, width), (step, 1)) for start, rows, width, step in found]
    elements = [
        start + row * step + column
        for start, rows, width, step in found
        for row in range(rows)
        for column in range(width)
    ]
    result = coverage(100, blocks)
    assert result.num_elements == len(set(elements))
    assert result.overlaps == (len(set(elements)) != len(elements))


def test_a_block_outside_is_an_error():
    with pytest.raises(ValueError, match="outside of 10 elements"):
        coverage(10, [Block(8, (3,), (1,))])
