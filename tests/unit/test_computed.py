# SPDX-License-Identifier: Apache-2.0
"""Parts that vLLM computes from the checkpoint's weights: with vLLM's own layerwise reload over a small model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_server import HIDDEN, INNER, FakeEngine, FakeModel, FakeWorker, as_loaded, write_checkpoint
from training import Training
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.utils import replace_parameter

from vllm_delta.commit import Coordinator
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.subscriber import Subscriber

CONFIG = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))


def load_rows(param: torch.Tensor, loaded: torch.Tensor, start: int) -> None:
    param.data[start : start + loaded.shape[0]].copy_(loaded)


class PerRow(QuantizeMethodBase):
    """8 bits a weight, which every change of the weight changes, and a scale a row."""

    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight: Any = layer.weight
        bits = weight.detach().view(torch.int16)
        replace_parameter(layer, "weight", (bits & 255).to(torch.uint8))
        replace_parameter(layer, "scale", bits.float().amax(dim=1, keepdim=True))


class Quantised(torch.nn.Module):
    def __init__(self, rows: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, HIDDEN, device="meta", dtype=torch.bfloat16), False)
        self.weight.weight_loader = load_rows
        self.quant_method: Any = PerRow()
        # as vLLM's methods that quantise while loading do
        initialize_online_processing(self)


class Quantises(FakeModel):
    """Gate and up become one quantised weight."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__(rank, ranks)
        del self.gate_up
        self.mlp = Quantised(2 * INNER // ranks)
        record_metadata_for_reloading(self)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        starts = {"gate.weight": 0, "up.weight": INNER // self.ranks}
        if name in starts:
            weight: Any = self.mlp.weight
            weight.weight_loader(weight, self.share(tensor, 0), starts[name])
        else:
            super().load(name, tensor)


class Server:
    """A coordinator over workers whose models quantise, and the run that it follows."""

    def __init__(self, folder: Path, model: Any = Quantises):
        self.training = Training(write_checkpoint(folder / "base"), folder / "bucket", changed_frac=0.1)
        self.writer = self.training.start()
        self.engine = FakeEngine([FakeWorker(self.training.base, rank, 2, model) for rank in range(2)])
        for worker in self.engine.workers:
            worker.vllm_config = CONFIG
        self.models = [worker.model for worker in self.engine.workers]
        self.coordinator = Coordinator(
            self.engine,
            Ranks(self.engine),
            Subscriber(str(folder / "bucket"), folder),
            Settings(str(folder / "bucket"), stage_dir=folder, server_id="one"),
            lambda: self.training.base,
        )

    def step(self) -> dict[str, Any]:
        self.coordinator.step()
        return self.coordinator.status.to_json()

    def weights(self) -> list[dict[str, list[int]]]:
        return [bits_of(model) for model in self.models]

    def loaded(self) -> list[dict[str, list[int]]]:
        """What servers hold that were started on the trainer's newest state."""
        return [bits_of(as_loaded(self.training.bits, rank, 2, Quantises)) for rank in range(2)]


def bits_of(model: torch.nn.Module) -> dict[str, list[int]]:
    return {
        name: param.detach().contiguous().view(-1).view(torch.uint8).tolist()
        for name, param in model.named_parameters()
    }


@pytest.fixture
def server(tmp_path: Path) -> Server:
    server = Server(tmp_path)
    places = [model.mlp.weight.data_ptr() for model in server.models]
    before = server.weights()
    assert server.step()["state"] == "serving"
    assert server.weights() == before == server.loaded()
    assert [model.mlp.weight.data_ptr() for model in server.models] == places
    return server


@pytest.mark.parametrize("encoding", ["packed", "context"])
def test_every_version_equals_a_full_load(server: Server, encoding: str):
    places = [model.mlp.weight.data_ptr() for model in server.models]
    for seq in (1, 2, 3):
        server.training.publish(server.writer, encoding)
        before = server.weights()
        status = server.step()
        assert (status["state"], status["seq"], status["commits"]) == ("serving", seq, seq)
        assert status["digest"] == str(server.training.digest)
        assert server.weights() == server.loaded()
        assert all(now["mlp.weight"] != old["mlp.weight"] for now, old in zip(server.weights(), before, strict=True))
    # what has been captured of them stays valid
    assert [model.mlp.weight.data_ptr() for model in server.models] == places


def test_only_what_a_version_touches_is_computed_and_by_all_ranks(server: Server, monkeypatch: pytest.MonkeyPatch):
    calls: list[torch.nn.Module] = []
    process = PerRow.process_weights_after_loading

    def counted(self: PerRow, layer: torch.nn.Module) -> None:
        calls.append(layer)
        process(self, layer)

    monkeypatch.setattr(PerRow, "process_weights_after_loading", counted)
    delta = server.training.change()
    rest = {name: part for name, part in delta.items() if name not in ("gate.weight", "up.weight")}
    for name in ("gate.weight", "up.weight"):
        part = delta[name]
        assert part.old is not None
        server.training.bits[name][part.indices] = part.old
    server.training.digest = _digest_after(server, rest)
    server.writer.publish(rest, digest=server.training.digest, step=None)
    assert server.step()["seq"] == 1 and not calls
    # a change that lies on the first rank alone
    part = delta["gate.weight"]
    assert part.old is not None
    first = {"gate.weight": type(part)("gate.weight", part.indices[:1], part.new[:1], part.old[:1])}
    assert first["gate.weight"].indices[0] < INNER * HIDDEN // 2
    server.training.bits["gate.weight"][part.indices[:1]] = part.new[:1]
    server.training.digest = _digest_after(server, first)
    server.writer.publish(first, digest=server.training.digest, step=None)
    assert server.step()["seq"] == 2
    assert calls == [model.mlp for model in server.models]


def _digest_after(server: Server, delta: Any) -> Any:
    from delta_wire.state import change_of_digest

    base = server.coordinator._at.position
    assert base is not None
    return base.digest + change_of_digest(delta)


@pytest.mark.parametrize("method", ["delta_commit", "delta_compute"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_one_rank_is_taken_back_on_all(server: Server, method: str, rank: int):
    server.training.publish(server.writer, "packed")
    before = server.weights()
    failures = [rank]

    def fail(at: int, call: Callable[[], Any]) -> Any:
        if at in failures:
            failures.remove(at)
            return {"error": "no memory", "kind": "RuntimeError"}
        return call()

    server.engine.hooks[method] = fail
    status = server.step()
    assert (status["state"], status["seq"]) == ("degraded", 0) and not failures
    assert server.weights() == before and not server.engine.paused
    assert server.step()["seq"] == 1 and server.weights() == server.loaded()


def test_a_part_that_cannot_be_restored_holds_generation_until_it_is_written_anew(server: Server):
    server.training.publish(server.writer, "packed")
    # when computing and when taking back
    server.engine.hooks["delta_compute"] = lambda rank, call: {"error": "no memory", "kind": "RuntimeError"}
    server.step()
    assert server.engine.paused
    server.engine.hooks.clear()
    status = server.step()
    assert (status["state"], status["seq"]) == ("serving", 1) and not server.engine.paused
    assert server.weights() == server.loaded()


def test_what_somebody_else_writes_into_a_part_is_found_and_healed(server: Server):
    server.training.publish(server.writer, "packed")
    server.step()
    served = server.weights()
    with torch.no_grad():
        server.models[1].mlp.scale[3] *= 2
    answer = server.coordinator.verify()
    server.step()
    assert not answer.result(0)["equal"] and "mlp: the live tensors are not those" in answer.result(0)["problem"]
    assert server.engine.paused
    assert server.step()["state"] == "serving" and not server.engine.paused
    assert server.weights() == served


class Reads(torch.nn.Module):
    """A layer that has read its parameter after loading, and dropped it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.quant_method: Any = PerRow()


class Drops(Quantises):
    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__(rank, ranks)
        self.attention = Reads()
        record_metadata_for_reloading(self)
        del self.attention.scale


def test_a_layer_without_live_tensors_is_no_obstacle(tmp_path: Path):
    server = Server(tmp_path, Drops)
    assert server.step()["state"] == "serving"
    server.training.publish(server.writer)
    assert server.step()["seq"] == 1 and server.weights() == server.loaded()


class Drifts(Quantises):
    """Its scales depend on how often they were computed, as where a transform remembers that it has run."""

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.mlp.quant_method = Other()


class Other(PerRow):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        replace_parameter(layer, "scale", layer.scale.detach() * 2)  # type: ignore[operator]


class Hides(Quantises):
    """A kernel that packs the weight into memory of its own."""

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.mlp.quant_method.packed = self.mlp.weight.detach().clone()


class Fails(Quantises):
    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.mlp.quant_method = Never()


class Never(PerRow):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        raise RuntimeError("weights are packed once")


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Drifts, "makes other live tensors"), (Hides, "beside its parameters"), (Fails, "weights are packed once")],
)
def test_a_part_that_is_not_reproduced_is_refused_and_left_as_it_was(tmp_path: Path, model: type, reason: str):
    server = Server(tmp_path, model)
    before = server.weights()
    status = server.step()
    assert status["state"] == "degraded"
    assert "gate.weight: " in status["reason"] and "up.weight: " in status["reason"] and reason in status["reason"]
    assert server.weights() == before
    server.training.publish(server.writer)
    assert server.step()["seq"] is None and server.weights() == before
