# SPDX-License-Identifier: Apache-2.0
"""A server and a run of adapters: what is refused before a slot is touched, what a failed exchange leads to."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_server import FakeEngine, FakeWorker, write_checkpoint

from delta_wire.adapter import Adapter
from delta_wire.bucket import BucketWriter
from delta_wire.checkpoint import ADAPTER_CONFIG, ADAPTER_FILE, Checkpoint
from delta_wire.container import write_tensors
from delta_wire.digest import Digest
from delta_wire.stores import open_store
from vllm_delta import versions
from vllm_delta.adapter_run import adapter_label
from vllm_delta.adapter_slot import AdapterSlot, scaling_of
from vllm_delta.commit import Coordinator
from vllm_delta.ranks import Ranks
from vllm_delta.settings import Settings
from vllm_delta.subscriber import Subscriber

BITS = np.arange(8, dtype=np.uint16).reshape(2, 4)


def write_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    write_tensors(
        folder / ADAPTER_FILE, {"base_model.model.q.lora_A.weight": ("BF16", (2, 4), BITS)}, {"format": "pt"}
    )
    (folder / ADAPTER_CONFIG).write_text(json.dumps({"r": 2, "lora_alpha": 4, "target_modules": ["q"]}))
    return folder


class Server:
    """A coordinator over a fake worker without --enable-lora, and a run of adapters for some base."""

    def __init__(self, folder: Path, base: Digest | None = None):
        self.base = write_checkpoint(folder / "base")
        adapter = write_adapter(folder / "adapter")
        checkpoint = Checkpoint(adapter)
        described = Adapter("policy", 2, Checkpoint(self.base).digest() if base is None else base, "me/base@1")
        BucketWriter.start(
            open_store(folder / "bucket", create=True),
            table=checkpoint.table(),
            digest=checkpoint.digest(),
            reference=None,
            anchor_dir=adapter,
            adapter=described,
        )
        (folder / "stage").mkdir()
        settings = Settings(str(folder / "bucket"), stage_dir=folder / "stage", server_id="one")
        self.engine = FakeEngine([FakeWorker(self.base)])
        self.coordinator = Coordinator(
            self.engine,
            Ranks(self.engine),
            Subscriber(settings.bucket, settings.stage_dir),
            settings,
            lambda: self.base,
        )

    def step(self) -> dict[str, Any]:
        self.coordinator.step()
        return self.coordinator.status.to_json()


def test_a_server_without_lora_says_what_to_start_it_with(tmp_path):
    server = Server(tmp_path)
    status = server.step()
    assert status["state"] == "degraded" and "without --enable-lora; add it" in status["reason"]
    assert status["version"] is None and status["adapter"] is None and server.engine.label == "default"
    # the base is served all the same
    assert not server.engine.paused


def test_an_adapter_of_another_base_is_refused_with_both_digests(tmp_path):
    other = Digest(1, 2)
    server = Server(tmp_path, other)
    reason = server.step()["reason"]
    assert f"trained on a base model with digest {other} (me/base@1)" in reason
    assert f"have digest {Checkpoint(server.base).digest()}" in reason
    assert server.engine.label == "default"


class Slot:
    """[`AdapterSlot`] with a slot that is a variable: what the coordinator does about each answer."""

    def __init__(self, worker: FakeWorker):
        self.held: Path | None = None
        self.used = ["base_model.model.q.lora_A.weight"]
        self.digest: str | None = None
        self.problem: str | None = None
        self.can_undo = True
        worker.delta_rank_._adapter = self  # type: ignore[assignment]

    def plan(self, folder: Path, name: str) -> tuple[Any, dict[str, Any]]:
        assert name == "policy"
        digest = self.digest or str(Checkpoint(folder).digest())
        return SimpleNamespace(folder=folder), {"digest": digest, "used": self.used}

    def commit(self, plan: Any) -> dict[int, tuple[int, int]]:
        if self.problem is not None:
            raise RuntimeError(self.problem)
        self.held = plan.folder
        return {}

    def undo(self, plan: Any) -> bool:
        return self.can_undo

    def check(self) -> dict[str, Any]:
        assert self.held is not None
        return {"digest": str(Checkpoint(self.held).digest()), "problem": self.problem}


@pytest.fixture
def slotted(tmp_path: Path) -> tuple[Server, Slot]:
    server = Server(tmp_path)
    # attached, and refused for want of adapters
    server.step()
    return server, Slot(server.engine.workers[0])


def test_a_version_is_put_in_place_labelled_and_proven(slotted):
    server, slot = slotted
    status = server.step()
    assert status["state"] == "serving" and status["seq"] == 0 and status["adapter"]["name"] == "policy"
    assert status["digest"] == str(Checkpoint(slot.held).digest())
    assert server.engine.label == f"{status['version']}@policy"
    assert server.engine.renewed == [("forget", server.engine.label)]
    answer = server.coordinator.verify()
    server.step()
    proof = answer.result(timeout=0)
    assert proof["equal"] and proof["version"] == status["version"] and proof["digest"] == status["digest"]
    assert proof["base_digest"] == str(Checkpoint(server.base).digest())


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("used", [], "no layer of the served model takes 1 tensors of the adapter: base_model.model.q.lora_A.weight"),
        ("digest", "0" * 32, "every rank must see the same folder"),
        ("problem", "no room", "could not be put in place: rank 0: no room"),
    ],
)
def test_what_cannot_be_put_in_place_changes_nothing(slotted, attribute, value, says):
    server, slot = slotted
    setattr(slot, attribute, value)
    status = server.step()
    assert status["state"] == "degraded" and says in status["reason"]
    assert status["version"] is None and server.engine.label == "default" and not server.engine.paused


def test_generation_is_held_while_nobody_knows_what_is_in_the_slot(slotted):
    server, slot = slotted
    slot.problem, slot.can_undo = "no room", False
    status = server.step()
    assert status["state"] == "degraded" and "the old adapter could not be restored" in status["reason"]
    assert server.engine.paused
    slot.problem = None
    assert server.step()["state"] == "serving"
    assert not server.engine.paused


def test_a_slot_that_holds_something_else_is_found_and_filled_anew(slotted):
    server, slot = slotted
    commits = server.step()["commits"]
    slot.problem = "q: the live adapter is not what it should be"
    answer = server.coordinator.verify()
    status = server.step()
    assert status["state"] == "degraded" and server.engine.paused
    proof = answer.result(timeout=0)
    assert not proof["equal"] and proof["digest"] is None and slot.problem in proof["problem"]
    slot.problem = None
    status = server.step()
    assert status["state"] == "serving" and status["commits"] == commits + 1 and not server.engine.paused
    assert server.engine.label == f"{status['version']}@policy"


def test_weights_that_something_else_may_have_written_are_proven_with_the_adapter(slotted):
    server, slot = slotted
    server.step()
    slot.problem = "q: the live adapter is not what it should be"
    server.engine.between_steps(lambda: server.coordinator.suspect("add_lora was called from outside"))
    status = server.step()
    assert status["state"] == "degraded" and server.engine.paused
    assert "add_lora was called from outside: rank 0: q: the live adapter" in status["reason"]


@pytest.mark.parametrize(
    ("config", "layer", "scaling"),
    [
        ({"r": 4, "lora_alpha": 6}, "model.layers.0.q_proj", 1.5),
        ({"r": 4, "lora_alpha": 6, "use_rslora": True}, "model.layers.0.q_proj", 3.0),
        ({"r": 4, "lora_alpha": 6, "rank_pattern": {"q_proj": 2}}, "model.layers.0.q_proj", 3.0),
        ({"r": 4, "lora_alpha": 6, "rank_pattern": {"q_proj": 2}}, "model.layers.0.k_proj", 1.5),
        ({"r": 4, "lora_alpha": 6, "alpha_pattern": {"layers.0.q_proj": 8}}, "model.layers.0.q_proj", 2.0),
        ({"r": 4, "lora_alpha": 6, "alpha_pattern": {"layers.0.q_proj": 8}}, "model.layers.10.q_proj", 1.5),
    ],
)
def test_the_scaling_of_a_layer(config, layer, scaling):
    assert math.isclose(scaling_of(config, layer), scaling, rel_tol=0)


def test_a_rank_without_a_slot_has_nothing_to_check():
    slot = AdapterSlot(None)
    with pytest.raises(Exception, match="holds no adapter"):
        slot.check()


@dataclass
class Span:
    version: str
    start: int
    end: int


async def _outputs(spans: list[Span] | None) -> AsyncIterator[Any]:
    yield SimpleNamespace(finished=False, outputs=[])
    yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(weight_versions=spans)])


@pytest.mark.parametrize(
    ("adapter", "seen"),
    [
        ("policy", [Span("default", 0, 2), Span("ab-1-1", 2, 5), Span("ab-1-2", 5, 9)]),
        ("other", [Span("default", 0, 9)]),
        (None, [Span("default", 0, 9)]),
    ],
)
def test_only_the_adapter_is_labelled_with_its_versions(adapter, seen):
    labels = ["default", adapter_label("ab-1-1", "policy"), adapter_label("ab-1-2", "policy")]
    spans = [Span(labels[0], 0, 2), Span(labels[1], 2, 5), Span(labels[2], 5, 9)]
    generate = versions.note_versions(lambda *args, lora_request=None: _outputs(spans))
    request = None if adapter is None else SimpleNamespace(lora_name=adapter)

    async def ask() -> Any:
        return [output async for output in generate("prompt", lora_request=request)][-1]

    assert asyncio.run(ask()).outputs[0].weight_versions == seen
    assert versions.version_for(labels[2], adapter) == seen[-1].version
    # of whole weights all requests have the same version
    assert versions.version_for("ab-1-2", adapter) == "ab-1-2"
