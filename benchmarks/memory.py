# SPDX-License-Identifier: Apache-2.0
"""What following a bucket costs a server in memory: at rest, and at the peak of a commit of K changed elements.

    python benchmarks/memory.py --json

`vllm serve` of SmolLM2-135M on the CPU, once as it is and once following a bucket. At rest the proportional set size
of the engine core and of the worker is compared, after the same requests. Then versions of more and more changed
elements arrive; the kernel's own high-water mark of each process is reset before each and read after it. What the peak
grows by per changed element is the slope of a straight line through all versions: it depends on K, not on the size of
the model. Takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("examples", "tests/support")]
from prepare_model import prepare
from training import Training, move_pointer
from vllm_server import Server, serve

_PARTS = {"engine": "VLLM::EngineCore", "worker": "VLLM::Worker"}
_MB = 1 << 20


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


def processes(name: str, known: set[str]) -> Iterator[Process]:
    """Processes of a name that were not there before."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name not in known and _command(folder).startswith(name):
            yield Process(folder.name)


class Measured:
    """A server and its processes."""

    def __init__(self, server: Server, known: set[str]):
        self.server = server
        self.parts = {part: list(processes(name, known)) for part, name in _PARTS.items()}
        assert all(self.parts.values()), "no process of vLLM was found; is this Linux?"

    def at_rest(self) -> dict[str, int]:
        for turn in range(4):
            self.server.complete(f"Turn {turn}. Tell me about the sea.", max_tokens=32)
        return {part: sum(process.pss_bytes for process in found) for part, found in self.parts.items()}

    def commit(self, release: Callable[[], int]) -> dict[str, int]:
        """Release a version, and how far each process rises above what it held before."""
        before: dict[str, int] = {}
        for part, found in self.parts.items():
            for process in found:
                process.reset()
            before[part] = sum(process.rss_bytes for process in found)
        seq = release()
        self.server.wait(lambda s: s["seq"] == seq and s["state"] == "serving", f"version {seq}")
        return {
            part: sum(process.peak_bytes for process in found) - before[part] for part, found in self.parts.items()
        }


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


def measure(base: Path, folder: Path, fracs: list[float]) -> dict[str, Any]:
    releases = Releases(base, folder / "bucket", fracs)
    known = {entry.name for entry in Path("/proc").iterdir()}
    with serve(base, folder / "plain.log") as server:
        plain = Measured(server, known).at_rest()
    known = {entry.name for entry in Path("/proc").iterdir()}
    flags = ("--worker-extension-cls=vllm_delta.DeltaWorkerExtension",)
    with serve(base, folder / "log", *flags, env={"DELTA_SYNC_BUCKET": str(folder / "bucket")}) as server:
        server.wait(lambda s: s["state"] == "serving", "version 0")
        measured = Measured(server, known)
        following = measured.at_rest()
        peaks = [measured.commit(releases.release(seq)) for seq in range(1, len(fracs) + 1)]
        after = measured.at_rest()
        assert server.verify()["equal"]
    # the first version imports and compiles what the later ones use
    changed = releases.num_changed[1:]
    rows = [
        {"changed": count, **{f"{part}_peak_bytes": peak[part] for part in _PARTS}}
        for count, peak in zip(changed, peaks[1:], strict=True)
    ]
    slopes = {
        f"{part}_bytes_per_change": float(np.polyfit(changed, [peak[part] for peak in peaks[1:]], 1)[0])
        for part in _PARTS
    }
    at_rest = {
        f"{part}_{name}_mb": value[part] / _MB
        for part in _PARTS
        for name, value in (("plain", plain), ("following", following), ("after", after))
    }
    return {"params": releases.num_params, **at_rest, **slopes, "commits": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/models/smollm2"), help="made if it does not exist")
    parser.add_argument(
        "--changed-frac", type=float, nargs="+", default=[0.001, 0.002, 0.004, 0.008, 0.016], help="one version each"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    base = prepare("smollm2", options.model).resolve()
    with tempfile.TemporaryDirectory() as folder:
        # one more at the beginning, which counts for nothing
        result = measure(base, Path(folder), [options.changed_frac[0], *options.changed_frac])
    if options.json:
        print(json.dumps(result))
        return
    for part in _PARTS:
        print(
            f"{part}: {result[f'{part}_plain_mb']:.0f} MB as it is, {result[f'{part}_following_mb']:.0f} MB following "
            f"a bucket; at the peak of a commit {result[f'{part}_bytes_per_change']:.0f} bytes more a changed element"
        )
    for row in result["commits"]:
        print(
            f"  {row['changed']:>9,} changes: peak of the engine core {row['engine_peak_bytes'] / _MB:.1f} MB, of the "
            f"worker {row['worker_peak_bytes'] / _MB:.1f} MB above what they held"
        )


if __name__ == "__main__":
    main()
