# SPDX-License-Identifier: Apache-2.0
"""How long generation stands still for new weights: our commit, vLLM's sparse patches, and vLLM's reload.

    python benchmarks/pause.py --json

One live vLLM model (SmolLM2-135M; with `--kind qwen3-0.6b` random weights of that size) in one process on the CPU;
0.4 % of every tensor changes. All three are given what they need beforehand: ours its plan, the sparse path its
patches as tensors, the reload a checkpoint in the page cache. The commit is everything that happens between two
steps: draining, writing, comparing the old bits, reading the new ones back, comparing the plan with the one that the
digest was computed for, label and prefix cache. Each way is checked to give the same bits in every parameter, and
ours the digest of the new checkpoint, before anything is measured. Takes about three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# the engine and its worker in this process, and only one model on this machine
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# standard output is for the result
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")

import numpy as np
import torch

from delta_wire.checkpoint import Checkpoint
from delta_wire.container import write_tensors
from delta_wire.digest import Digest
from delta_wire.machine import measured
from delta_wire.state import Delta, TensorDelta, change_of_digest
from vllm_delta import plugin
from vllm_delta.engine import VllmEngine
from vllm_delta.live import Live
from vllm_delta.ranks import Ranks
from vllm_delta.staging import write_staged
from vllm_delta.transaction import Transaction
from vllm_delta.worker import DeltaWorkerExtension

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from prepare_model import prepare


class Extension(DeltaWorkerExtension):
    """Ours by another name: by its own it asks for a bucket, and there is none here."""


class SteppingEngine(VllmEngine):
    """The engine core without a loop: between two steps is whenever nobody calls it."""

    def between_steps(self, action: Callable[[], Any]) -> Any:
        return action()


class Bench:
    """A live model, two checkpoints, and three ways from one to the other.

    Args:
        base (`Path`): checkpoint that the model is loaded from.
        folder (`Path`): for the other one.
        changed_frac (`float`): of every tensor.
    """

    def __init__(self, base: Path, folder: Path, changed_frac: float):
        from vllm import LLM

        plugin._keep_cpu_weights_plain()
        llm = LLM(
            str(base),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=512,
            kv_cache_memory_bytes=1 << 27,
            worker_extension_cls=f"{__name__}.Extension",
        )
        core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._core = core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self.model: torch.nn.Module = self._runner.model
        self._engine = SteppingEngine(core)
        self._ranks = Ranks(self._engine)
        self.live = Live.attach(self._ranks, base)
        self.base = base
        self.target = folder / "target"
        self._staged = {}
        delta, back = self._change(changed_frac)
        self.num_changed = sum(part.num_changed for part in delta.values())
        for name, change in (("there", delta), ("back", back)):
            self._staged[name] = folder / f"{name}.safetensors"
            write_staged(self._staged[name], change, self.live.table)
        self._digest = {"back": self.live.loaded, "there": self.live.loaded + change_of_digest(delta)}
        self._patches = {name: self._as_patches(change) for name, change in (("there", delta), ("back", back))}
        self.scatter_ms = 0.0

    def _change(self, changed_frac: float) -> tuple[Delta, Delta]:
        """A few units in the last place, as an optimizer step does, written down as delta, inverse and checkpoint."""
        checkpoint, random = Checkpoint(self.base), np.random.default_rng(0)
        there, back, tensors = {}, {}, {}
        for name, spec in checkpoint.table().items():
            bits = checkpoint.bits(name).reshape(-1).copy()
            count = max(1, int(bits.size * changed_frac))
            indices = np.sort(random.choice(bits.size, count, replace=False)).astype(np.int32)
            old = bits[indices]
            new = old ^ random.integers(1, 4, count).astype(np.uint16)
            bits[indices] = new
            there[name], back[name] = TensorDelta(name, indices, new, old), TensorDelta(name, indices, old, new)
            tensors[name] = ("BF16", spec.shape, bits.reshape(spec.shape))
        self.target.mkdir()
        for file in self.base.iterdir():
            if file.suffix != ".safetensors" and file.is_file():
                (self.target / file.name).write_bytes(file.read_bytes())
        write_tensors(self.target / "model.safetensors", tensors, {"format": "pt"})
        return there, back

    def _as_patches(self, delta: Delta) -> list[Any]:
        from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

        return [
            CheckpointWeightPatch(
                name,
                tuple(self.live.table[name].shape),
                torch.bfloat16,
                torch.from_numpy(part.new.view(np.int16)).view(torch.bfloat16),
                torch.from_numpy(part.indices),
            )
            for name, part in delta.items()
        ]

    def commit(self, way: str) -> float:
        """Milliseconds between the two steps; the plan is made before, as a server does."""
        replies = self._ranks.job("plan_delta", self._staged[way])
        before, after = self._digest["back" if way == "there" else "there"], self._digest[way]
        transaction = Transaction(self._engine, self.live.layout, before, after, f"version-{way}", "forget")
        transaction.expect(replies)
        start = time.perf_counter()
        outcome = transaction.run()
        duration_ms = (time.perf_counter() - start) * 1000
        assert outcome.state == "done", outcome.problem
        (self.scatter_ms,) = outcome.scatter_ms
        self._ranks.release()
        return duration_ms

    def sparse(self, way: str) -> float:
        """Milliseconds of vLLM's own sparse patches."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

        start = time.perf_counter()
        load_checkpoint_weight_patches(self.model, self._patches[way])
        return (time.perf_counter() - start) * 1000

    def reload(self, way: str) -> float:
        """Milliseconds of vLLM's reload from a folder whose files are in the page cache."""
        folder = self.target if way == "there" else self.base
        start = time.perf_counter()
        self._core.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        return (time.perf_counter() - start) * 1000

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().view(torch.int16).clone() for name, param in self.model.named_parameters()}

    def check(self) -> None:
        """All three ways there and back give the same bits, and the digests of both checkpoints."""
        base, target = self.parameters(), None
        for way in (self.commit, self.sparse, self.reload):
            way("there")
            found = self.parameters()
            target = target or found
            assert found.keys() == target.keys() and all(torch.equal(found[n], target[n]) for n in found), way
            digest = sum(self.live.digests().values(), Digest())
            assert digest == self._digest["there"] == Checkpoint(self.target).digest(), way
            way("back")
            assert all(torch.equal(bits, base[name]) for name, bits in self.parameters().items()), way
        assert target is not None and any(not torch.equal(target[name], base[name]) for name in base)

    def measure(self, repeats: int) -> dict[str, float]:
        """Medians and best; in turn, so that a slow phase of the machine meets all of them."""
        times: dict[str, list[float]] = {"commit": [], "scatter": [], "vllm_sparse": [], "reload": []}
        for _ in range(repeats):
            for way in ("there", "back"):
                times["commit"].append(self.commit(way))
                times["scatter"].append(self.scatter_ms)
            for way in ("there", "back"):
                times["vllm_sparse"].append(self.sparse(way))
            for way in ("there", "back"):
                times["reload"].append(self.reload(way))
        medians = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
        return medians | {f"{name}_best_ms": min(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="smollm2", help="of the model, as examples/prepare_model.py has them")
    parser.add_argument(
        "--model", type=Path, help="its folder, made if it does not exist; runs/models/KIND by default"
    )
    parser.add_argument("--changed-frac", type=float, default=0.004)
    parser.add_argument("--repeats", type=int, default=5, help="each there and back")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    base = prepare(options.kind, options.model or Path("runs/models") / options.kind).resolve()
    # another folder, because vLLM would take the folder triton_kernels of this repository for a library
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        bench = Bench(base, Path(folder), options.changed_frac)
        bench.check()
        row = bench.measure(options.repeats)
        os.chdir("/")
    result = {
        **row,
        "commit_speedup_vs_sparse": row["vllm_sparse_ms"] / row["commit_ms"],
        "commit_speedup_vs_reload": row["reload_ms"] / row["commit_ms"],
        "scatter_speedup_vs_sparse": row["vllm_sparse_ms"] / row["scatter_ms"],
        "params": bench.live.table.num_params,
        "changed": bench.num_changed,
    }
    if options.json:
        print(json.dumps({**result, "measured": measured()}))
        return
    print(
        f"{result['changed']:,} of {result['params']:,} elements: commit {row['commit_ms']:.1f} ms, of it writing "
        f"{row['scatter_ms']:.1f} ms; vLLM's sparse patches {row['vllm_sparse_ms']:.0f} ms "
        f"({result['commit_speedup_vs_sparse']:.0f}×), its reload {row['reload_ms']:.0f} ms "
        f"({result['commit_speedup_vs_reload']:.0f}×)"
    )


if __name__ == "__main__":
    main()
