# SPDX-License-Identifier: Apache-2.0
"""Weight updates to measure on: recorded ones from trace files, synthetic ones in steady state, and their floors.

A trace is a safetensors file with `old.<name>` (bf16), `index.<name>` (int32) and `new.<name>` (bf16).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from delta_wire import entropy
from delta_wire.container import TensorFile
from delta_wire.kernels import cpu_steps
from delta_wire.state import Delta, TensorDelta, TensorSpec, TensorTable


@dataclass(frozen=True)
class Update:
    """A delta and the whole old weights that it applies to (uint16 patterns, flat, by name)."""

    name: str
    table: TensorTable
    old: dict[str, np.ndarray]
    delta: Delta

    @property
    def num_changed(self) -> int:
        return sum(part.num_changed for part in self.delta.values())


def load(path: Path) -> Update:
    """Read a trace file."""
    file = TensorFile(path, str(path))
    names = [name.removeprefix("old.") for name in file.names() if name.startswith("old.")]
    table = TensorTable(TensorSpec(name, file.spec(f"old.{name}")[1]) for name in names)
    old = {name: file.array(f"old.{name}").reshape(-1).copy() for name in names}
    delta = {}
    for name in names:
        indices, new = file.array(f"index.{name}").copy(), file.array(f"new.{name}").copy()
        if indices.size:
            delta[name] = TensorDelta(name, indices, new, old[name][indices])
    return Update(path.name, table, old, delta)


def round_f32(values: np.ndarray) -> np.ndarray:
    """bf16 patterns of float32 values."""
    wide = values.view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def synthetic(num_params: int, std: float, density: float, seed: int, num_tensors: int = 8) -> Update:
    """An update in steady state: float32 masters uniform inside their bf16 rounding cells, Gaussian steps of one size.

    Args:
        num_params (`int`): elements of all tensors.
        std (`float`): of the weights.
        density (`float`): share of elements that change; the step's size is found by bisection.
    """
    rng = np.random.default_rng(seed)
    size = num_params // num_tensors
    masters, old, noise = {}, {}, {}
    for i in range(num_tensors):
        name = f"layers.{i}.weight"
        old[name] = round_f32(rng.standard_normal(size, dtype=np.float32) * np.float32(std))
        # anywhere in the cell: the lower half of the float32 pattern is uniform around the bf16 value
        wide = (old[name].astype(np.uint32) << 16) + rng.integers(-0x7FFF, 0x7FFF, size, dtype=np.int64).astype(
            np.uint32
        )
        masters[name] = wide.view(np.float32)
        noise[name] = rng.standard_normal(size, dtype=np.float32)
    sample = next(iter(old))
    low, high = 1e-12, 1e3
    for _ in range(60):
        scale = np.sqrt(low * high)
        changed = np.mean(round_f32(masters[sample] + np.float32(scale) * noise[sample]) != old[sample])
        low, high = (scale, high) if changed < density else (low, scale)
    delta = {}
    for name in old:
        new = round_f32(masters[name] + np.float32(scale) * noise[name])
        indices = np.nonzero(new != old[name])[0].astype(np.int32)
        if indices.size:
            delta[name] = TensorDelta(name, indices, new[indices], old[name][indices])
    table = TensorTable(TensorSpec(name, (size,)) for name in old)
    return Update(f"std {std:g}, density {density:g}", table, old, delta)


def steps(part: TensorDelta) -> np.ndarray:
    """Steps on the monotone bf16 line, modulo 2^16; checked against the product's own form."""
    found = entropy.steps_of(part)
    assert part.old is not None and found is not None
    step = found.view(np.uint16)
    again = np.empty_like(step)
    cpu_steps.apply_steps(part.old, step, again)
    assert np.array_equal(again, part.new)
    return step


def floor_bytes(update: Update) -> float:
    """Binary entropy of the positions per tensor plus order-0 entropy of the step."""
    found = entropy.floor_bytes(update.delta, update.table)
    assert found is not None
    return found


def context_floor_bytes(update: Update) -> float:
    """As [`floor_bytes`], both given the exponent of the old value."""
    positions = 0.0
    by_exponent: dict[int, list[np.ndarray]] = {}
    for name, part in update.delta.items():
        exponent = (update.old[name] >> 7) & 0xFF
        changed = exponent[part.indices]
        positions += entropy.position_bits(np.bincount(exponent, minlength=256), np.bincount(changed, minlength=256))
        step = steps(part)
        for value in np.unique(changed):
            by_exponent.setdefault(int(value), []).append(step[changed == value])
    return (positions + sum(entropy.order0_bits(np.concatenate(parts)) for parts in by_exponent.values())) / 8
