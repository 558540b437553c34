# SPDX-License-Identifier: Apache-2.0
"""How fast changed weights are found on this CPU: ours, the published detector, and a plain copy of the same bytes.

    python benchmarks/extract.py --json

The published detector clones the weights as bf16 before the step, compares after it, and gathers with nonzero. Takes
about a minute and 12 GB of memory; `--sizes 135M` leaves the large model out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from delta_wire import kernels
from delta_wire.machine import measured

SIZES = {"135M": 134_515_008, "1B": 1_000_000_000}
_DENSITY = 0.0047


def timed(run: Callable[[], object], repeats: int, prepare: Callable[[], None] = lambda: None) -> float:
    """Median seconds; what `run` returns is dropped inside the measured time, as a caller would sooner or later."""
    durations = []
    for _ in range(repeats):
        prepare()
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def blog_clone(params: torch.Tensor) -> torch.Tensor:
    return params.to(torch.bfloat16).clone()


def blog_compare(before: torch.Tensor, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    after = params.to(torch.bfloat16)
    indices = (before != after).nonzero().squeeze(-1)
    return indices.to(torch.int32), after[indices]


def measure(num_params: int, repeats: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(num_params, generator=generator)
    published = kernels.round_bits(before)
    params = before
    # three quarters of one ulp up: nearly every chosen element moves to another bf16 value
    chosen = torch.rand(num_params, generator=generator) < _DENSITY
    snapshot_before = blog_clone(before)
    params[chosen] *= 1 + 0.75 / 128
    del chosen

    snapshot = published.clone()
    indices, old, new = kernels.extract(params, snapshot)
    expected_indices, expected_new = blog_compare(snapshot_before, params)
    assert torch.equal(indices, expected_indices)
    assert torch.equal(new, expected_new.view(torch.int16))
    assert torch.equal(old, published[indices.long()])
    assert torch.equal(snapshot, kernels.round_bits(params))
    del expected_indices, expected_new

    positions = indices.long()

    def rewind() -> None:
        snapshot[positions] = old

    # in turn, so that a slow phase of the machine meets all three
    ours, blog, copy = [], [], []
    target = torch.empty_like(params)
    for _ in range(repeats):
        ours.append(timed(lambda: kernels.extract(params, snapshot), 1, rewind))
        blog.append(timed(lambda: (blog_clone(params), blog_compare(snapshot_before, params)), 1))
        copy.append(timed(lambda: target.copy_(params), 1))
    ours_s, blog_s, copy_s = (statistics.median(values) for values in (ours, blog, copy))
    # each element is read as float32 and its snapshot as 16 bits; every change writes an index and three patterns
    moved_bytes = 6 * num_params + 10 * indices.numel()
    return {
        "ours_s": ours_s,
        "blog_s": blog_s,
        "copy_s": copy_s,
        "speedup_vs_blog": blog_s / ours_s,
        "bandwidth_vs_copy": (moved_bytes / ours_s) / (8 * num_params / copy_s),
        "changed": indices.numel(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    kernels.warm_up()
    results = {size: measure(SIZES[size], options.repeats) for size in options.sizes}
    if options.json:
        print(json.dumps({**results, "measured": measured()}))
        return
    for size, row in results.items():
        print(
            f"{size:>5}: ours {row['ours_s'] * 1e3:.0f} ms, published detector {row['blog_s'] * 1e3:.0f} ms "
            f"({row['speedup_vs_blog']:.1f}×), copy {row['copy_s'] * 1e3:.0f} ms "
            f"({row['bandwidth_vs_copy']:.2f} of its bandwidth), {row['changed']:,} changed"
        )


if __name__ == "__main__":
    main()
