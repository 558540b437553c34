# SPDX-License-Identifier: Apache-2.0
"""What a delta costs on the wire: every encoding against its entropy floor and against what others send.

    python benchmarks/payload.py --trace FILE… [--sweep] --json

A trace is a safetensors file with `old.<name>`, `index.<name>` and `new.<name>`; `--sweep` adds synthetic updates in
steady state at densities from 0.01 % to 60 %. Every encoding is decoded and compared before it is reported. Sizes are
those of complete files, headers included; times are those of the coding in memory, for `plain`, which is hardly more
than a file, those of writing and reading it. `floor_ratio` is the file against the floor: binary entropy of the
positions per tensor plus order-0 entropy of the step, for `context` both given the exponent of the old value.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from traces import Update, context_floor_bytes, floor_bytes, load, steps, synthetic

from delta_wire import encodings
from delta_wire.encodings import context, packed
from delta_wire.encodings.streams import Streams
from delta_wire.machine import measured
from delta_wire.state import TensorDelta, TensorSpec, TensorTable, resolve

DENSITIES = [0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6]
STDS = [0.02, 0.2]
PROJECTIONS = ("down_proj.weight", "gate_proj.weight", "up_proj.weight")
_MIN_CHANGED = 20_000
_SWEEP_PARAMS = 1 << 22


def best(run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Shortest of several runs, and the last result."""
    durations, result = [], None
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        durations.append(time.perf_counter() - start)
    return min(durations), result


def check_same(update: Update, decoded: dict[str, TensorDelta]) -> None:
    """The decoded delta must move the old weights to the same bits at the same places."""
    assert decoded.keys() == update.delta.keys()
    for name, part in update.delta.items():
        found = resolve(decoded[name], update.old[name][decoded[name].indices])
        if found.num_changed == part.num_changed:
            assert np.array_equal(found.indices, part.indices) and np.array_equal(found.new, part.new), name
            continue
        # a tensor stored whole lists elements that did not change
        expected = update.old[name].copy()
        expected[part.indices] = part.new
        assert np.array_equal(found.new, expected[found.indices]), name


def measure_encoding(update: Update, name: str, folder: Path, floor: float, repeats: int) -> dict[str, Any]:
    encoding = encodings.get(name)
    path = folder / f"{name}.safetensors"
    old_bits = update.old.__getitem__
    encode_s, _ = best(lambda: encoding.encode(update.delta, update.table, path, 1, old_bits), repeats)
    decode_s, decoded = best(lambda: encoding.decode(path, update.table, str(path), old_bits), repeats)
    check_same(update, decoded)
    total_bytes = path.stat().st_size
    if name != "plain":
        # the coding alone, as for the others
        code = packed if name == "packed" else context
        extra = () if name == "packed" else (old_bits,)
        encode_s, blobs = best(lambda: code.encode(update.delta, update.table, *extra), repeats)
        decode_s, _ = best(lambda: code.decode(blobs, update.table, name, *extra), repeats)
    return {
        "bytes_per_changed": total_bytes / update.num_changed,
        "total_bytes": total_bytes,
        "floor_ratio": total_bytes / floor,
        "dense_ratio": total_bytes / update.table.full_bytes,
        "encode_s": encode_s,
        "decode_s": decode_s,
    }


def measure_zstd_raw(update: Update, repeats: int) -> dict[str, Any]:
    """zstd level 1 over each tensor's raw indices and values."""
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    arrays = [array for part in update.delta.values() for array in (part.indices, part.new)]
    encode_s, blobs = best(lambda: [compressor.compress(array) for array in arrays], repeats)
    decode_s, decoded = best(lambda: [decompressor.decompress(blob) for blob in blobs], repeats)
    assert all(array.tobytes() == raw for array, raw in zip(arrays, decoded, strict=True))
    return _other(update, sum(len(blob) for blob in blobs), encode_s, decode_s)


def xor_planes(update: Update) -> int:
    """Bytes of gaps and XORed values in byte planes, each compressed with zstd level 1."""
    compressor = zstandard.ZstdCompressor(level=1)
    planes: list[bytes] = []
    for part in update.delta.values():
        gaps = np.diff(part.indices.astype(np.int64), prepend=-1).astype(np.uint32)
        assert part.old is not None
        for words in (gaps.view(np.uint8).reshape(-1, 4), (part.old ^ part.new).view(np.uint8).reshape(-1, 2)):
            planes += [np.ascontiguousarray(words[:, i]).tobytes() for i in range(words.shape[1])]
    # planes of all tensors are joined, so that small tensors do not cost a frame each
    count = 6
    return sum(len(compressor.compress(b"".join(planes[i::count]))) for i in range(count))


