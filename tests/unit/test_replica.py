# SPDX-License-Identifier: Apache-2.0
"""Anchors made out of the bucket: right or not at all, and a version is never held up by what is wrong with one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_store import FaultyStore

from delta_wire.bucket import BucketReader, Published
from delta_wire.checkpoint import Checkpoint
from delta_wire.errors import StoreUnavailableError
from delta_wire.parts import upload_part
from delta_wire.replay import verify
from trl_delta.replica import ReplayedAnchors

WAIT_S = 60.0


@pytest.fixture
def run(tools, tmp_path: Path, make_run):
    """In a bucket in memory whose writes can be disturbed."""
    return tools.Run(FaultyStore(), make_run().base)


@pytest.fixture
def make_anchors(run) -> Iterator[Callable[[], ReplayedAnchors]]:
    made: list[ReplayedAnchors] = []

    def make() -> ReplayedAnchors:
        # due as soon as there is any delta
        made.append(
            ReplayedAnchors(
                run.store, run.table, run.writer.head, factor=1e-9, make_reader=lambda: BucketReader(run.store)
            )
        )
        return made[-1]

    yield make
    for anchors in made:
        anchors.close()


def commit(run, anchors: ReplayedAnchors) -> Published:
    """The next version, as the first of several processes commits it."""
    delta, _ = run.next_delta()
    part = upload_part(run.store, run.table, delta, seq=run.writer.next_seq)
    published = run.writer.commit(
        [part], step=None, make_anchor=lambda manifest: anchors.make_for(manifest) if anchors.ready else None
    )
    anchors.published(published.manifest)
    return published


def wait_for(what: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_versions_that_came_while_it_was_replayed_are_in_it(run, make_anchors, tmp_path: Path):
    run.publish()
    anchors = make_anchors()
    wait_for(lambda: anchors.ready)
    # two that the thread has not seen
    anchors.published(run.publish().manifest)
    anchors.published(run.publish().manifest)
    manifest = commit(run, anchors).manifest
    assert manifest.delta is not None and manifest.anchor is not None
    folder = BucketReader(run.store).fetch_anchor(manifest, tmp_path / "anchor")
    assert Checkpoint(folder).digest() == manifest.digest
    assert (folder / "config.json").read_bytes() == (run.base / "config.json").read_bytes()
    assert not anchors.due and not anchors.ready
    # from the uploaded one now
    commit(run, anchors)
    wait_for(lambda: anchors.ready)
    assert commit(run, anchors).manifest.anchor is not None
    assert all(check.ok for check in verify(BucketReader(run.store)))


def test_an_upload_that_fails_costs_the_anchor_and_not_the_version(run, make_anchors, caplog):
    run.publish()
    anchors = make_anchors()
    wait_for(lambda: anchors.ready)

    def fault(key: str) -> None:
        if key.startswith("anchors/"):
            raise StoreUnavailableError("the bucket is full")

    run.store.fault = fault
    assert commit(run, anchors).manifest.anchor is None
    assert "no anchor for version 2 this time: the bucket is full" in caplog.text
    run.store.fault = None
    # after some more deltas it is tried again
    wait_for(lambda: anchors.ready)
    assert commit(run, anchors).manifest.anchor is not None


def test_a_run_that_cannot_be_replayed_is_reported_and_goes_on(run, make_anchors, caplog):
    lost = run.publish().manifest.delta.objects[0]
    run.store.delete([lost.key])
    anchors = make_anchors()
    wait_for(lambda: not anchors.due)
    assert lost.key in caplog.text
    assert commit(run, anchors).manifest.anchor is None


def test_closing_ends_it_and_leaves_no_files(run, make_anchors):
    run.publish()
    anchors = make_anchors()
    wait_for(lambda: anchors.ready)
    folder = Path(anchors._folder.name)
    assert folder.is_dir()
    anchors.close()
    assert not folder.exists() and not anchors.ready
    anchors.published(run.publish().manifest)
    assert anchors._folder is None
