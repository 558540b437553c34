# SPDX-License-Identifier: Apache-2.0
"""Two states, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from delta_wire.checkpoint import Checkpoint
from delta_wire.entropy import histogram, steps_between


def compare(first: Checkpoint, second: Checkpoint) -> Iterator[dict[str, Any]]:
    """For every tensor in name order `name`, `elements`, `changed` and a histogram of the `steps` between both.

    Args:
        first, second ([`~delta_wire.checkpoint.Checkpoint`]): with the same tensors.
    """
    for name in first.table():
        old, new = first.bits(name).reshape(-1), second.bits(name).reshape(-1)
        places = np.flatnonzero(old != new)
        steps = steps_between(old[places], new[places])
        yield {"name": name, "elements": old.size, "changed": places.size, "steps": histogram(steps)}
