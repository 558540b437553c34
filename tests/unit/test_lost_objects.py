# SPDX-License-Identifier: Apache-2.0
"""Objects that are lost or damaged for good: a later anchor leads past them, and is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from followed_run import Server, checked_out, on_rank, publish, publish_anchor, refuses, rewrite_latest, steps_until

from delta_wire.digest import Digest
from delta_wire.errors import SetupError, StoreUnavailableError, UnsupportedFormatError
from delta_wire.manifest import AnchorPart, Manifest, manifest_key


def test_a_later_anchor_leads_past_a_delta_that_cannot_be_used(following: Server, tmp_path: Path):
    bad = publish(following)
    rewrite_latest(
        following, lambda manifest: replace(manifest, anchor=AnchorPart(str(checked_out(following, tmp_path))))
    )
    assert bad.delta is not None
    (following.training.bucket / bad.delta.objects[0].key).write_bytes(b"torn")
    status = following.step()
    assert status["state"] == "degraded" and bad.delta.objects[0].key in status["reason"]
    status = following.step()
    assert (status["state"], status["seq"]) == ("serving", 1)
    assert following.weights() == following.loaded()


def lose_a_manifest(server: Server, manifest: Manifest) -> None:
    (server.training.bucket / manifest_key(manifest.version.seq)).unlink()


def tear_a_manifest(server: Server, manifest: Manifest) -> None:
    (server.training.bucket / manifest_key(manifest.version.seq)).write_bytes(b"torn")


def lose_a_delta(server: Server, manifest: Manifest) -> None:
    assert manifest.delta is not None
    (server.training.bucket / manifest.delta.objects[0].key).unlink()


def tear_a_delta(server: Server, manifest: Manifest) -> None:
    assert manifest.delta is not None
    (server.training.bucket / manifest.delta.objects[0].key).write_bytes(b"torn")


@pytest.mark.parametrize(
    ("lose", "at_once"), [(lose_a_manifest, True), (tear_a_manifest, False)], ids=["shortened", "torn"]
)
def test_a_later_anchor_leads_past_a_manifest_that_cannot_be_read(
    following: Server, lose: Callable[[Server, Manifest], None], at_once: bool
):
    first = publish(following)
    publish_anchor(following)
    publish(following)
    lose(following, first)
    status = following.step()
    if not at_once:
        # what is torn may be whole at the next look
        assert status["state"] == "degraded" and manifest_key(1) in status["reason"]
        status = following.step()
    assert (status["state"], status["seq"], status["commits"]) == ("serving", 3, 2)
    assert following.weights() == following.loaded()


@pytest.mark.parametrize("lose", [lose_a_manifest, tear_a_manifest, lose_a_delta, tear_a_delta])
def test_what_is_lost_for_good_makes_the_server_ask_for_an_anchor(
    following: Server, lose: Callable[[Server, Manifest], None]
):
    lost = publish(following)
    publish(following)
    lose(following, lost)
    # a bad moment is not for good
    for _ in range(3):
        status = following.step()
        assert status["state"] == "degraded" and status["needs_anchor"] is None
    newest = publish(following)
    status = following.step()
    assert status["needs_anchor"] == str(newest.version)
    assert "the trainer is asked for one in acks/one.json" in status["reason"]
    assert following.ack().needs_anchor == newest.version
    # the request stays what it is while versions go on
    publish(following)
    assert following.step()["needs_anchor"] == str(newest.version)
    before = following.weights()

    # an anchor that is lost as well is not what was asked for: another one is
    useless = publish_anchor(following)
    assert useless.anchor is not None
    (following.training.bucket / useless.anchor.objects[0].key).unlink()
    following.step()
    status = steps_until(following, "needs_anchor")
    assert status["needs_anchor"] == str(useless.version) and status["seq"] == 0
    assert following.weights() == before

    publish_anchor(following)
    publish(following)
    for _ in range(2):
        status = following.step()
    assert (status["state"], status["needs_anchor"], status["lag_versions"]) == ("serving", None, 0)
    assert following.weights() == following.loaded()
    assert following.ack().needs_anchor is None


def test_only_what_an_anchor_would_mend_asks_for_one(following: Server, monkeypatch: pytest.MonkeyPatch):
    def refuse(error: Exception) -> Callable[..., None]:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise error

        return fail

    publish(following)
    for error in (StoreUnavailableError("away"), UnsupportedFormatError("newer"), SetupError("no room")):
        with monkeypatch.context() as patch:
            patch.setattr(following.subscriber, "stage", refuse(error))
            for _ in range(8):
                status = following.step()
        assert status["state"] == "degraded" and status["needs_anchor"] is None
    # a rank that cannot read its file, and a commit that fails
    for hook, fault in (("delta_poll", refuses), ("delta_commit", refuses)):
        following.engine.hooks[hook] = on_rank(1, lambda call, fault=fault: fault(call) | {"kind": "FormatError"})
        for _ in range(8):
            assert following.step()["needs_anchor"] is None
        following.engine.hooks.clear()
    assert following.step()["state"] == "serving"


def test_a_version_that_is_not_the_announced_one_needs_an_anchor(following: Server):
    publish(following)
    wrong = rewrite_latest(following, lambda m: replace(m, digest=m.digest + Digest(1, 1)))
    assert steps_until(following, "needs_anchor")["needs_anchor"] == str(wrong.version)


def test_without_acks_nobody_is_asked(tmp_path: Path):
    server = Server(tmp_path, ack=False)
    server.writer = server.training.start()  # type: ignore[attr-defined]
    server.step()
    lose_a_delta(server, publish(server))
    status = steps_until(server, "needs_anchor")
    assert status["needs_anchor"] and "DELTA_SYNC_ACK is 0" in status["reason"]