def gaps_16(update: Update) -> int:
    """Bytes of 16-bit gaps and values; a gap of 65,535 or more takes further words."""
    total = 0
    for part in update.delta.values():
        gaps = np.diff(part.indices.astype(np.int64), prepend=-1) - 1
        total += int((2 + 2 * (gaps // 0xFFFF) + 2).sum())
    return total


def _other(update: Update, total_bytes: int, encode_s: float | None = None, decode_s: float | None = None) -> dict:
    row = {"bytes_per_changed": total_bytes / update.num_changed, "total_bytes": total_bytes}
    return row if encode_s is None else {**row, "encode_s": encode_s, "decode_s": decode_s}


def measure(update: Update, repeats: int) -> dict[str, Any]:
    floors = {"plain": floor_bytes(update), "packed": floor_bytes(update), "context": context_floor_bytes(update)}
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: measure_encoding(update, name, Path(folder), floor, repeats) for name, floor in floors.items()}
        others = {
            "blog_int32_bf16": _other(update, 6 * update.num_changed),
            "gap16_bf16": _other(update, gaps_16(update)),
            "gap_xor_planes_zstd1": _other(update, xor_planes(update)),
            "raw_zstd1": measure_zstd_raw(update, repeats),
        }
    return {
        "input": update.name,
        "params": update.table.num_params,
        "changed": update.num_changed,
        "density": update.num_changed / update.table.num_params,
        "one_ulp_frac": float(np.mean(np.concatenate([_is_one(part) for part in update.delta.values()]))),
        "floor_bytes": floors["packed"],
        "context_floor_bytes": floors["context"],
        "encodings": rows,
        "others": others,
    }


def _is_one(part: TensorDelta) -> np.ndarray:
    step = steps(part)
    return (step == 1) | (step == 0xFFFF)


def sweep(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for std in STDS:
        for density in DENSITIES:
            num_params = max(_SWEEP_PARAMS, round(_MIN_CHANGED / density))
            rows.append(measure(synthetic(num_params, std, density, seed=len(rows)), repeats))
    return rows


def many_tensors(num_tensors: int, repeats: int) -> dict[str, Any]:
    """What names and counts cost in a mixture-of-experts model: every tensor changed, 64 elements each."""
    rng = np.random.default_rng(0)
    size, changed = 1 << 16, 64
    names = [f"model.layers.{i // 1024}.mlp.experts.{i % 1024 // 3}.{PROJECTIONS[i % 3]}" for i in range(num_tensors)]
    table = TensorTable(TensorSpec(name, (size // 256, 256)) for name in names)
    old = rng.integers(0x3C00, 0x3D00, changed).astype(np.uint16)
    delta = {
        name: TensorDelta(name, np.sort(rng.choice(size, changed, replace=False)).astype(np.int32), old ^ 1, old)
        for name in names
    }
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plain", "packed"):
            encoding, path = encodings.get(name), Path(folder) / name
            encode_s, _ = best(lambda e=encoding, p=path: e.encode(delta, table, p, 1), repeats)
            decode_s, decoded = best(lambda e=encoding, p=path: e.decode(p, table, str(p)), repeats)
            assert len(decoded) == num_tensors
            header_bytes = path.stat().st_size - (6 if name == "plain" else 0) * changed * num_tensors
            if name == "packed":
                streams = [Streams.from_blob(blob, name) for blob in packed.encode(delta, table)]
                header_bytes -= 8 * sum(part.low.size + part.high.size + part.raw.size for part in streams)
            rows[name] = {
                "total_bytes": path.stat().st_size,
                "header_bytes_per_tensor": header_bytes / num_tensors,
                "encode_s": encode_s,
                "decode_s": decode_s,
            }
    return {"tensors": num_tensors, "changed": changed * num_tensors, "table_bytes": len(table.to_bytes()), **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--sweep", action="store_true", help="add synthetic updates, 0.01 %% to 60 %% changed")
    parser.add_argument("--tensors", type=int, metavar="N", help="add the header cost of a model of N tensors")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if not (options.trace or options.sweep or options.tensors):
        parser.error("give --trace FILE, --sweep or --tensors N")
    result: dict[str, Any] = {"traces": [measure(load(path), options.repeats) for path in options.trace]}
    if options.sweep:
        result["sweep"] = sweep(9)
    if options.tensors:
        result["many_tensors"] = many_tensors(options.tensors, 1)
    if options.json:
        print(json.dumps({**result, "measured": measured()}))
        return
    if options.tensors:
        for name in ("plain", "packed"):
            row = result["many_tensors"][name]
            print(
                f"{options.tensors:,} tensors, {name}: {row['header_bytes_per_tensor']:.1f} bytes of header a tensor"
            )
    for row in result["traces"] + result.get("sweep", []):
        print(f"{row['input']}: {row['changed']:,} of {row['params']:,} changed ({row['density']:.3%})")
        for name, entry in (row["encodings"] | row["others"]).items():
            ratio = f", {entry['floor_ratio']:.3f} of the floor" if "floor_ratio" in entry else ""
            times = (
                f", {entry['encode_s'] * 1e3:.1f} + {entry['decode_s'] * 1e3:.1f} ms" if "encode_s" in entry else ""
            )
            print(f"  {name:22} {entry['bytes_per_changed']:.3f} bytes a change{ratio}{times}")


if __name__ == "__main__":
    main()
