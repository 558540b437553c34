# SPDX-License-Identifier: Apache-2.0
"""Two trainers on one bucket whose store has no conditional writes: each is told, and no reader follows a fork."""

from pathlib import Path

import pytest

from delta_wire.bucket import BucketReader
from delta_wire.errors import FormatError, ObjectExistsError, WriterConflictError
from delta_wire.manifest import POINTER_KEY, manifest_key
from delta_wire.stores.memory import MemoryStore


class Unconditional(MemoryStore):
    """As a hub does it: what exists is refused, but between looking and writing somebody else may write."""

    create_only = False

    def __init__(self, name):
        super().__init__(name)
        self.before_put = lambda key: None

    def put(self, key, data: bytes | Path, *, create_only=False):
        if create_only and self.exists(key):
            raise ObjectExistsError(f"{self.url}/{key}: the object exists already")
        self.before_put(key)
        super().put(key, data)


def told(run) -> bool:
    """Whether a trainer learns of the other one by its next publication."""
    try:
        run.publish()
    except WriterConflictError as error:
        assert "another trainer" in str(error) or f"{POINTER_KEY} names" in str(error)
        return True
    return False


# what the second trainer is about to write when the first one publishes; `None`: only when it is done
@pytest.mark.parametrize("moment", [manifest_key(2), POINTER_KEY, None])
def test_each_is_told_within_one_publication(base, tools, moment):
    store = Unconditional(f"two-writers-{moment}".replace("/", "-"))
    first = tools.Run(store, base)
    first.publish()
    second = tools.Run.__new__(tools.Run)
    second.__dict__.update(first.__dict__, store=Unconditional(store.name), seed=5000)
    second.bits = {name: array.copy() for name, array in first.bits.items()}
    second.writer = second.start()
    served = first.writer.version
    first_told = []

    def meanwhile(key):
        if key == moment and not first_told:
            first_told.append(told(first))

    second.store.before_put = meanwhile
    second_told = told(second)
    # whoever does not know yet learns it by the next publication
    first_knows = (bool(first_told) and first_told[0]) or told(first)
    second_knows = second_told or told(second)
    reader = BucketReader(MemoryStore(store.name))
    try:
        epochs = [manifest.version.epoch for manifest in reader.walk(reader.latest())]
    except FormatError as error:
        # a manifest that is not the one the pointer names is refused, not followed; then nobody goes on
        assert "the manifest was replaced" in str(error)
        assert first_knows and second_knows
    else:
        assert first_knows, "the one that was there before ends"
        assert epochs == sorted(epochs, reverse=True) and served.epoch in epochs
    store.drop()
