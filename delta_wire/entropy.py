# SPDX-License-Identifier: Apache-2.0
"""What a change must cost at least: binary entropy of the positions, order-0 entropy of the steps.

A step is the difference of two bit patterns on the monotone bf16 line, modulo 2^16 (docs/FORMAT.md).
"""

from __future__ import annotations

import numpy as np

from delta_wire.state import Delta, TensorDelta, TensorTable

# classes of a histogram: sizes of steps up to each bound
BOUNDS = (1, 2, 4, 8, 16, 64)
LABELS = ("1", "2", "3-4", "5-8", "9-16", "17-64", ">64")


def on_line(bits: np.ndarray) -> np.ndarray:
    """Places of uint16 bit patterns on the monotone line, uint16; its own inverse."""
    return (bits ^ np.where(bits & 0x8000, 0x7FFF, 0)).astype(np.uint16)


def steps_between(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Steps on the monotone line, int16 `[K]`, from old bits to new ones."""
    return (on_line(new) - on_line(old)).view(np.int16)


def steps_of(part: TensorDelta) -> np.ndarray | None:
    """Steps of a change, int16 `[K]`; `None` where it has neither old bits nor steps only."""
    if part.relative is not None and part.relative.all():
        return part.new.view(np.int16)
    if part.old is None or part.relative is not None:
        return None
    return steps_between(part.old, part.new)


def histogram(steps: np.ndarray) -> dict[str, int]:
    """How many steps there are of each size, by [`LABELS`]; steps of zero do not count."""
    sizes = np.abs(steps.astype(np.int32))
    counts = np.bincount(np.searchsorted(BOUNDS, sizes[sizes > 0]), minlength=len(LABELS))
    return dict(zip(LABELS, counts.tolist(), strict=True))


def position_bits(num_elements: np.ndarray, num_changed: np.ndarray) -> float:
    """Binary entropy of independent positions, in bits, over groups of `num_elements` with `num_changed` each."""
    inside = (num_changed > 0) & (num_changed < num_elements)
    n, k = num_elements[inside].astype(np.float64), num_changed[inside].astype(np.float64)
    p = k / n
    return float(-(n * (p * np.log2(p) + (1 - p) * np.log2(1 - p))).sum())


def order0_bits(values: np.ndarray) -> float:
    """Order-0 entropy of all values together, in bits."""
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts * np.log2(counts / values.size)).sum()) if values.size else 0.0


def floor_bytes(delta: Delta, table: TensorTable) -> float | None:
    """Fewest bytes that positions per tensor and steps can be coded in without side information.

    Args:
        delta (`Delta`): parts with old bits or with steps; elements that keep their bits do not count.
        table ([`~delta_wire.state.TensorTable`]): tensors of the model.

    Returns:
        `float`: bytes; `None` where some steps are not known.
    """
    steps = {name: steps_of(part) for name, part in delta.items()}
    known = [found[found != 0] for found in steps.values() if found is not None]
    if len(known) < len(delta):
        return None
    k = np.array([found.size for found in known])
    n = np.array([table[name].num_elements for name in delta])
    return (position_bits(n, k) + order0_bits(np.concatenate([np.empty(0, np.int16), *known]))) / 8
