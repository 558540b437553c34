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
from delta_wire.anchors import stream_anchor
from delta_wire.bucket import BucketWriter
from delta_wire.checkpoint import ADAPTER_CONFIG, ADAPTER_FILE, Checkpoint
from delta_wire.container import write_tensors
from delta_wire.digest import Digest
from delta_wire.manifest import Manifest
from delta_wire.state import TensorDelta, change_of_digest
from delta_wire.stores import open_store
from vllm_delta import versions
from vllm_delta.adapter_label import ADAPTER_ID, NO_PATH, adapter_label, version_for
from vllm_delta.adapter_names import AdapterNameMiddleware
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
        self.writer = BucketWriter.start(
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

    def commit(self, plan: Any) -> None:
        if self.problem is not None:
            raise RuntimeError(self.problem)
        self.held = plan.folder

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


def test_an_adapter_cut_off_from_the_newest_asks_for_an_anchor_and_goes_on_from_it(slotted):
    server, slot = slotted
    server.step()
    bits, writer = BITS.copy(), server.writer
    name = "base_model.model.q.lora_A.weight"

    def publish(anchor: bool = False) -> Manifest:
        old = bits.reshape(-1)[:1].copy()
        bits.reshape(-1)[0] += 1
        delta = {name: TensorDelta(name, np.zeros(1, np.int32), bits.reshape(-1)[:1].copy(), old)}
        digest = writer.digest + change_of_digest(delta)
        kwargs = {"seq": writer.next_seq, "digest": digest, "files": server.base.with_name("adapter")}
        made = stream_anchor(writer.store, writer.table, lambda _: bits, single_file=ADAPTER_FILE, **kwargs)
        return writer.publish(delta, digest=digest, step=None, anchor=made if anchor else None).manifest

    lost = publish()
    assert lost.delta is not None
    writer.store.delete([lost.delta.objects[0].key])
    newest = publish()
    statuses = [server.step() for _ in range(5)]
    assert [status["needs_anchor"] for status in statuses] == [None, None, None, *[str(newest.version)] * 2]
    assert statuses[-1]["seq"] == 0 and "the trainer is asked for one" in statuses[-1]["reason"]
    publish(anchor=True)
    last = publish()
    status = server.step()
    assert (status["version"], status["state"], status["needs_anchor"]) == (str(last.version), "serving", None)
    assert np.array_equal(Checkpoint(slot.held).bits(name), bits)


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


@dataclass
class LoRA:
    lora_name: str
    lora_int_id: int


async def _outputs(spans: list[Span] | None) -> AsyncIterator[Any]:
    yield SimpleNamespace(finished=False, outputs=[])
    yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(weight_versions=spans)])


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        (LoRA("policy", ADAPTER_ID), [Span("default", 0, 2), Span("ab-1-1", 2, 5), Span("ab-1-2", 5, 9)]),
        (LoRA("other", 1), [Span("default", 0, 9)]),
        # another adapter of the same name, loaded by somebody before the run's
        (LoRA("policy", 1), [Span("default", 0, 9)]),
        (None, [Span("default", 0, 9)]),
    ],
)
def test_only_the_adapter_is_labelled_with_its_versions(asked, seen):
    labels = ["default", adapter_label("ab-1-1", "policy"), adapter_label("ab-1-2", "policy")]
    spans = [Span(labels[0], 0, 2), Span(labels[1], 2, 5), Span(labels[2], 5, 9)]
    generate = versions.note_versions(lambda *args, lora_request=None: _outputs(spans))

    async def ask() -> Any:
        return [output async for output in generate("prompt", lora_request=asked)][-1]

    assert asyncio.run(ask()).outputs[0].weight_versions == seen


@pytest.mark.parametrize(("adapter", "version"), [("policy", "ab-1-2"), ("other", "default"), (None, "default")])
def test_what_a_label_means(adapter, version):
    assert version_for(adapter_label("ab-1-2", "policy"), adapter) == version
    # of whole weights all requests have the same version
    assert version_for("ab-1-2", adapter) == "ab-1-2"


class Models:
    """vLLM's list of models."""

    def __init__(self, **adapters: LoRA):
        self.lora_requests: dict[str, Any] = dict(adapters)

    def is_base_model(self, name: str) -> bool:
        return name == "model"


def call(middleware: AdapterNameMiddleware, models: Models, adapter: str | None, method: str = "POST") -> None:
    async def look(method: str) -> dict[str, Any]:
        return {"adapter": adapter and {"name": adapter}}

    client = SimpleNamespace(
        vllm_config=SimpleNamespace(lora_config=object()), engine_core=SimpleNamespace(call_utility_async=look)
    )
    state = SimpleNamespace(engine_client=client, openai_serving_models=models)
    scope = {"type": "http", "method": method, "path": "/v1/completions", "app": SimpleNamespace(state=state)}
    # as if the last look were long ago
    middleware._served._looked_s = -1.0
    asyncio.run(middleware(scope, None, None))


@pytest.fixture
def middleware() -> AdapterNameMiddleware:
    async def inside(scope: Any, receive: Any, send: Any) -> None:
        pass

    return AdapterNameMiddleware(inside)


def test_the_adapters_name_is_known_once_it_is_in_place(middleware):
    models = Models(other=LoRA("other", 1))
    call(middleware, models, None)
    assert list(models.lora_requests) == ["other"]
    call(middleware, models, "policy", method="GET")
    assert list(models.lora_requests) == ["other"]
    call(middleware, models, "policy")
    ours = models.lora_requests["policy"]
    assert (ours.lora_int_id, ours.lora_path, ours.load_inplace) == (ADAPTER_ID, NO_PATH, False)
    # somebody has unloaded it, which it is not
    del models.lora_requests["policy"]
    call(middleware, models, "policy")
    assert models.lora_requests["policy"].lora_int_id == ADAPTER_ID
    # another run
    call(middleware, models, "next")
    assert list(models.lora_requests) == ["other", "next"]


@pytest.mark.parametrize("name", ["model", "taken"])
def test_a_name_that_is_taken_stays_what_it_is(middleware, caplog, name):
    models = Models(taken=LoRA("taken", 1))
    for _ in range(2):
        call(middleware, models, name)
    assert list(models.lora_requests) == ["taken"] and models.lora_requests["taken"].lora_int_id == 1
    assert caplog.text.count(f"the run's adapter is called {name}") == 1
