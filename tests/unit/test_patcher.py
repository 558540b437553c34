# SPDX-License-Identifier: Apache-2.0
"""One rank writes a plan, takes it back, and says what is there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_server import FakeModel, as_loaded, parameter, parameters_of, write_checkpoint
from training import Training

from delta_wire import kernels
from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest, digest_tensor
from delta_wire.errors import DeltaError, DigestMismatchError, LayoutError, ModelMismatchError
from delta_wire.kernels import cpu_replace
from vllm_delta import patcher as module
from vllm_delta.computed import Computed
from vllm_delta.layout import Layout, RankTrace, total
from vllm_delta.orders import order_of
from vllm_delta.patcher import Patcher
from vllm_delta.regions import Trace, trace
from vllm_delta.staging import write_staged
from vllm_delta.worker import Rank


class Ranks:
    """All ranks' patchers over freshly loaded models."""

    def __init__(self, folder: Path, ranks: int, model: type[FakeModel] = FakeModel):
        checkpoint = Checkpoint(folder)
        self.table = checkpoint.table()
        bits = {name: checkpoint.bits(name) for name in self.table}
        self.models = [as_loaded(bits, rank, ranks, model) for rank in range(ranks)]
        traces = [trace(model, self.table) for model in self.models]
        self.patchers = [Patcher(found, self.table) for found in traces]
        self.layout = Layout(
            self.table, [RankTrace([(r.tensor, r.source) for r in found.regions], found.problems) for found in traces]
        )

    def digest(self) -> Digest:
        return total(self.layout.combine([patcher.digest() for patcher in self.patchers]))

    def parameters(self) -> list[dict[str, list[int]]]:
        return [parameters_of(model) for model in self.models]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(write_checkpoint(tmp_path / "base"), tmp_path / "bucket", changed_frac=0.2)


def write_delta(training: Training, path: Path) -> Path:
    write_staged(path, training.change(), training.table)
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_commit_equals_loading_and_undo_equals_before(training: Training, tmp_path: Path, ranks: int):
    live = Ranks(training.base, ranks)
    before, start = live.parameters(), live.digest()
    assert start == training.digest
    path = write_delta(training, tmp_path / "delta.safetensors")
    plans = [patcher.plan_delta(path) for patcher in live.patchers]
    predicted = [plan.lanes for plan in plans]
    assert live.parameters() == before, "planning wrote to a weight"
    for patcher, plan in zip(live.patchers, plans, strict=True):
        patcher.commit(plan)
    assert start + total(live.layout.combine(predicted)) == live.digest() == training.digest
    assert live.parameters() == [parameters_of(as_loaded(training.bits, rank, ranks)) for rank in range(ranks)]
    with pytest.raises(LayoutError, match="already written"):
        live.patchers[0].commit(plans[0])
    assert all(patcher.undo(plan) for patcher, plan in zip(live.patchers, plans, strict=True))
    assert live.parameters() == before and live.digest() == start


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_plan_holds_the_differing_elements_only(training: Training, tmp_path: Path, ranks: int):
    live = Ranks(training.base, ranks)
    target = training.digest
    path = write_delta(training, tmp_path / "delta.safetensors")
    num_changed = []
    for patcher in live.patchers:
        plan = patcher.plan_delta(path)
        num_changed.append(plan.num_changed)
        patcher.commit(plan)
    assert live.digest() != target
    for patcher, changed in zip(live.patchers, num_changed, strict=True):
        plan = patcher.plan_checkpoint(training.base)
        assert plan.num_changed == changed
        patcher.commit(plan)
        assert not patcher.plan_checkpoint(training.base).writes
    assert live.digest() == target


