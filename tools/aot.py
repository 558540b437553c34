# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel for GPUs that are not here, and look at what came out.

    python tools/aot.py [--targets 80,90,100] [--kernel NAME]

Prints one JSON object: for each kernel, variant and target the registers of a thread, spills (loads and stores of
local memory in the machine code), shared memory, and for each pointer how wide its global accesses are. Exits with 1
on a spill, and on an access narrower than a thread's share of its block allows (16 bytes at most). Exempt are the
masked accesses of a last block and what `tools/aot_kernels.py` declares as inherently narrow, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import triton
from aot_kernels import BUILDS, Build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from delta_wire.kernels import triton_common

_WARP = 32
_WARPS = 4
_FULL_BITS = 128
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_FOLDER = Path(inspect.getfile(triton_common)).parent
# the comment that the compiler leaves: file:line:column, innermost first
_PLACE = re.compile(r"([\w.]+\.py):(\d+)(?::(\d+))?")
_ACCESS = re.compile(r"\b(ld|st|atom|red)\b[\w.]*\.global[\w.:]*?(?:\.v(\d))?\.[bsuf](\d+)\b")
_MEMORY_CALLS = ("load", "store", "load_block", "store_block", "atomic_or", "atomic_add")
_LAST_BLOCK = "# last block"


class UnknownAccessError(Exception):
    """A global access whose place in the source does not tell its pointer."""


@functools.cache
def _source(file: str) -> tuple[list[str], list[tuple[ast.Call, str]]]:
    """Lines of a module, and its memory accesses with the pointers' names."""
    text = (_FOLDER / file).read_text(encoding="utf-8")
    calls = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = [part.id for part in ast.walk(node.args[0]) if isinstance(part, ast.Name)]
            pointers = [name for name in names if name.startswith("p_")]
            if name in _MEMORY_CALLS and pointers:
                calls.append((node, pointers[0]))
    return text.splitlines(), calls


def _pointer(place: str) -> tuple[str, bool]:
    """The pointer accessed at a place, and whether it is a last block's access."""
    frames = [(file, int(line), int(column or 0)) for file, line, column in _PLACE.findall(place)]
    last_block = False
    for file, line, column in frames:
        if not (_FOLDER / file).exists():
            # the compiler's own library
            continue
        lines, calls = _source(file)
        last_block |= _LAST_BLOCK in lines[line - 1]
        around = [
            (node.lineno, node.col_offset, pointer)
            for node, pointer in calls
            if (node.lineno, node.col_offset) <= (line, column)
            and (line, column) <= (node.end_lineno or 0, node.end_col_offset or 0)
        ]
        # a helper's own name for a block says nothing; its caller's does
        if around and (pointer := max(around)[2]) != "p_block":
            return pointer, last_block
    raise UnknownAccessError(place)


def _accesses(ptx: str) -> Counter[tuple[str, str, int, bool]]:
    """Number of accesses by pointer, instruction, bits and whether they are a last block's."""
    found: Counter[tuple[str, str, int, bool]] = Counter()
    place = ""
    for line in ptx.splitlines():
        if line.lstrip().startswith(".loc"):
            place = line.partition("//")[2]
        elif match := _ACCESS.search(line):
            pointer, last_block = _pointer(place)
            found[pointer, match[1], int(match[2] or 1) * int(match[3]), last_block] += 1
    return found


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers, spills and shared memory from the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "-res-usage", str(path))
        # without a stack there is nowhere to spill to
        code = "" if "STACK:0 " in usage and "LOCAL:0 " in usage else _run("nvdisasm", "-c", str(path))
    spills = re.findall(r"\b(?:STL|LDL)\b", code)
    registers = re.search(r"REG:(\d+)", usage)
    shared = re.search(r"SHARED:(\d+)", usage)
    if registers is None or shared is None:
        raise RuntimeError(f"cuobjdump tells no resources: {usage}")
    return {"registers": int(registers[1]), "spills": len(spills), "shared_bytes": int(shared[1])}


def _run(tool: str, *args: str) -> str:
    return subprocess.run([str(_TOOLS / tool), *args], check=True, capture_output=True, text=True).stdout


def inspect_build(build: Build, target: int) -> dict:
    """Compile one kernel for one target and describe it; `problems` lists what is not as it should be."""
    signature = {name: build.arguments.get(name, "constexpr") for name in build.kernel.arg_names}
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(build.kernel.arg_names)
        if name in build.arguments and (build.arguments[name].startswith("*") or name in build.multiples)
    }
    compiled = triton.compile(
        ASTSource(build.kernel, signature, build.constants, attributes),
        target=GPUTarget("cuda", target, _WARP),
        options={"num_warps": _WARPS},
    )
    report: dict = {"kernel": build.kernel.__name__, "variant": build.variant, "target": f"sm_{target}"}
    report |= _resources(compiled.asm["cubin"])
    report["shared_bytes"] = max(report["shared_bytes"], compiled.metadata.shared)
    report["accesses"], problems = [], []
    if report["spills"]:
        problems.append(f"{report['spills']} spills")
    accesses = _accesses(compiled.asm["ptx"])
    for (pointer, instruction, bits, last_block), count in sorted(accesses.items()):
        reason = "last block" if last_block else build.narrow.get(pointer)
        possible = min(_FULL_BITS, build.element_bits(pointer) * build.per_thread) if reason is None else 0
        entry = {"pointer": pointer, "instruction": instruction, "bits": bits, "count": count}
        report["accesses"].append(entry | ({"exempt": reason} if reason else {}))
        if bits < possible:
            problems.append(f"{pointer}: {count} × {instruction} of {bits} bits where {possible} are possible")
    wide = {pointer for pointer, _, bits, last_block in accesses if not last_block}
    problems += [f"{pointer}: not accessed" for pointer in sorted(build.pointers() - wide)]
    return report | {"problems": problems}


def _inspect(at: int, target: int) -> dict:
    # kernels cannot be pickled, their numbers can
    return inspect_build(BUILDS[at], target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="80,90,100", help="compute capabilities times ten")
    parser.add_argument("--kernel", help="only this one")
    args = parser.parse_args()
    builds = [at for at, build in enumerate(BUILDS) if args.kernel in (None, build.kernel.__name__)]
    targets = [int(target) for target in args.targets.split(",")]
    # compiling holds the interpreter lock
    with ProcessPoolExecutor() as pool:
        kernels = list(pool.map(_inspect, *zip(*product(builds, targets), strict=True)))
    failed = [entry for entry in kernels if entry["problems"]]
    print(json.dumps({"triton": triton.__version__, "kernels": kernels, "failed": len(failed)}, indent=1))
    for entry in failed:
        print(f"{entry['kernel']} {entry['variant']} {entry['target']}: {entry['problems']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
