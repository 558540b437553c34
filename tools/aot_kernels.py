# SPDX-License-Identifier: Apache-2.0
"""What `tools/aot.py` compiles: every kernel as it is launched, and which of its accesses cannot be wide, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from delta_wire.kernels import (
    triton_digest,
    triton_extract,
    triton_levels,
    triton_pack,
    triton_rank,
    triton_scatter,
    triton_steps,
)
from delta_wire.kernels.segments import CODED, MEMBERS
from delta_wire.kernels.triton_common import KINDS

_THREADS = 128
_CHANGED = "only changed elements"
_LISTED = "elements anywhere in the tensor"
_ONE = "one value a program"
_ROW = "the row of the element's own segment or group"
_SHARED = "several elements share a word"
_OFF_BY_ONE = "the element before, one off the block"
_BISECTION = "a bisection of its own for each element"
_PER_WORD = "one word for 32 or 64 elements, less than one a thread"
_RANKED = "its place follows from a prefix sum"


@dataclass(frozen=True)
class Build:
    """One compilation.

    Attributes:
        kernel: the kernel.
        arguments: types of all arguments but the constants.
        constants: `tl.constexpr` arguments.
        block (`int`): elements of a block, spread over 128 threads.
        narrow: pointers whose accesses need not be wide, with the reason.
        derived: element bits of pointers that the kernel makes itself.
        multiples: integer arguments that are multiples of 16.
        variant (`str`): tells builds of one kernel apart.
    """

    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any]
    block: int
    narrow: dict[str, str] = field(default_factory=dict)
    derived: dict[str, int] = field(default_factory=dict)
    multiples: tuple[str, ...] = ()
    variant: str = ""

    @property
    def per_thread(self) -> int:
        return max(1, self.block // _THREADS)

    def element_bits(self, pointer: str) -> int:
        """Size of an element behind a pointer."""
        return self.derived.get(pointer) or int(self.arguments[pointer].lstrip("*iuf"))

    def pointers(self) -> set[str]:
        """Pointers that must be seen in the machine code under their own name."""
        return {name for name, kind in self.arguments.items() if kind.startswith("*") and name not in self.narrow}


def _extract() -> Iterator[Build]:
    block = triton_extract.BLOCK
    table = {"p_table": _ONE, "p_row": _ONE, "p_own": _ONE}
    for dtype, kind in KINDS.items():
        name = str(dtype).removeprefix("torch.")
        bits = 32 if kind == 0 else 16
        arguments = {"p_param": f"*i{bits}", "p_bits": "*i16", "num_elements": "i64"}
        yield Build(triton_extract.round_kernel, arguments, {"KIND": kind, "BLOCK": block}, block, variant=name)
        # how a tensor begins is the same question for every type
        for aligned in (True, False) if kind == 0 else (True,):
            constants = {"KIND": kind, "ALIGNED": aligned, "BLOCK": block}
            variant = name if aligned else f"{name} unaligned"
            unaligned = "a tensor that begins between two multiples of 16 bytes"
            yield Build(
                triton_extract.mark_kernel,
                {"p_table": "*i64", "p_row": "*i32", "p_words": "*i32", "p_counts": "*i32"},
                constants,
                block,
                table
                | {"p_counts": _ONE, "p_words": _PER_WORD}
                | ({} if aligned else {"p_param": unaligned, "p_snapshot": unaligned}),
                {"p_param": bits, "p_snapshot": 16},
                variant=variant,
            )
            yield Build(
                triton_extract.compact_kernel,
                {
                    "p_table": "*i64",
                    "p_row": "*i32",
                    "p_words": "*i32",
                    "p_ends": "*i64",
                    "p_indices": "*i32",
                    "p_old": "*i16",
                    "p_new": "*i16",
                },
                constants,
                block,
                table
                | {"p_words": _PER_WORD, "p_ends": _ONE}
                | dict.fromkeys(("p_param", "p_snapshot", "p_indices", "p_old", "p_new"), _CHANGED),
                variant=variant,
            )


def _digest() -> Iterator[Build]:
    block = triton_digest.BLOCK
    one = {"p_keys": _ONE, "p_lanes": _ONE}
    tail = {"p_keys": "*i64", "p_lanes": "*i64", "num_elements": "i64"}
    for index in ("i32", "i64"):
        arguments = {"p_indices": f"*{index}", "p_bits": "*i16"} | tail
        yield Build(triton_digest.sparse_kernel, arguments, {"BLOCK": block}, block, one, variant=index)
    yield Build(triton_digest.dense_kernel, {"p_bits": "*i16", "start": "i64"} | tail, {"BLOCK": block}, block, one)
    sizes = ("num_rows", "size_1", "size_2", "stride_0", "stride_1")
    steps = ("start", "step_0", "step_1", "step_2")
    arguments = {"p_bits": "*i16", "p_keys": "*i64", "p_lanes": "*i64"} | dict.fromkeys((*sizes, *steps), "i32")
    odd = {"p_rows": "a view whose rows begin anywhere or whose elements are apart"}
    for columns in (block, 128):
        tile = {"ROWS": block // columns, "COLUMNS": columns}
        # ones are compiled in: the stride of a row's elements, the size of an axis that a 2-D block does not have
        yield Build(
            triton_digest.strided_kernel,
            {name: kind for name, kind in arguments.items() if columns == 128 or name != "size_1"},
            {"stride_2": 1} | ({} if columns == 128 else {"size_1": 1}) | tile,
            block,
            one | {"p_bits": "through its rows"},
            {"p_rows": 16},
            ("size_2", "stride_0", "stride_1"),
            variant=f"{columns} columns",
        )
        yield Build(
            triton_digest.strided_kernel,
            arguments | {"stride_2": "i32"},
            tile,
            block,
            one | odd | {"p_bits": "through its rows"},
            variant=f"{columns} columns apart",
        )


def _scatter() -> Iterator[Build]:
    block = triton_scatter.BLOCK
    flat = {"p_flat": _LISTED}
    arguments = {"p_flat": "*i16", "p_positions": "*i64", "num_positions": "i64"}
    constants = {"BLOCK": block}
    yield Build(triton_scatter.gather_kernel, arguments | {"p_out": "*i16"}, constants, block, flat)
    arguments |= {"p_new": "*i16", "p_old": "*i16"}
    yield Build(triton_scatter.scatter_kernel, arguments, constants, block, flat)
    at = {"p_element": _LISTED}
    arguments_at = {"p_addresses": "*i64", "num_elements": "i64"}
    yield Build(triton_scatter.gather_at_kernel, arguments_at | {"p_out": "*i16"}, constants, block, at)
    compared = arguments_at | {"p_counts": "*i32"}
    at |= {"p_counts": _ONE, "p_count": _ONE}
    written = {"p_new": "*i16", "p_old": "*i16", "p_found": "*i16"}
    yield Build(triton_scatter.exchange_kernel, compared | written, constants, block, at)
    yield Build(triton_scatter.compare_kernel, compared | {"p_bits": "*i16"}, constants, block, at)
    for index in ("i32", "i64"):
        hashed = {"p_indices": f"*{index}", "p_keys": "*i64", "p_lanes": "*i64"}
        narrow = flat | {"p_keys": _ONE, "p_lanes": _ONE}
        yield Build(triton_scatter.swap_kernel, arguments | hashed, constants, block, narrow, variant=index)


def _pack() -> Iterator[Build]:
    block = triton_pack.BLOCK
    constants = {"BLOCK": block}
    segment = {"p_segment": "*i32", "p_table": "*i64"}
    row = {"p_table": _ROW, "p_row": _ROW}
    for index in ("i32", "i64"):
        coded = {"p_coded": f"*{index}", "num_coded": "i64"} | segment
        for direction, (source, out) in (("encode", (MEMBERS, CODED)), ("decode", (CODED, MEMBERS))):
            yield Build(
                triton_pack.complement_kernel,
                {"p_source": f"*{index}", "p_out": "*i64", "depth": "i32", "num_out": "i64"} | segment,
                constants | {"SOURCE": source, "OUT": out},
                block,
                row | {"p_source": _BISECTION, "p_list": _BISECTION},
                variant=f"{direction} {index}",
            )
        previous = row | {"p_before": _OFF_BY_ONE}
        yield Build(
            triton_pack.lengths_kernel, coded | {"p_lengths": "*i64"}, constants, block, previous, variant=index
        )
        yield Build(
            triton_pack.emit_kernel,
            coded | {"p_ends": "*i64", "p_low": "*i64", "p_high": "*i64"},
            constants,
            block,
            previous | dict.fromkeys(("p_low", "p_high", "p_word"), _SHARED),
            variant=index,
        )
    words = {"p_words": "*i64", "num_words": "i64"}
    yield Build(triton_pack.count_kernel, words | {"p_counts": "*i32"}, constants, block)
    yield Build(
        triton_pack.ones_kernel,
        words | {"p_sums": "*i64", "p_ones": "*i64", "num_ones": "i64"},
        {"BLOCK": block // 64},
        block // 64,
        {"p_ones": _RANKED, "p_words": _PER_WORD, "p_sums": _PER_WORD},
    )
    coded = {"num_coded": "i64", "p_bad": "*i32"} | segment
    yield Build(
        triton_pack.rebuild_kernel,
        coded | {"p_ones": "*i64", "p_low": "*i64", "p_lengths": "*i64"},
        constants,
        block,
        row | {"p_before": _OFF_BY_ONE, "p_low": _SHARED, "p_word": _SHARED, "p_bad": _ONE},
    )
    yield Build(
        triton_pack.place_kernel,
        coded | {"p_sums": "*i64", "p_coded": "*i64"},
        constants,
        block,
        row | {"p_before": _ROW, "p_bad": _ONE},
    )


def _steps() -> Iterator[Build]:
    block = triton_steps.BLOCK
    constants = {"BLOCK": block}
    row = {"p_table": _ROW, "p_row": _ROW}
    yield Build(
        triton_steps.steps_kernel,
        {
            "p_old": "*i16",
            "p_new": "*i16",
            "p_bounds": "*i64",
            "p_groups": "*i32",
            "p_magnitude": "*i32",
            "p_signs": "*i64",
            "p_tops": "*i64",
            "num_elements": "i64",
        },
        constants,
        block,
        {"p_bounds": _ONE, "p_groups": _ONE, "p_signs": _PER_WORD, "p_tops": _ONE, "p_row": _ONE},
    )
    yield Build(
        triton_steps.sign_kernel,
        {"p_step": "*i16", "p_raw": "*i64", "num_elements": "i64"},
        constants,
        block,
        {"p_raw": _PER_WORD},
    )
    yield Build(
        triton_steps.apply_kernel,
        {"p_old": "*i16", "p_step": "*i16", "p_new": "*i16", "num_elements": "i64"},
        constants,
        block,
    )
    group = {"p_group": "*i32", "p_table": "*i64", "p_levels": "*i64"}
    yield Build(
        triton_levels.split_kernel,
        group
        | {"p_magnitude": "*i32", "p_sums": "*i64", "p_next": "*i32", "p_raw": "*i64"}
        | {"level": "i32", "num_members": "i64"},
        constants,
        block,
        row | dict.fromkeys(("p_levels", "p_segment", "p_next"), _RANKED) | {"p_raw": _SHARED, "p_word": _SHARED},
    )
    yield Build(
        triton_levels.survive_kernel,
        group | {"p_list": "*i64", "p_next": "*i64", "num_survivors": "i64"},
        constants,
        block,
        row | dict.fromkeys(("p_list", "p_levels"), _RANKED),
    )
    yield Build(
        triton_levels.drop_kernel,
        group
        | {"p_list": "*i64", "p_raw": "*i64", "p_step": "*i16"}
        | {"level": "i32", "depth": "i32", "num_dropped": "i64"},
        constants,
        block,
        row
        | {"p_levels": _BISECTION, "p_segment": _BISECTION, "p_list": _BISECTION, "p_step": _LISTED}
        | {"p_raw": _SHARED, "p_word": _SHARED},
    )


def _rank() -> Iterator[Build]:
    block = triton_rank.BLOCK
    yield Build(
        triton_rank.histogram_kernel,
        {"p_bits": "*i16", "p_counts": "*i32", "num_elements": "i64"},
        {"BLOCK": block},
        block,
        {"p_counts": "256 counts, two a thread"},
    )
    few = "a few elements a program"
    for index in ("i32", "i64"):
        yield Build(
            triton_rank.rank_kernel,
            {
                "p_bits": "*i16",
                "p_before": "*i32",
                "p_indices": f"*{index}",
                "p_bounds": "*i64",
                "p_exponent": "*u8",
                "p_rank": "*i64",
                "num_elements": "i64",
            },
            {"BLOCK": block, "CHUNK": triton_rank.RANK_CHUNK},
            block,
            {"p_bounds": _ONE, "p_listed": _LISTED}
            | dict.fromkeys(("p_before", "p_indices", "p_exponent", "p_rank"), few),
            variant=index,
        )
    yield Build(
        triton_rank.select_kernel,
        {
            "p_bits": "*i16",
            "p_before": "*i32",
            "p_ranks": "*i64",
            "p_class": "*i32",
            "p_indices": "*i64",
            "num_elements": "i64",
            "blocks_per_slab": "i32",
            "depth": "i32",
            "num_ranks": "i64",
        },
        {"BLOCK": block, "CHUNK": triton_rank.SELECT_CHUNK},
        block,
        {"p_before": _BISECTION, "p_column": _BISECTION} | dict.fromkeys(("p_ranks", "p_class", "p_indices"), few),
        multiples=("num_elements",),
    )


BUILDS = (*_extract(), *_digest(), *_scatter(), *_pack(), *_steps(), *_rank())
