# SPDX-License-Identifier: Apache-2.0
"""What following a bucket costs a server in memory: at rest, and at the peak of a commit of K changed elements.

    python benchmarks/memory.py --json
    python benchmarks/memory.py --ranks 2 --json

`vllm serve` of SmolLM2-135M on the CPU, once as it is and once following a bucket; several ranks are pipeline stages,
since its nine heads cannot be halved. At rest the proportional set size of the engine core and of each rank is
compared, after the same requests. Then versions of more and more changed elements arrive; the kernel's own high-water
mark of each process is reset before each and read after it. A straight line through all versions tells what the peak
grows by per changed element, and what of it does not depend on their number: memory that grew with the model would be
there. Takes about four minutes with one rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("examples", "tests/support")]
from prepare_model import prepare
from training import Training, move_pointer
from vllm_server import FLAGS, Server, serve

from delta_wire.machine import measured

_MB = 1e6


class Process:
    """One process of a server, seen through /proc."""

    def __init__(self, pid: str):
        self._folder = Path("/proc", pid)

    def _bytes(self, file: str, field: str) -> int:
        lines = (self._folder / file).read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

    @property
    def pss_bytes(self) -> int:
        return self._bytes("smaps_rollup", "Pss")

    @property
    def rss_bytes(self) -> int:
        return self._bytes("status", "VmRSS")

    @property
    def peak_bytes(self) -> int:
        """Highest resident size since the last `reset`."""
        return self._bytes("status", "VmHWM")

    def reset(self) -> None:
        (self._folder / "clear_refs").write_text("5")


def _command(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text().split("\0")[0]
    except OSError:
        # it has ended meanwhile
        return ""


def processes(known: set[str]) -> dict[str, Process]:
    """The engine core and the ranks of a server, none of which was there before."""
    found = {_command(f): f.name for f in Path("/proc").iterdir() if f.name.isdigit() and f.name not in known}
    engines, ranks = (
        sorted(name for name in found if name.startswith(f"VLLM::{kind}")) for kind in ("EngineCore", "Worker")
    )
    names = {"engine": engines[0]} | {f"rank_{at}": name for at, name in enumerate(ranks)}
    return {part: Process(found[name]) for part, name in names.items()}


class Measured:
    """A server and its processes."""

    def __init__(self, server: Server, known: set[str]):
        self.server = server
        self.parts = processes(known)

    def at_rest(self) -> dict[str, int]:
        for turn in range(4):
            self.server.complete(f"Turn {turn}. Tell me about the sea.", max_tokens=32)
        return {part: process.pss_bytes for part, process in self.parts.items()}

    def commit(self, release: Callable[[], int]) -> dict[str, int]:
        """Release a version, and how far each process rises above what it held before."""
        before: dict[str, int] = {}
        for part, process in self.parts.items():
            process.reset()
            before[part] = process.rss_bytes
        seq = release()
        self.server.wait(lambda s: s["seq"] == seq and s["state"] == "serving", f"version {seq}")
        return {part: process.peak_bytes - before[part] for part, process in self.parts.items()}


class Releases:
    """Versions of chosen sizes, published beforehand."""

    def __init__(self, base: Path, bucket: Path, fracs: list[float]):
        training = Training(base, bucket)
        writer = training.start()
        self._pointer = bucket / "LATEST"
        self._pointers = [self._pointer.read_bytes()]
        self.num_params = training.table.num_params
        self.num_changed: list[int] = []
        for frac in fracs:
            training.changed_frac = frac
            delta = training.change()
            self.num_changed.append(sum(part.num_changed for part in delta.values()))
            writer.publish(delta, digest=training.digest, step=None)
            self._pointers.append(self._pointer.read_bytes())
        self._point_to(0)

    def _point_to(self, seq: int) -> int:
        move_pointer(self._pointer.parent, self._pointers[seq])
        return seq

    def release(self, seq: int) -> Callable[[], int]:
        return lambda: self._point_to(seq)


def measure(base: Path, folder: Path, fracs: list[float], ranks: int) -> dict[str, Any]:
    releases = Releases(base, folder / "bucket", fracs)
    flags = [f"--pipeline-parallel-size={ranks}"]
    # without its warm-up for the compiler vLLM's CPU build cannot run pipeline stages
    common = FLAGS if ranks == 1 else tuple(flag for flag in FLAGS if flag != "--enforce-eager")
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    known = {entry.name for entry in Path("/proc").iterdir()}
    with serve(base, folder / "plain.log", *flags, env=cores, common=common) as server:
        plain = Measured(server, known).at_rest()
    known = {entry.name for entry in Path("/proc").iterdir()}
    flags.append("--worker-extension-cls=vllm_delta.DeltaWorkerExtension")
    env = cores | {"DELTA_SYNC_BUCKET": str(folder / "bucket")}
    with serve(base, folder / "log", *flags, env=env, common=common) as server:
        server.wait(lambda s: s["state"] == "serving", "version 0")
        measured = Measured(server, known)
        following = measured.at_rest()
        peaks = [measured.commit(releases.release(seq)) for seq in range(1, len(fracs) + 1)]
        after = measured.at_rest()
        assert server.verify()["equal"]
    # the first version imports and compiles what the later ones use
    changed, peaks = releases.num_changed[1:], peaks[1:]
    result: dict[str, Any] = {"params": releases.num_params, "model_mb": 2 * releases.num_params / _MB, "ranks": ranks}
    for part in plain:
        per_change, constant = np.polyfit(changed, [peak[part] for peak in peaks], 1)
        result |= {
            f"{part}_plain_mb": plain[part] / _MB,
            f"{part}_following_mb": following[part] / _MB,
            f"{part}_after_mb": after[part] / _MB,
            f"{part}_bytes_per_change": float(per_change),
            f"{part}_constant_mb": float(constant) / _MB,
        }
    commits = [
        {"changed": count, **{f"{part}_peak_mb": held / _MB for part, held in peak.items()}}
        for count, peak in zip(changed, peaks, strict=True)
    ]
    return result | {"commits": commits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/models/smollm2"), help="made if it does not exist")
    parser.add_argument(
        "--changed-frac", type=float, nargs="+", default=[0.001, 0.002, 0.004, 0.008, 0.016], help="one version each"
    )
    parser.add_argument("--ranks", type=int, default=1, help="pipeline stages")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    base = prepare("smollm2", options.model).resolve()
    with tempfile.TemporaryDirectory() as folder:
        # one more at the beginning, which counts for nothing
        result = measure(base, Path(folder), [options.changed_frac[0], *options.changed_frac], options.ranks)
    if options.json:
        print(json.dumps({**result, "measured": measured()}))
        return
    for part in ("engine", *(f"rank_{at}" for at in range(options.ranks))):
        names = ("plain_mb", "following_mb", "bytes_per_change", "constant_mb")
        plain, following, per_change, constant = (result[f"{part}_{name}"] for name in names)
        print(
            f"{part}: {plain:.0f} MB as it is, {following:.0f} MB following a bucket; at the peak of a commit "
            f"{per_change:.0f} bytes more a changed element and {constant:.1f} MB whatever their number"
        )
    for row in result["commits"]:
        peaks = ", ".join(f"{key.removesuffix('_peak_mb')} {row[key]:.1f} MB" for key in row if key != "changed")
        print(f"  {row['changed']:>9,} changes: above what they held {peaks}")


if __name__ == "__main__":
    main()
