# SPDX-License-Identifier: Apache-2.0
"""What delta weight sync costs a training step, on the demo's model: steps with it and without it, in turn.

    python benchmarks/overhead.py --json                 SmolLM2-135M, some minutes
    python benchmarks/overhead.py --model tiny --json    the generated model, whose steps are too short to mean much

A `transformers.Trainer` takes optimizer steps over as many tokens as the demo's (16 rows of 48), in fp32 with AdamW,
and nothing else: without the generation that makes most of a GRPO step, so that the share is that of the training
alone. Blocks of steps alternate. A block with sync ends when its last version is durable, so packing and writing in
the background, which take part of the same two cores, count in full; changes of a block without sync are published
between two blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from delta_wire.machine import measured
from trl_delta import DeltaSyncSession

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
ROWS, TOKENS = 16, 48
LEARNING_RATE = 1e-6


class Alternate(TrainerCallback):
    """Drives a session in every other block of steps and times all of them.

    Args:
        session ([`DeltaSyncSession`]): not started.
        block_steps (`int`): steps of a block.
    """

    def __init__(self, session: DeltaSyncSession, block_steps: int):
        self.session = session
        self.block_steps = block_steps
        self.with_s: list[float] = []
        self.without_s: list[float] = []
        self.thread_s: list[float] = []
        self._spent_s = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.session.start(kwargs["model"])

    def on_step_begin(self, args, state, control, **kwargs):
        self._began_s = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        # the first block warms up and counts for neither
        block, within = divmod(state.global_step - 1, self.block_steps)
        syncs, ends = block % 2 == 0, within == self.block_steps - 1
        if syncs:
            before_s = time.perf_counter()
            self.session.step(state.global_step)
            if block:
                self.thread_s.append(time.perf_counter() - before_s)
            if ends:
                self._drain()
        self._spent_s += time.perf_counter() - self._began_s
        if ends:
            if block:
                (self.with_s if syncs else self.without_s).append(self._spent_s / self.block_steps)
            self._spent_s = 0.0
            if not syncs:
                self.session.step(state.global_step)
                self._drain()

    def on_train_end(self, args, state, control, **kwargs):
        self.session.finish()

    def _drain(self) -> None:
        if not self.session.publisher.wait(600):
            raise SystemExit(f"overhead: publishing has stopped: {self.session.publisher.failure}")


def measure(model: Path, pairs: int, block_steps: int) -> dict[str, Any]:
    """Train `pairs` blocks with sync and as many without.

    Returns:
        `dict`: medians over blocks of the seconds per step (`step_s_with`, `step_s_without`), over steps of the
        seconds in the training thread (`thread_s`), its share of a step, and the memory that is held in addition.
    """
    torch.manual_seed(0)
    rows = [{"input_ids": (ids := torch.randint(3, 500, (TOKENS,)).tolist()), "labels": ids} for _ in range(4 * ROWS)]
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        alternate = Alternate(DeltaSyncSession(f"{folder}/bucket"), block_steps)
        args = TrainingArguments(
            output_dir=f"{folder}/trainer",
            max_steps=(2 * pairs + 1) * block_steps,
            per_device_train_batch_size=ROWS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        trainer = Trainer(model=loaded, args=args, train_dataset=rows, callbacks=[alternate])
        # standard output is for the result
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        session = alternate.session
        changed = [record.num_changed / session.table.num_params for record in session.publisher.records]
    with_s, without_s = statistics.median(alternate.with_s), statistics.median(alternate.without_s)
    thread_s = statistics.median(alternate.thread_s)
    return {
        "share": thread_s / with_s,
        "step_s_with": with_s,
        "step_s_without": without_s,
        "overhead_frac": with_s / without_s - 1,
        "thread_s": thread_s,
        "extra_bytes": session.detector.num_bytes,
        "extra_bytes_per_param": session.detector.num_bytes / session.table.num_params,
        "num_params": session.table.num_params,
        "changed_frac": statistics.median(changed),
        "blocks": pairs,
        "block_steps": block_steps,
        "blocks_s": {"with": alternate.with_s, "without": alternate.without_s},
    }


def main() -> None:
    from prepare_model import prepare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2", help="default: smollm2")
    parser.add_argument("--models-dir", type=Path, default=Path("runs/models"), help="default: runs/models")
    parser.add_argument("--pairs", type=int, default=5, help="blocks with and without sync; default: 5")
    parser.add_argument("--block-steps", type=int, default=3, help="steps of a block; default: 3")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    model = prepare(options.model, options.models_dir / options.model)
    result = measure(model, options.pairs, options.block_steps)
    if options.json:
        print(json.dumps({**result, "measured": measured()}))
        return
    print(
        f"step {result['step_s_without']:.3f} s without, {result['step_s_with']:.3f} s with "
        f"({result['overhead_frac']:+.1%}); {result['thread_s'] * 1e3:.0f} ms of it in the training thread "
        f"({result['share']:.1%}); {result['extra_bytes'] / 1e6:.0f} MB held"
    )


if __name__ == "__main__":
    main()