def test_all_bit_patterns_survive(tmp_path: Path):
    """NaN payloads, both zeros, infinities and denormals: values are never compared as numbers."""
    live = Ranks(write_checkpoint(tmp_path / "base"), 1)
    special = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001], dtype=np.uint16)
    training = Training(tmp_path / "base", tmp_path / "bucket")
    training.bits["norm.weight"][:] = special
    from delta_wire.container import write_tensors

    folder = tmp_path / "special"
    folder.mkdir()
    write_tensors(
        folder / "model.safetensors",
        {n: ("BF16", training.table[n].shape, b.reshape(training.table[n].shape)) for n, b in training.bits.items()},
        {"format": "pt"},
    )
    live.patchers[0].commit(live.patchers[0].plan_checkpoint(folder))
    assert live.models[0].norm.view(torch.int16).numpy().view(np.uint16).tolist() == special.tolist()
    assert live.digest() == Checkpoint(folder).digest()


@pytest.mark.parametrize("done", [0, 1, 50, 10_000])
def test_undo_after_a_commit_that_broke_anywhere(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
):
    live = Ranks(training.base, 1)
    before = live.parameters()
    plan = live.patchers[0].plan_delta(write_delta(training, tmp_path / "delta.safetensors"))
    assert plan.num_changed > 50
    real = cpu_replace.replace

    def fail_later(*args):
        gaps, *others = args
        real(gaps[:done], *others)
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(cpu_replace, "replace", fail_later)
        with pytest.raises(RuntimeError, match="is gone"):
            live.patchers[0].commit(plan)
    assert (live.parameters() == before) is (done == 0)
    assert live.patchers[0].undo(plan)
    assert live.parameters() == before


@pytest.mark.parametrize("batch", [0, 60])
def test_a_plan_is_made_ready_bit_by_bit(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
):
    live = Ranks(training.base, 1)
    before = live.parameters()
    path = write_delta(training, tmp_path / "delta.safetensors")
    whole = live.patchers[0].plan_delta(path)
    monkeypatch.setattr(module, "_BATCH", batch)
    plan = live.patchers[0].plan_delta(path)
    assert len(plan.writes) > 1 and (plan.lanes, plan.num_changed) == (whole.lanes, whole.num_changed)
    live.patchers[0].commit(plan)
    written = live.parameters()
    assert live.patchers[0].undo(plan) and live.parameters() == before
    live.patchers[0].commit(whole)
    assert live.parameters() == written
    live.patchers[0].commit(live.patchers[0].plan_checkpoint(training.base))
    assert live.parameters() == before


def place_of(live: Ranks, plan: module.Plan, number: int) -> tuple[torch.Tensor, int]:
    """Storage and position of the first element of a part of a plan."""
    patcher, write = live.patchers[0], plan.writes[0]
    flat = patcher._storages[patcher._regions[write.regions[number]].storage]
    changes: Any = write.changes
    # the first element of each part is one that is found without those before it
    address = changes._jumps[np.count_nonzero(changes._gaps[: changes._bounds[number]] == 0)]
    return flat, (int(address) - flat.data_ptr()) // 2


