# SPDX-License-Identifier: Apache-2.0
"""Record a real update out of a run's bucket, for `payload.py --trace`.

    python benchmarks/record_trace.py runs/demo/bucket@6 trace.safetensors --match 'layers.14.mlp.up_proj'

The trace holds, for every tensor whose name matches, `old.<name>` (bf16, the weights before the update),
`index.<name>` (int32) and `new.<name>` (bf16).
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import numpy as np

from delta_wire.bucket import BucketReader
from delta_wire.container import Source, write_tensors
from delta_wire.errors import SetupError
from delta_wire.replay import materialise
from delta_wire.state import resolve
from delta_wire.stores import open_store


def record(bucket: str, seq: int, match: str, out: Path) -> int:
    """Write a trace; returns its number of changed elements."""
    reader = BucketReader(open_store(bucket))
    manifest = reader.manifest(seq)
    if manifest.parent is None:
        raise SetupError(f"{bucket}: version {seq} follows no other, so nothing changed with it")
    parent = reader.manifest(manifest.parent.seq, manifest.parent.manifest_sha256)
    tensors: dict[str, tuple[str, tuple[int, ...], Source]] = {}
    changed = 0
    with materialise(reader, parent) as state, tempfile.TemporaryDirectory() as folder:
        delta = reader.fetch_delta(manifest, Path(folder), state.bits)
        for name, spec in state.table.items():
            if not re.search(match, name):
                continue
            old = state.bits(name).copy()
            indices, new = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint16)
            if name in delta:
                part = resolve(delta[name], old.reshape(-1)[delta[name].indices])
                differs = part.new != part.old
                indices, new = part.indices[differs].astype(np.int32), part.new[differs]
            tensors[f"old.{name}"] = ("BF16", spec.shape, old)
            tensors[f"index.{name}"] = ("I32", indices.shape, indices)
            tensors[f"new.{name}"] = ("BF16", new.shape, new)
            changed += indices.size
    if not tensors:
        raise SetupError(f"{bucket}: no tensor of version {seq} matches {match!r}")
    write_tensors(out, tensors, {"step": str(manifest.step), "version": str(manifest.version)})
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", metavar="BUCKET@SEQ")
    parser.add_argument("out", type=Path, metavar="FILE")
    parser.add_argument("--match", default="", help="regular expression that tensor names must contain")
    options = parser.parse_args()
    bucket, _, seq = options.version.rpartition("@")
    if not bucket or not seq.isdigit():
        parser.error(f"expected BUCKET@SEQ, found {options.version!r}")
    changed = record(bucket, int(seq), options.match, options.out)
    print(f"{options.out}: {changed:,} changed elements, {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
