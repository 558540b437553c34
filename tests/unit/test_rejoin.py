# SPDX-License-Identifier: Apache-2.0
"""A trainer that resumes from other weights than the newest: behind the bucket, ahead of it, or where it is broken."""

from __future__ import annotations

import numpy as np
import pytest

from delta_wire.bucket import BucketWriter
from delta_wire.errors import BaseMismatchError
from delta_wire.replay import State, materialise


def copy(bits):
    return {name: array.copy() for name, array in bits.items()}


def restart(run, tools, bits, **options):
    return BucketWriter.start(
        run.store,
        table=run.table,
        digest=tools.digest_of(bits),
        reference=str(run.base),
        bits=bits.__getitem__,
        **options,
    )


def same(run, bits) -> bool:
    with materialise(run.reader(), run.reader().latest()) as state:
        return all(np.array_equal(state.bits(name), bits[name]) for name in bits)


@pytest.mark.parametrize("encoding", ["plain", "packed", "context"])
@pytest.mark.parametrize("behind", [1, 3])
def test_behind_the_bucket(run, tools, behind: int, encoding: str):
    run.publish()
    saved = copy(run.bits)
    for _ in range(behind):
        before = copy(run.bits)
        delta, digest = run.next_delta()
        run.writer.publish(delta, digest=digest, step=1, encoding=encoding, old_bits=before.__getitem__)
    newest = run.writer.version
    writer = restart(run, tools, saved)
    latest = run.reader().latest()
    assert latest.version == writer.version and latest.digest == tools.digest_of(saved)
    assert (latest.version.epoch, latest.version.seq) == (newest.epoch + 1, newest.seq + 1)
    assert latest.parent.seq == newest.seq and same(run, saved)
    # a server that has the lost versions goes on by a delta, one before them too
    assert len(run.reader().chain(run.reader().manifest(newest.seq).digest, latest)) == 1
    run.writer, run.bits = writer, saved
    run.publish()
    assert same(run, saved)


def test_ahead_of_the_bucket(run, tools):
    run.publish()
    run.next_delta()
    run.next_delta()
    writer = restart(run, tools, run.bits, step=7)
    latest = run.reader().latest()
    assert latest.version == writer.version and latest.step == 7 and latest.delta is not None
    assert latest.changed_params <= 18 and same(run, run.bits)


def test_without_leave_other_weights_are_refused(run, tools):
    run.publish()
    before = run.store.list("")
    run.next_delta()
    with pytest.raises(BaseMismatchError, match="resume from the weights"):
        run.start()
    assert run.store.list("") == before


def test_where_the_chain_is_broken_an_anchor_begins_anew(run, tools, tmp_path):
    run.publish()
    lost = run.reader().latest()
    run.store.delete([lost.delta.objects[0].key])
    run.publish()
    run.next_delta()
    writer = restart(run, tools, run.bits, files=run.base)
    latest = run.reader().latest()
    assert latest.version == writer.version and latest.delta is None and latest.parent.seq == 2
    state = State(run.reader(), latest, tmp_path)
    assert all(np.array_equal(state.bits(name), run.bits[name]) for name in run.bits)
    assert (state.checkpoint.folder / "tokenizer.json").is_file()
    run.writer = writer
    run.publish()
    assert same(run, run.bits)


def test_a_crash_in_the_middle_is_finished_by_the_next_try(run, tools):
    run.publish()
    saved = copy(run.bits)
    run.publish()
    pointer = run.store.get("LATEST", 1 << 16)
    restart(run, tools, saved)
    made = run.reader().latest().version
    # the manifest is there, the pointer was not moved
    run.store.put("LATEST", pointer)
    writer = restart(run, tools, saved)
    assert writer.version == made and same(run, saved)
