# SPDX-License-Identifier: Apache-2.0
"""GRPO with a vLLM server, synchronously: every rollout comes from the weights of its own step, without NCCL.

    python examples/grpo_server_mode.py

Shows: TRL's GRPOTrainer in server mode (`use_vllm=True, vllm_mode="server"`) whose weights travel through a bucket.
TRL would form an NCCL group with the server, which takes GPUs in one network; here the trainer publishes a delta,
waits until the server says that it serves it, and generates. At the end the live weights are digested, and must be
the trainer's in every bit.
Needs: the environment of `make env`, 10 GB of memory. No GPU, no model hub. On GPUs the same three lines
(`server_mode`, `attach`, `train`) are all that changes in a script of yours.
Takes: one to two minutes on two cores, most of it the start of the server.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from quickstart_cpu import compare, quiet_libraries, wait_served, wipe_bucket

STEPS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/grpo_server"), help="default: runs/grpo_server")
    arguments = parser.parse_args()
    run_dir = arguments.run_dir.resolve()
    bucket = run_dir / "bucket"
    wipe_bucket(bucket)
    quiet_libraries()

    from demo_report import Progress
    from demo_server import DemoServer
    from prepare_model import prepare

    model = prepare("tiny", run_dir.parent / "models" / "tiny")
    server = DemoServer(model, bucket, run_dir)
    try:
        progress = Progress(f"starting vllm serve (log: {server.log})")
        server.wait_ready(progress)
        progress.done(f"vllm serves at {server.url}")
        return train_and_compare(model, bucket, run_dir, server)
    finally:
        server.stop()


def train_and_compare(model: Path, bucket: Path, run_dir: Path, server) -> int:
    """Train a few steps; returns the exit code."""
    from demo_report import say
    from transformers import TrainerCallback

    from trl_delta import attach, server_mode

    # its constructor would join an NCCL group
    with server_mode():
        trainer = make_trainer(model, run_dir, server.url)
    session = attach(trainer, bucket=str(bucket)).session
    served: list[dict] = []

    class Lines(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                version, reward = server.status()["seq"], logs.get("reward", float("nan"))
                served.append({"step": state.global_step, "version_served": version, "reward": reward})
                say(f"step {state.global_step}: reward {reward:.3f}, the server serves version {version}")

    trainer.add_callback(Lines())
    trainer.train()
    newest = session.publisher.durable_seq
    seq, equal = wait_served(server, newest).get("seq"), compare(session, server) == []
    passed = seq == newest and equal
    summary = {"passed": passed, "versions_published": newest, "version_served": seq, "steps": served}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    say(
        f"the server serves version {seq} of {newest}, {'equal to the trainer in every bit' if equal else 'NOT EQUAL'}"
    )
    return 0 if passed else 1


def make_trainer(model: Path, run_dir: Path, server_url: str):
    """TRL's GRPOTrainer on the CPU."""
    from arithmetic import make_dataset, reward
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(run_dir / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=3e-6,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server_url,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(model=str(model), args=args, reward_funcs=reward, train_dataset=make_dataset())
    # the example prints lines of its own
    trainer.remove_callback(PrinterCallback)
    return trainer


if __name__ == "__main__":
    sys.exit(main())
