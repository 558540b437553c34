# SPDX-License-Identifier: Apache-2.0
"""Every kernel on this GPU: first whether it does what the CPU form does, then how fast, beside a plain copy.

    python benchmarks/gpu.py [--elements N]

Prints one JSON object, or "no GPU" where there is none. `vs_copy` is the bytes that a primitive reads and writes over
its time, over the same of a copy on the device; both include what the host does. Takes about two minutes and 8 bytes
of GPU memory per element for the largest input, 1 GiB by default. Exits with 1 if a result differs from the CPU's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from delta_wire import kernels
from delta_wire.machine import measured

KEYS = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
SLAB = 1 << 20
# of the elements, what a step changes
_DENSITY = 0.01
_REPEATS = 20
_CASE_LIMIT_S = 10.0
# as many as a dense model of 30 layers has
_TENSORS = 272


@dataclass
class Case:
    """One primitive at one size.

    Attributes:
        name (`str`): primitive and variant.
        tensors: what moves to the device.
        run: from the tensors to everything that it returns or writes.
        moved_bytes (`int`): bytes read and written.
        elements (`int`): elements of the input.
        rewind: undoes what `run` did to the tensors, outside of the measured time.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    run: Callable[[dict[str, torch.Tensor]], Any]
    moved_bytes: int
    elements: int
    rewind: Callable[[dict[str, torch.Tensor]], object] = field(default=lambda tensors: None)


def random_bits(size: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-32768, 32768, (size,), dtype=torch.int16, device=device)


def listed(size: int, device: torch.device) -> torch.Tensor:
    """Ascending indices of the elements that changed, a few at least."""
    chosen = torch.rand(size, device=device) < _DENSITY
    chosen[: min(size, 3)] = True
    return chosen.nonzero().reshape(-1)


def extract_cases(size: int, device: torch.device) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        width = torch.empty(0, dtype=dtype).element_size()
        before = torch.randn(size, device=device).to(dtype)
        indices = listed(size, device)
        param = before.clone()
        param[indices] *= -1
        snapshot = kernels.round_bits(before)
        old = snapshot[indices]
        name = str(dtype).removeprefix("torch.")
        yield Case(f"round_bits {name}", {"p": param}, lambda t: kernels.round_bits(t["p"]), (width + 2) * size, size)
        yield Case(
            f"extract {name}",
            {"p": param, "s": snapshot, "i": indices, "o": old},
            lambda t: (kernels.extract(t["p"], t["s"]), t["s"]),
            (width + 2) * size + (width + 12) * indices.numel(),
            size,
            lambda t: t["s"].index_copy_(0, t["i"], t["o"]),
        )


