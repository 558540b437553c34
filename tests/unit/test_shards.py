# SPDX-License-Identifier: Apache-2.0
"""What each process owns: every element once, wherever it lies. One process plays all ranks, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from delta_wire.checkpoint import Checkpoint
from delta_wire.digest import Digest
from delta_wire.errors import SetupError
from delta_wire.shards import WHOLE
from delta_wire.shards import Shard as Rows
from trl_delta.conversions import Part
from trl_delta.detector import Detector
from trl_delta.names import LiveTensor, live_tensors, table_of
from trl_delta.shards import coding_shards, own_tensors, refuse_wrappers

SHAPES = {"norm": (36,), "odd": (7, 5), "few": (2, 3), "experts": (5, 4, 3)}


@contextmanager
def playing(rank: int, count: int) -> Iterator[None]:
    """torch.distributed of this rank, without anybody to talk to."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(*shape: int) -> DeviceMesh:
    # under names of its own: torch takes equal meshes of one process for the same, and a mesh knows its rank
    names = tuple(f"rank{dist.get_rank()}_dim{dim}" for dim in range(len(shape)))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


class Model(nn.Module):
    def __init__(self, values: dict[str, torch.Tensor], place: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(place(value)))
        self.register_buffer("scale", torch.full((6,), 2.0))


def sharded(count: int, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if kind == "replicated":
        return lambda value: value.clone()
    mesh = mesh_of(2, count // 2) if kind == "hsdp" else mesh_of(count)
    placements = {"fsdp2": [Shard(0)], "hsdp": [Replicate(), Shard(0)], "copies": [Replicate()]}[kind]
    return lambda value: distribute_tensor(value, mesh, placements, src_data_rank=None)


def pieces_of(rank: int, count: int, kind: str, values: dict[str, torch.Tensor]) -> list[LiveTensor]:
    return own_tensors(live_tensors(Model(values, sharded(count, kind))), rank, count)


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("kind", ["replicated", "fsdp2", "hsdp", "copies"])
def test_every_element_has_one_owner_and_every_change_is_found_once(count: int, kind: str):
    before, after = weights(), weights()
    for value in after.values():
        value.view(-1)[::3] += 1
    whole = Model(before, lambda value: value.clone())
    single = Detector(live_tensors(whole))
    digest, expected = single.digest, single.extract(live_tensors(Model(after, lambda value: value.clone())))
    owners = {name: np.zeros(value.numel(), int) for name, value in whole.state_dict().items()}
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in SHAPES}
    total, moved, held_bytes = Digest(), Digest(), []
    for rank in range(count):
        with playing(rank, count):
            detector = Detector(pieces_of(rank, count, kind, before))
            total = total + detector.digest
            held_bytes.append(detector.num_bytes)
            for piece in (pieces := pieces_of(rank, count, kind, after)):
                owners[piece.name][piece.start : piece.start + piece.tensor.numel()] += 1
            for name, part in detector.extract(pieces).items():
                assert part.old is not None
                found[name] += zip(part.indices.tolist(), part.old.tolist(), part.new.tolist(), strict=True)
            moved = moved + detector.digest
    assert all((owned == 1).all() for owned in owners.values())
    assert (total, moved) == (digest, single.digest)
    for name, part in expected.items():
        assert part.old is not None
        assert sorted(found[name]) == list(
            zip(part.indices.tolist(), part.old.tolist(), part.new.tolist(), strict=True)
        )
    assert sum(held_bytes) == single.num_bytes and max(held_bytes) < single.num_bytes


@pytest.mark.parametrize(("kind", "coded_as"), [("replicated", "1/4"), ("fsdp2", "1/4"), ("hsdp", "1/2")])
def test_pieces_are_coded_in_their_rows(kind: str, coded_as: str):
    with playing(1, 4):
        live = live_tensors(Model(weights(), sharded(4, kind)))
        pieces = own_tensors(live, 1, 4)
        found = coding_shards(pieces, table_of(live), needs_all_rows=True)
    assert set(map(str, found.values())) == {coded_as}
    # replicas take turns
    assert set(found) == ({"experts", "few", "norm", "odd"} if kind != "hsdp" else {"experts", "norm"})


@pytest.mark.parametrize("count", [2, 4])
def test_experts_of_a_fused_tensor_are_split_where_they_lie(count: int):
    """Each expert's matrices are tensors of the checkpoint; ranks hold some experts, a cut may go through one."""
    value = torch.arange(5 * 8 * 3, dtype=torch.float32).reshape(5, 8, 3)
    halves = [(expert, half, Part(expert * 24 + half * 12, (4, 3))) for expert in range(5) for half in range(2)]

    def parts(source: torch.Tensor) -> list[LiveTensor]:
        return [LiveTensor((f"experts.{expert}.{half}",), source, part) for expert, half, part in halves]

    def flattened(source: torch.Tensor) -> list[LiveTensor]:
        return [LiveTensor(("all.0",), source, Part(0, (50,))), LiveTensor(("all.1",), source, Part(50, (70,)))]

    for make in (parts, flattened):
        table = table_of(make(value))
        found = {name: [] for name in table}
        for rank in range(count):
            with playing(rank, count):
                pieces = own_tensors(make(sharded(count, "fsdp2")(value)), rank, count)
                for piece in pieces:
                    found[piece.name].append((piece.start, piece.tensor.flatten().tolist()))
                # whole experts need no shard; what is cut across rows is coded in whole tensors where it can be
                assert set(coding_shards(pieces, table).values()) <= {WHOLE}
                if make is flattened and rank == 0:
                    with pytest.raises(SetupError, match=r"tensor all\.. is cut across its rows"):
                        coding_shards(pieces, table, needs_all_rows=True)
        for entry in make(value):
            joined = [element for _, elements in sorted(found[entry.name]) for element in elements]
            assert joined == entry.tensor.flatten().tolist()


def test_shards_of_another_dimension_are_refused_by_name():
    with playing(0, 2):
        mesh = mesh_of(2)
        tensor = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)], src_data_rank=None)
        with pytest.raises(SetupError, match=r"parameter w is placed \(Shard\(dim=1\),\) on \(2,\) processes"):
            own_tensors([LiveTensor(("w",), tensor)], 0, 2)


