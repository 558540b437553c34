# SPDX-License-Identifier: Apache-2.0
"""One trainer, three servers: one joins late, one is killed, and neither the trainer nor the others notice.

    python examples/multi_replica.py

Shows: any trainer with `DeltaSyncCallback` (here TRL's SFTTrainer) publishes without knowing its servers; two real
`vllm serve` follow; in the middle one of them is killed and a third is started on the old checkpoint, which goes
straight to the newest version. At the end the live weights of both survivors are digested, and must be the trainer's
in every bit.
Needs: the environment of `make env`, 10 GB of memory. No GPU, no model hub.
Takes: two to three minutes on two cores, nearly all of it the start of the servers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from pathlib import Path

from quickstart_cpu import compare, quiet_libraries, wait_served, wipe_bucket

# steps before the accident, and after the late one has joined
STEPS = 4
# a training step of a real model takes at least so long
STEP_S = 0.5
# a server that has not joined by then will not
MAX_STEPS = 2000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/multi_replica"), help="default: runs/multi_replica")
    arguments = parser.parse_args()
    run_dir = arguments.run_dir.resolve()
    shutil.rmtree(run_dir / "trainer", ignore_errors=True)
    bucket = run_dir / "bucket"
    wipe_bucket(bucket)
    quiet_libraries()

    from demo_report import Progress
    from demo_server import DemoServer
    from prepare_model import prepare

    model = prepare("tiny", run_dir.parent / "models" / "tiny")
    servers = [DemoServer(model, bucket, run_dir, name) for name in ("replica-1", "replica-2")]
    try:
        for server in servers:
            progress = Progress(f"starting vllm serve (log: {server.log})")
            server.wait_ready(progress)
            progress.done(f"{server.name} serves at {server.url}")
        return train_and_compare(model, bucket, run_dir, servers)
    finally:
        for server in servers:
            server.stop()


def train_and_compare(model: Path, bucket: Path, run_dir: Path, servers: list) -> int:
    """Train through the accident; returns the exit code."""
    from demo_report import say

    from trl_delta import DeltaSyncCallback

    callback = DeltaSyncCallback(str(bucket))
    trainer = make_trainer(model, run_dir, callback)
    trainer.add_callback(make_accident(model, bucket, run_dir, servers))
    trainer.train()

    session = callback.session
    newest = session.publisher.durable_seq
    say(f"training has ended at step {trainer.state.global_step} with version {newest}")
    alive = [server for server in servers if server.alive]
    results = []
    for server in alive:
        seq, equal = wait_served(server, newest).get("seq"), compare(session, server) == []
        results.append({"server": server.name, "version_served": seq, "bit_exact": equal})
        say(f"  {server.name} serves version {seq}, {'equal to the trainer in every bit' if equal else 'NOT EQUAL'}")
    say(f"look at the fleet: delta-wire watch {bucket} --once")
    passed = len(alive) == 2 and all(r["version_served"] == newest and r["bit_exact"] for r in results)
    summary = {"passed": passed, "versions_published": newest, "servers": results}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    say("passed" if passed else "FAILED: a server is behind or its weights are not the trainer's; see its log")
    return 0 if passed else 1


def make_trainer(model: Path, run_dir: Path, callback):
    """TRL's SFTTrainer on the CPU; the callback is all that this project adds."""
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()

    rows = [{"text": f"What is {a} plus {b}? The answer is {a + b}."} for a in range(8) for b in range(8)]
    args = SFTConfig(
        output_dir=str(run_dir / "trainer"),
        max_steps=MAX_STEPS,
        per_device_train_batch_size=4,
        learning_rate=3e-6,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return SFTTrainer(model=str(model), args=args, train_dataset=Dataset.from_list(rows), callbacks=[callback])


def make_accident(model: Path, bucket: Path, run_dir: Path, servers: list):
    """A callback that kills the second server, starts a third, and ends training a few steps after that serves."""
    from demo_report import say
    from demo_server import DemoServer
    from transformers import TrainerCallback

    class Accident(TrainerCallback):
        joined_at_step: int | None = None

        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(STEP_S)
            if state.global_step == STEPS:
                say(f"step {state.global_step}: replica-2 is killed, replica-3 starts on the old checkpoint")
                servers[1].kill()
                servers.append(DemoServer(model, bucket, run_dir, "replica-3"))
                self._ready = threading.Event()
                threading.Thread(target=self._wait, args=(servers[2],), daemon=True).start()
            elif state.global_step > STEPS and self._ready.is_set():
                if self.joined_at_step is None:
                    self.joined_at_step = state.global_step
                    status = servers[2].status()
                    say(f"step {state.global_step}: replica-3 has joined and serves version {status['seq']}")
                control.should_training_stop = state.global_step >= self.joined_at_step + STEPS

        def _wait(self, server):
            server.wait_ready(lambda elapsed_s: None)
            self._ready.set()

    return Accident()


if __name__ == "__main__":
    sys.exit(main())