def digest_cases(size: int, device: torch.device) -> Iterator[Case]:
    bits = random_bits(size // 4 * 4, device)
    yield Case("digest_dense", {"b": bits}, lambda t: kernels.digest_dense(t["b"], KEYS), 2 * bits.numel(), size)
    columns = max(1, min(4096, size // 4))
    yield Case(
        "digest_dense strided",
        {"b": bits[: size // columns * columns].reshape(-1, columns)},
        lambda t: kernels.digest_dense(t["b"][:, : columns // 2], KEYS, steps=(columns // 2, 1)),
        size // columns * columns,
        size,
    )
    indices = listed(size, device)
    new = random_bits(indices.numel(), device)
    for index in (torch.int32, torch.int64):
        yield Case(
            f"digest_sparse {str(index).removeprefix('torch.')}",
            {"i": indices.to(index), "b": new},
            lambda t: kernels.digest_sparse(t["i"], t["b"], KEYS),
            (index.itemsize + 2) * new.numel(),
            size,
        )


def scatter_cases(size: int, device: torch.device) -> Iterator[Case]:
    positions = listed(size, device)
    tensors = {
        "f": random_bits(size, device),
        "p": positions,
        "n": random_bits(positions.numel(), device),
        "i": positions.to(torch.int32),
    }
    count = positions.numel()
    yield Case("gather", tensors, lambda t: kernels.gather(t["f"], t["p"]), 12 * count, size)
    yield Case("scatter", tensors, lambda t: (kernels.scatter(t["f"], t["p"], t["n"]), t["f"]), 16 * count, size)
    yield Case(
        "swap",
        tensors,
        lambda t: (kernels.swap(t["f"], t["p"], t["n"], t["i"], KEYS), t["f"]),
        22 * count,
        size,
    )


def changes_of(tensors: dict[str, torch.Tensor]) -> list[kernels.Change]:
    """The listed elements of `f` become `n`, as changes of up to `_TENSORS` tensors."""
    flat, positions = tensors["f"], tensors["p"].cpu().numpy()
    values = tensors["n"].cpu().numpy().view(np.uint16)
    width = -(-flat.numel() // _TENSORS)
    items = []
    for start in range(0, flat.numel(), width):
        first, last = np.searchsorted(positions, (start, start + width))
        own = positions[first:last]
        items.append(
            kernels.Change(flat[start : start + width], own - start, values[first:last], indices=own, keys=KEYS)
        )
    return items


def replacement_cases(size: int, device: torch.device) -> Iterator[Case]:
    """A commit to many tensors, prepared once and outside of the measured time."""
    positions = listed(size, device)
    tensors = {"f": random_bits(size, device), "p": positions, "n": random_bits(positions.numel(), device)}
    prepared: dict[int, kernels.Replacements] = {}

    def changes(t: dict[str, torch.Tensor]) -> kernels.Replacements:
        if t["f"].data_ptr() not in prepared:
            prepared[t["f"].data_ptr()] = kernels.replacements(changes_of(t))
        return prepared[t["f"].data_ptr()]

    yield Case(
        "replacements",
        tensors,
        lambda t: (changes(t).lanes, list(changes(t).run()), t["f"]),
        30 * positions.numel(),
        size,
        lambda t: changes(t).undo(),
    )


def coding_cases(size: int, device: torch.device) -> Iterator[Case]:
    few = listed(size, device)
    # one segment of many holes, one of few
    half = size // 2
    members = torch.ones(half, dtype=torch.bool, device=device)
    members[few[few < half]] = False
    many = members.nonzero().reshape(-1)
    for name, positions, universe in (("sparse", few, size), ("holes", many, half)):
        n, count = np.array([universe]), np.array([positions.numel()])
        low, high = kernels.rice_encode(positions, n, count)
        moved = 8 * (positions.numel() + low.numel() + high.numel())
        yield Case(
            f"rice_encode {name}",
            {"p": positions},
            lambda t, n=n, count=count: kernels.rice_encode(t["p"], n, count),
            moved,
            universe,
        )
        yield Case(
            f"rice_decode {name}",
            {"l": low, "h": high},
            lambda t, n=n, count=count: kernels.rice_decode(t["l"], t["h"], n, count),
            moved,
            universe,
        )
    old = random_bits(few.numel(), device)
    step = torch.where(torch.rand(old.numel(), device=device) < 0.87, 1, 1 - 2 * (old.int() & 1023)).to(torch.int16)
    new = kernels.apply_steps(old, step)
    group = np.array([old.numel()])
    counts, levels, raw = kernels.encode_steps(old, new, group)
    moved = 4 * old.numel() + 8 * (levels.numel() + raw.numel())
    yield Case(
        "encode_steps", {"o": old, "n": new}, lambda t: kernels.encode_steps(t["o"], t["n"], group), moved, size
    )
    yield Case(
        "decode_steps",
        {"l": levels, "r": raw},
        lambda t: kernels.decode_steps(t["l"], group, counts, t["r"]),
        moved,
        size,
    )
    yield Case(
        "apply_steps", {"o": old, "s": step}, lambda t: kernels.apply_steps(t["o"], t["s"]), 6 * old.numel(), size
    )


def rank_cases(size: int, device: torch.device) -> Iterator[Case]:
    bits = (torch.randn(size, device=device) * 0.02).to(torch.bfloat16).view(torch.int16)
    indices = listed(size, device)
    exponent, rank = kernels.class_ranks(bits, indices, SLAB)
    own = indices // SLAB * 256 + exponent
    order = torch.argsort(own, stable=True)
    changed = torch.bincount(own, minlength=-(-size // SLAB) * 256).reshape(-1, 256)
    yield Case("class_counts", {"b": bits}, lambda t: kernels.class_counts(t["b"], SLAB), 2 * size, size)
    moved = 2 * size + 17 * indices.numel()
    tensors = {"b": bits, "i": indices}
    yield Case("class_ranks", tensors, lambda t: kernels.class_ranks(t["b"], t["i"], SLAB), moved, size)
    yield Case(
        "class_select",
        {"b": bits, "r": rank[order], "c": changed},
        lambda t: kernels.class_select(t["b"], t["r"], t["c"], SLAB),
        2 * size + 24 * indices.numel(),
        size,
    )


def all_cases(size: int, device: torch.device) -> Iterator[Case]:
    families = (extract_cases, digest_cases, scatter_cases, replacement_cases, coding_cases, rank_cases)
    for family in families:
        yield from family(size, device)


def flatten(result: Any) -> list[torch.Tensor]:
    """All values that a case returned, on the CPU."""
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in flatten(part)]
    return [torch.as_tensor(result, dtype=torch.uint64 if isinstance(result, int) and result >= 0 else None).cpu()]


def to_device(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies on a device."""
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def differences(size: int, device: torch.device) -> list[str]:
    """Cases whose results on the device are not those of the CPU, bit for bit."""
    wrong = []
    for case in all_cases(size, torch.device("cpu")):
        on_gpu = to_device(case.tensors, device)
        expected = flatten(case.run({name: tensor.clone() for name, tensor in case.tensors.items()}))
        found = flatten(case.run(on_gpu))
        if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
            wrong.append(f"{case.name}, {size} elements")
    return wrong


def seconds(run: Callable[[], object], rewind: Callable[[], object] = lambda: None) -> float:
    """Median time between two events on the device."""
    durations = []
    begun = time.monotonic()
    for attempt in range(_REPEATS + 2):
        rewind()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        # the first ones compile
        if attempt >= 2:
            durations.append(start.elapsed_time(end) / 1000)
            if time.monotonic() - begun > _CASE_LIMIT_S:
                break
    return statistics.median(durations)


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes that a copy of half a GiB reads and writes in a second."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 27, help="size of the timed inputs")
    parser.add_argument("--json", action="store_true", help="print the result on one line")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU")
        return 0

    device = torch.device("cuda")
    torch.manual_seed(0)
    wrong = [name for size in (1, 2047, 2048, 2049, (1 << 21) + 7) for name in differences(size, device)]
    copy_rate = copy_bytes_per_s(device)
    rows = []
    for case in all_cases(options.elements, device) if not wrong else []:
        tensors = case.tensors
        time_s = seconds(lambda: case.run(tensors), lambda: case.rewind(tensors))  # noqa: B023 - called at once
        rate = case.moved_bytes / time_s
        rows.append(
            {
                "name": case.name,
                "elements": case.elements,
                "moved_bytes": case.moved_bytes,
                "time_s": time_s,
                "bytes_per_s": rate,
                "copy_bytes_per_s": copy_rate,
                "vs_copy": rate / copy_rate,
            }
        )
    report = {
        "gpu": torch.cuda.get_device_name(device),
        "wrong": wrong,
        "kernels": rows,
        "measured": measured(),
    }
    print(json.dumps(report, indent=None if options.json else 2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