def test_weights_that_changed_after_planning_stop_the_commit_and_stay(training: Training, tmp_path: Path):
    live = Ranks(training.base, 1)
    plan = live.patchers[0].plan_delta(write_delta(training, tmp_path / "delta.safetensors"))
    flat, position = place_of(live, plan, len(plan.writes[0].regions) // 2)
    flat[position] ^= 1
    before = live.parameters()
    with pytest.raises(LayoutError, match="changed between staging and commit"):
        live.patchers[0].commit(plan)
    assert live.patchers[0].undo(plan)
    assert live.parameters() == before


def test_a_write_that_does_not_arrive_stops_the_commit(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    live = Ranks(training.base, 1)
    plan = live.patchers[0].plan_delta(write_delta(training, tmp_path / "delta.safetensors"))
    (write,) = plan.writes
    monkeypatch.setattr(write.changes, "run", lambda: {len(write.regions) - 1: (0, 1)})
    with pytest.raises(LayoutError, match="does not hold what was written"):
        live.patchers[0].commit(plan)


def test_undo_says_when_bits_are_not_back(training: Training, tmp_path: Path):
    live = Ranks(training.base, 1)
    plan = live.patchers[0].plan_delta(write_delta(training, tmp_path / "delta.safetensors"))
    flat, position = place_of(live, plan, 0)
    live.patchers[0].commit(plan)
    assert live.patchers[0].undo(plan)
    # the second of two writes to one place is what is read back
    twice = kernels.Change(flat, np.array([position, position]), flat[[position, position]].numpy().view(np.uint16))
    twice.values[:] ^= np.array([1, 2], dtype=np.uint16)
    changes = kernels.replacements([twice])
    assert changes.run() == {0: (1, 1)}
    plan.writes.append(module.Write([0], changes))
    assert not live.patchers[0].undo(plan)


def test_samples_find_other_weights(training: Training):
    live = Ranks(training.base, 1)
    assert live.patchers[0].sample(training.base) == {}
    live.models[0].gate_up.data[0].neg_()
    assert list(live.patchers[0].sample(training.base)) == ["gate.weight"]


def dirty(live: Ranks, at: int = 0) -> None:
    """Write into the lower half of a float32 that holds a bf16 value, where no bit of the checkpoint lies."""
    live.models[0].router.data.view(torch.int32).view(-1)[at] |= 1


def test_float32_that_holds_other_than_bf16_values_is_refused_and_noticed(training: Training):
    live = Ranks(training.base, 1)
    dirty(live)
    (reason,) = live.patchers[0].sample(training.base).values()
    assert "1 elements of the live float32 router are no bf16 values" in reason
    with pytest.raises(DigestMismatchError, match="router: 1 elements of the live float32"):
        live.patchers[0].digest()


def test_lower_halves_are_compared_by_the_commit_and_healed_by_a_checkpoint(training: Training, tmp_path: Path):
    live = Ranks(training.base, 1)
    before = live.parameters()
    path = write_delta(training, tmp_path / "delta.safetensors")
    plan = live.patchers[0].plan_delta(path)
    regions = [live.patchers[0]._regions[at].tensor for at in plan.writes[0].regions]
    _, position = place_of(live, plan, regions.index("router.weight"))
    dirty(live, at=position // 2)
    spoilt = live.parameters()
    with pytest.raises(LayoutError, match=r"router\.weight changed between staging and commit"):
        live.patchers[0].commit(plan)
    # what was there is there again, whoever wrote it
    assert live.patchers[0].undo(plan) and live.parameters() == spoilt

    # one element of which also its upper half differs, and one of which it does not
    live.models[0].router.data.view(torch.int32).view(-1)[5] ^= 0x00010001
    healing = live.patchers[0].plan_checkpoint(training.base)
    assert healing.num_changed == 1
    live.patchers[0].commit(healing)
    assert live.parameters() == before
    assert live.patchers[0].undo(healing) and live.parameters() != before
    live.patchers[0].commit(live.patchers[0].plan_checkpoint(training.base))

    live.patchers[0].commit(live.patchers[0].plan_delta(path))
    assert live.parameters() == [parameters_of(as_loaded(training.bits))]


def test_a_checkpoint_of_another_model_is_refused(training: Training, tmp_path: Path):
    from delta_wire.container import write_tensors

    folder = tmp_path / "other"
    folder.mkdir()
    write_tensors(folder / "model.safetensors", {"x": ("BF16", (2,), np.zeros(2, np.uint16))}, {})
    with pytest.raises(ModelMismatchError, match=r"norm\.weight"):
        Ranks(training.base, 1).patchers[0].plan_checkpoint(folder)


def test_a_torn_file_is_refused_before_anything_is_planned(training: Training, tmp_path: Path):
    live = Ranks(training.base, 1)
    path = write_delta(training, tmp_path / "delta.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DeltaError, match=r"delta\.safetensors"):
        live.patchers[0].plan_delta(path)


def test_large_and_deep_blocks_are_cut(monkeypatch: pytest.MonkeyPatch):
    """The same digest whatever the size of a piece and the number of axes."""
    from vllm_delta.blocks import Block
    from vllm_delta.pieces import slices
    from vllm_delta.regions import Region, Trace

    bits = torch.arange(2 * 3 * 4 * 5, dtype=torch.int16)
    axes = Block(0, (2, 3, 4, 5), (60, 20, 5, 1))
    region = Region("t", "p", 0, axes, axes)
    for max_dims, max_elements in [(3, 1 << 26), (3, 7), (1, 3), (2, 1)]:
        pieces = list(slices(region, max_dims, max_elements))
        assert sum(source.num_elements for source, _ in pieces) == 120
        assert all(len(s.sizes) <= max_dims and s.num_elements <= max(max_elements, 1) for s, _ in pieces)
    table = {"t": None}
    found = Patcher(Trace([region], [bits], {}), table).digest()[0]  # type: ignore[arg-type]
    assert Digest(*found) == digest_tensor("t", bits.numpy().view(np.uint16))


def test_a_refused_trace_makes_no_patcher(training: Training):
    class Wrong(FakeModel):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            super().load(name, tensor.clone())

    with pytest.raises(LayoutError, match="11 tensors"):
        Patcher(trace(Wrong(), training.table), training.table)


class Wide(FakeModel):
    """With its largest tensor in float32."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__(rank, ranks)
        self.qkv = parameter(*self.qkv.shape, dtype=torch.float32)


@pytest.mark.parametrize("model", [FakeModel, Wide])
def test_a_storage_whose_slabs_have_been_permuted(training: Training, tmp_path: Path, model: type[FakeModel]):
    """Everything as on a model that keeps the loader's layout."""
    plain, permuted = Ranks(training.base, 1, model), Ranks(training.base, 1, model)
    dtype = permuted.models[0].qkv.dtype
    shuffle = torch.randperm(4 * 8, generator=torch.Generator().manual_seed(0))
    found = order_of(lambda slab: slab.reshape(-1)[shuffle].reshape(slab.shape), (1, 4, 8), dtype)

    def repack(model: FakeModel) -> None:
        bits = model.qkv.data.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
        for slab in bits.reshape(-1, shuffle.numel()):
            slab.copy_(slab[shuffle])

    seen = trace(permuted.models[0], training.table)
    pointer = permuted.models[0].qkv.data_ptr()
    (at,) = (number for number, flat in enumerate(seen.storages) if flat.data_ptr() == pointer)
    seen.orders = {at: found}
    patcher = Patcher(seen, training.table)
    repack(permuted.models[0])
    assert patcher.sample(training.base) == {}
    assert patcher.digest() == plain.patchers[0].digest()

    path = write_delta(training, tmp_path / "delta.safetensors")
    for one in (patcher, plain.patchers[0]):
        one.commit(one.plan_delta(path))
    assert patcher.digest() == plain.patchers[0].digest()
    repack(plain.models[0])
    assert permuted.parameters() == plain.parameters()
    if dtype == torch.float32:
        permuted.models[0].qkv.data.view(torch.int32).view(-1)[7] |= 1
        with pytest.raises(DigestMismatchError, match="qkv: 1 elements"):
            patcher.digest()
    patcher.commit(patcher.plan_checkpoint(training.base))
    assert patcher.sample(training.base) == {}


def test_all_devices_that_plans_write_to_are_warmed_up(training: Training, monkeypatch: pytest.MonkeyPatch):
    storages = [torch.empty(2, dtype=torch.int16, device=device) for device in ("meta", "meta", "cpu")]
    part = Computed("part", torch.nn.Module(), [], storages, training.table)
    rank = Rank(FakeModel(), None, training.base)
    rank._patcher = Patcher(Trace([], storages, computed={2: part}), training.table)
    warmed: list[torch.device] = []
    monkeypatch.setattr(kernels, "warm_up", warmed.append)
    assert rank._check() == {"problems": {}, "computed": ["part"]}
    assert warmed == [torch.device("meta"), torch.device("cpu")]


def test_a_transform_that_loses_elements_is_no_order():
    with pytest.raises(LayoutError, match="more than to permute"):
        order_of(lambda slab: slab.clamp(max=3), (2, 3))
