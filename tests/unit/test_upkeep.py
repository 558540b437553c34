# SPDX-License-Identifier: Apache-2.0
"""Anchors, retention and signatures of a session, in a real training."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from delta_wire.acks import Ack
from delta_wire.bucket import BucketReader
from delta_wire.checkpoint import Checkpoint
from delta_wire.errors import SetupError, SignatureError
from delta_wire.replay import materialise, verify
from delta_wire.signing import Verifier, generate_key
from delta_wire.stores import open_store
from trl_delta import DeltaSyncConfig, DeltaSyncSession


def train(session: DeltaSyncSession, model: torch.nn.Module, steps: int) -> None:
    torch.manual_seed(0)
    for step in range(1, steps + 1):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + 0.02 * torch.randn(()))
        session.step(step)
        assert session.publisher.wait(60)


def has(reader: BucketReader, seq: int, model: torch.nn.Module) -> bool:
    expected = {
        name: param.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        for name, param in model.named_parameters()
    }
    with materialise(reader, reader.manifest(seq)) as state:
        return all(np.array_equal(state.bits(name), expected[name]) for name in state.table)


@pytest.fixture
def model(tiny_model) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model("qwen3-tied"), dtype=torch.float32)


def test_a_run_gets_anchors_and_loses_what_lies_before_them(tiny_model, model, tmp_path: Path):
    bucket = tmp_path / "bucket"
    config = DeltaSyncConfig(delta_sync_anchor_factor=0.3, delta_sync_retention_grace_s=0.1)
    session = DeltaSyncSession(str(bucket), config)
    session.start(model)
    train(session, model, 12)
    reader = BucketReader(open_store(bucket))
    latest = reader.latest()
    assert latest is not None
    # no further back: what lies there may be gone by now
    anchors = list(islice((m for m in reader.walk(latest) if m.anchor is not None and m.anchor.objects), 2))
    deadline_s = time.monotonic() + 60
    while any(bucket.glob(f"deltas/{anchors[1].version.seq - 1:012d}-*")):
        assert time.monotonic() < deadline_s, "nothing was removed"
        time.sleep(0.05)
    assert session.finish()
    assert has(BucketReader(open_store(bucket)), latest.version.seq, model)
    assert all(check.ok for check in verify(BucketReader(open_store(bucket))))
    # what from_pretrained opens: the weights of that version with this model's configuration
    folder = reader.fetch_anchor(anchors[0], tmp_path / "anchor")
    assert Checkpoint(folder).digest() == anchors[0].digest
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert loaded.config.hidden_size == model.config.hidden_size
    assert not session._upkeep._folder


def test_an_anchor_is_of_the_version_in_flight_while_training_goes_on(model, tmp_path: Path):
    """Weights change while their checkpoint is being read: it has those of its own version all the same."""
    config = DeltaSyncConfig(delta_sync_anchor_factor=0.01, delta_sync_retention=False)
    session = DeltaSyncSession(str(tmp_path / "bucket"), config)
    session.start(model)
    for step in range(1, 9):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.01)
        session.step(step)
        # the first makes the next one due; what follows may be folded together, and be read while it changes
        assert step > 1 or session.publisher.wait(60)
    assert session.finish()
    reader = BucketReader(open_store(tmp_path / "bucket"))
    checks = list(verify(reader))
    assert all(check.ok for check in checks) and sum("anchor" in check.checks for check in checks) >= 2


def test_a_server_that_asks_gets_an_anchor_of_the_weights_as_they_are(model, tmp_path: Path):
    session = DeltaSyncSession(str(tmp_path / "bucket"), DeltaSyncConfig())
    session.start(model)
    train(session, model, 2)
    reader = BucketReader(open_store(tmp_path / "bucket"))
    lost = reader.manifest(1)
    assert lost.delta is not None
    reader.store.delete([lost.delta.objects[0].key])
    cut_off = Ack("a", None, None, "degraded", "lost", None, 1.0, needs_anchor=reader.manifest(2).version)
    reader.write_ack(cut_off)
    deadline_s = time.monotonic() + 60
    while session.publisher.durable_seq < 3:
        assert time.monotonic() < deadline_s, "the request was not heard"
        time.sleep(0.01)
    assert session.finish()
    made = reader.manifest(3)
    assert made.anchor is not None and made.anchor.objects and has(reader, 3, model)


def test_without_retention_or_anchors_everything_stays(model, tmp_path: Path):
    config = DeltaSyncConfig(delta_sync_anchor_factor=0, delta_sync_retention_grace_s=0)
    session = DeltaSyncSession(str(tmp_path / "bucket"), config)
    session.start(model)
    train(session, model, 4)
    assert session.finish()
    assert [check.seq for check in verify(BucketReader(open_store(tmp_path / "bucket")))] == [0, 1, 2, 3, 4]


def test_a_signed_training(model, tmp_path: Path):
    public = generate_key(tmp_path / "key.pem")
    config = DeltaSyncConfig(delta_sync_signing_key=str(tmp_path / "key.pem"))
    session = DeltaSyncSession(str(tmp_path / "bucket"), config)
    session.start(model)
    train(session, model, 2)
    assert session.finish()
    store = open_store(tmp_path / "bucket")
    assert all(check.ok for check in verify(BucketReader(store, Verifier(public))))
    with pytest.raises(SignatureError):
        BucketReader(store, Verifier("ab" * 32)).latest()
    with pytest.raises(SetupError, match="keygen"):
        DeltaSyncSession(str(tmp_path / "b"), DeltaSyncConfig(delta_sync_signing_key="/nowhere")).start(model)