def test_shards_that_are_cut_otherwise_are_refused_by_name():
    with playing(0, 2):
        mesh = mesh_of(2)
        # 3 and 1 rows, where torch.chunk has 2 and 2
        tensor = DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0)], shape=torch.Size((4, 4)), stride=(4, 1))
        with pytest.raises(SetupError, match=r"parameter w: expected the 8 elements of shard 0/2, found 12"):
            own_tensors([LiveTensor(("w",), tensor)], 0, 2)


def test_a_model_under_fsdp1_is_refused_in_one_sentence():
    from torch.distributed.fsdp import FullyShardedDataParallel

    with playing(0, 2):
        model = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
        with pytest.raises(SetupError, match=r"wrapped by FSDP1.*fsdp_version: 2"):
            refuse_wrappers(model)
    refuse_wrappers(nn.Linear(2, 2))


def test_rows_are_those_of_the_wire():
    with playing(3, 4):
        local = sharded(4, "fsdp2")(torch.arange(35.0).reshape(7, 5)).to_local()  # type: ignore[attr-defined]
    start, stop = Rows(3, 4).rows(7)
    assert local[:, 0].tolist() == [5.0 * row for row in range(start, stop)]


@pytest.mark.parametrize(("kind", "count"), [("qwen3-moe", 2), ("qwen3-moe", 3), ("llama-tied", 3)])
def test_real_models_under_fully_shard_hold_their_checkpoint_together(tiny_model, kind: str, count: int):
    """Fused experts, tied weights and rows that no number of ranks divides, through the names of transformers."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    base = Checkpoint(tiny_model(kind))
    found = {name: np.zeros(spec.num_elements, np.uint16) for name, spec in base.table().items()}
    owners = {name: np.zeros(spec.num_elements, int) for name, spec in base.table().items()}
    total = Digest()
    for rank in range(count):
        with playing(rank, count):
            model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
            mesh = mesh_of(count)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            live = live_tensors(model, base.table())
            base.table().require_same(table_of(live), "the checkpoint", "the model")
            pieces = own_tensors(live, rank, count)
            # whole rows or whole tensors, which every encoding can carry
            coding_shards(pieces, base.table(), needs_all_rows=True)
            detector = Detector(pieces)
            total = total + detector.digest
            for name, bits in detector.copy_bits(pieces).items():
                start = next(piece.start for piece in pieces if name in piece.names)
                found[name][start : start + bits.size] = bits
                owners[name][start : start + bits.size] += 1
    assert all((owned == 1).all() for owned in owners.values())
    assert all(np.array_equal(bits, base.bits(name).reshape(-1)) for name, bits in found.items())
    assert total == base.digest()
