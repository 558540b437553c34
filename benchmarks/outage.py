# SPDX-License-Identifier: Apache-2.0
"""A training whose bucket is away for a while: what it costs, and whether the end is right.

    python benchmarks/outage.py --seconds 600 --json

Trains the generated two-layer model with a `transformers.Trainer`, at most two steps a second. The bucket's folder is
moved away after the first ten steps and moved back when the time is over; training goes on for ten more steps. At the
end the newest version is replayed and compared with the model in every bit. Takes little of the machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from delta_wire.bucket import BucketReader
from delta_wire.machine import measured
from delta_wire.replay import materialise, verify
from delta_wire.stores import open_store
from trl_delta import DeltaSyncCallback
from trl_delta.detector import live_bits

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
STEPS_BEFORE, STEPS_AFTER = 10, 10
PACE_S = 0.5


class Timed(DeltaSyncCallback):
    """Notes the longest time that publishing has taken of the training thread."""

    longest_s = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        began_s = time.monotonic()
        super().on_step_end(args, state, control, **kwargs)
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)


class Outage(TrainerCallback):
    """Moves the bucket away and back, and notes what that does to the training.

    Args:
        callback ([`DeltaSyncCallback`]): publishes.
        seconds (`float`): how long.
    """

    def __init__(self, callback: DeltaSyncCallback, seconds: float):
        self.callback = callback
        self.seconds = seconds
        self.away_steps = 0
        self.pending_bytes = 0
        self.peak_before = 0
        self._gone_s: float | None = None
        self._back_at_step: int | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(PACE_S)

    def on_step_end(self, args, state, control, **kwargs):
        bucket = Path(self.callback.session.bucket)
        if state.global_step == STEPS_BEFORE:
            self.callback.session.publisher.wait(60)
            bucket.rename(bucket.with_name("away"))
            self._gone_s = time.monotonic()
            self.peak_before = _peak_bytes()
        elif self._gone_s is not None and self._back_at_step is None:
            self.away_steps += 1
            pending = self.callback.session.publisher._pending
            if pending is not None:
                size = sum(8 * part.num_changed for part in pending.delta.values())
                self.pending_bytes = max(self.pending_bytes, size)
            if time.monotonic() - self._gone_s >= self.seconds:
                bucket.with_name("away").rename(bucket)
                self._back_at_step = state.global_step
        elif self._back_at_step is not None:
            control.should_training_stop = state.global_step >= self._back_at_step + STEPS_AFTER


def measure(model: Path, seconds: float) -> dict[str, Any]:
    """One training with one outage; raises if the bucket does not end with the model's weights."""
    torch.manual_seed(0)
    rows = [{"input_ids": (ids := torch.randint(3, 500, (32,)).tolist()), "labels": ids} for _ in range(64)]
    with tempfile.TemporaryDirectory(prefix="outage-") as folder:
        callback = Timed(f"{folder}/bucket")
        outage = Outage(callback, seconds)
        args = TrainingArguments(
            output_dir=f"{folder}/trainer",
            max_steps=1_000_000,
            per_device_train_batch_size=4,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        trainer = Trainer(model=loaded, args=args, train_dataset=rows, callbacks=[callback, outage])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        reader = BucketReader(open_store(callback.session.bucket))
        latest = reader.latest()
        if latest is None or latest.step != trainer.state.global_step:
            raise SystemExit(f"outage: trained {trainer.state.global_step} steps, the newest version is {latest}")
        with materialise(reader, latest) as state:
            for name, bits in live_bits(callback.session.live()):
                if not (state.bits(name) == bits).all():
                    raise SystemExit(f"outage: tensor {name} of version {latest.version} is not the trainer's")
        failed = [check for check in verify(reader) if not check.ok]
        if failed:
            raise SystemExit(f"outage: {failed}")
        return {
            "outage_s": seconds,
            "steps_during_outage": outage.away_steps,
            "longest_s_of_the_training_thread": callback.longest_s,
            "versions": latest.version.seq,
            "steps": trainer.state.global_step,
            "bit_exact": True,
            "most_pending_bytes": outage.pending_bytes,
            "model_bytes": callback.session.table.full_bytes,
            "peak_growth_bytes": _peak_bytes() - outage.peak_before,
        }


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    from prepare_model import make_tiny

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="default: 600")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outage-model-") as folder:
        result = measure(make_tiny("qwen3", Path(folder) / "qwen3"), options.seconds)
    if options.json:
        print(json.dumps({**result, "measured": measured()}))
        return
    print(
        f"{result['outage_s']:.0f} s without a bucket: {result['steps_during_outage']} steps; publishing took "
        f"at most {result['longest_s_of_the_training_thread']:.2f} s of the training thread; {result['versions']} "
        f"versions for {result['steps']} steps; every bit right"
    )


if __name__ == "__main__":
    main()
