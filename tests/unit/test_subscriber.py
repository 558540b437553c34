# SPDX-License-Identifier: Apache-2.0
"""From a bucket to staged files."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from fake_server import write_checkpoint
from training import Training

from delta_wire.errors import BucketNotFoundError, FormatError
from delta_wire.manifest import Manifest
from vllm_delta.staging import read_staged
from vllm_delta.subscriber import Position, Subscriber


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(write_checkpoint(tmp_path / "base"), tmp_path / "bucket", changed_frac=0.2)


@pytest.fixture
def subscriber(training: Training, tmp_path: Path) -> Subscriber:
    (tmp_path / "stage").mkdir()
    return Subscriber(str(training.bucket), tmp_path / "stage")


def newest(subscriber: Subscriber) -> Manifest:
    target = subscriber.target()
    assert target is not None
    return target


def located(subscriber: Subscriber, training: Training) -> Position:
    position = subscriber.locate(training.digest, newest(subscriber), training.base)
    assert position is not None
    return position


@pytest.mark.parametrize("encodings", [("plain",) * 3, ("packed",) * 3, ("plain", "context", "packed")])
def test_a_chain_is_staged_as_one_delta(subscriber: Subscriber, training: Training, encodings: tuple[str, ...]):
    writer = training.start()
    position = located(subscriber, training)
    before = {name: bits.copy() for name, bits in training.bits.items()}
    for encoding in encodings:
        training.publish(writer, encoding)
    target = newest(subscriber)
    staged = subscriber.stage(position, target)
    assert (staged.kind, staged.num_versions, staged.manifest) == ("plan_delta", 3, target)
    delta = read_staged(staged.path, training.table)
    assert delta.keys() == training.table.keys()
    for name, part in delta.items():
        if part.relative is None:
            before[name][part.indices] = part.new
            assert np.array_equal(before[name], training.bits[name])
    subscriber.clear()
    assert not staged.path.exists() and subscriber.folder.is_dir()
    subscriber.close()
    assert not list(subscriber._stage_dir.iterdir())


def test_a_position_is_the_version_of_the_loaded_weights(subscriber: Subscriber, training: Training):
    writer = training.start()
    loaded = training.digest
    for _ in range(3):
        training.publish(writer)
    target = newest(subscriber)
    found = subscriber.locate(loaded, target, training.base)
    assert found is not None and found.version.seq == 0 and found.version.run == target.version.run
    found = subscriber.locate(training.digest, target, training.base)
    assert found is not None and found.version == target.version
    assert subscriber.locate(training.digest + training.digest, target, training.base) is None


def test_a_staging_folder_that_was_removed_is_made_again(subscriber: Subscriber, training: Training):
    writer = training.start()
    position = located(subscriber, training)
    shutil.rmtree(subscriber.folder)
    training.publish(writer)
    assert subscriber.stage(position, newest(subscriber)).path.is_file()


def test_a_bucket_that_is_replaced_is_read_anew(subscriber: Subscriber, training: Training):
    training.start()
    first = newest(subscriber)
    shutil.rmtree(training.bucket)
    with pytest.raises(BucketNotFoundError):
        subscriber.target()
    subscriber.reset()
    training.start()
    assert newest(subscriber).version.run != first.version.run


def test_nothing_is_left_behind_by_a_broken_download(subscriber: Subscriber, training: Training):
    writer = training.start()
    position = located(subscriber, training)
    manifest = training.publish(writer)
    assert manifest.delta is not None
    path = training.bucket / manifest.delta.objects[0].key
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FormatError, match=manifest.delta.objects[0].key):
        subscriber.stage(position, newest(subscriber))
    assert not list(subscriber.folder.iterdir())


def test_a_file_staged_for_another_model_is_refused(subscriber: Subscriber, training: Training):
    from delta_wire.state import TensorTable

    writer = training.start()
    position = located(subscriber, training)
    training.publish(writer)
    staged = subscriber.stage(position, newest(subscriber))
    other = TensorTable(list(training.table.values())[1:])
    with pytest.raises(FormatError, match="another model"):
        read_staged(staged.path, other)


def test_a_run_changed_for_another_is_read_from_its_own_anchor(
    subscriber: Subscriber, training: Training, tmp_path: Path
):
    """The mirror of the weights begins anew where no chain leads on from the one it had."""
    writer = training.start()
    position = located(subscriber, training)
    training.publish(writer, "context")
    subscriber.stage(position, newest(subscriber))
    other = Training(write_checkpoint(tmp_path / "other", seed=5), tmp_path / "elsewhere", changed_frac=0.2)
    shutil.rmtree(training.bucket)
    writer = other.start()
    anchor = other.digest
    shutil.move(other.bucket, training.bucket)
    other.bucket = training.bucket
    subscriber.reset()
    first = newest(subscriber)
    staged = subscriber.stage(position, first)
    assert staged.kind == "plan_checkpoint"
    before = {name: bits.copy() for name, bits in other.bits.items()}
    manifest = other.publish(other.start(), "context")
    staged = subscriber.stage(Position(first.version, anchor), newest(subscriber))
    assert staged.manifest == manifest
    for name, part in read_staged(staged.path, other.table).items():
        before[name][part.indices] = part.new
    assert all(np.array_equal(before[name], other.bits[name]) for name in before)
