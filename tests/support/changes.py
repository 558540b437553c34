# SPDX-License-Identifier: Apache-2.0
"""Changes of storages, and what every form of carrying them out must do with them."""

import numpy as np
import torch

from delta_wire import kernels
from delta_wire.kernels import reference


def changes_of(sizes: tuple[int, ...], counts: tuple[int, ...], steps: bool) -> list[kernels.Change]:
    """Random changes of random storages; bits and steps in turn if there are steps, the first without a digest."""
    random = np.random.default_rng(0)
    items = []
    for at, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        flat = torch.randint(-32768, 32768, (size,), dtype=torch.int16)
        values = random.integers(0, 1 << 16, count).astype(np.uint16)
        relative = random.integers(0, 2, count).astype(bool) if steps and at % 2 == 0 else None
        indices = np.sort(random.choice(1 << 40, count)) if at else None
        items.append(
            kernels.Change(flat, random.permutation(size)[:count], values, relative, indices, (at, ~at % 2**64))
        )
    return items


def expected_of(item: kernels.Change) -> tuple[torch.Tensor, tuple[int, int]]:
    """The storage after a change, and what that adds to the digest, by the references."""
    positions = torch.from_numpy(item.positions)
    old, new = item.flat[positions], torch.from_numpy(item.values.view(np.int16))
    if item.relative is not None:
        moved = kernels.apply_steps(old, new)
        new = torch.where(torch.from_numpy(item.relative), moved, new)
    lanes = (0, 0)
    if item.indices is not None:
        listed = torch.from_numpy(item.indices)
        before, after = (reference.digest_sparse(listed, bits, item.keys) for bits in (old, new))
        lanes = tuple((b - a) % 2**64 for a, b in zip(before, after, strict=True))
    return item.flat.index_put((positions,), new), lanes  # type: ignore[return-value]


def check_changes(items: list[kernels.Change]) -> None:
    """Prepare, write, count what somebody else has written, take back. The second has more than 4000 elements."""
    wanted, lanes = zip(*map(expected_of, items), strict=True)
    changes = kernels.replacements(items)
    assert changes.lanes == list(lanes)
    foreign = items[1].positions[[0, 4000]]
    items[1].flat[foreign] ^= 1
    before = [item.flat.clone() for item in items]
    assert changes.run() == {1: (2, 0)}
    assert all(torch.equal(item.flat, after) for item, after in zip(items, wanted, strict=True))
    # what somebody else has written is there again, too
    assert changes.undo()
    assert all(torch.equal(item.flat, bits) for item, bits in zip(items, before, strict=True))
