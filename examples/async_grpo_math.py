# SPDX-License-Identifier: Apache-2.0
"""Async GRPO on maths with the trainer on one GPU box and vLLM on another; weights travel through a bucket only.

On the server's box (it needs to reach the bucket, and to be reached by HTTP):

    DELTA_SYNC_BUCKET=hf://buckets/me/math/run-1 vllm serve Qwen/Qwen3-0.6B \\
        --worker-extension-cls vllm_delta.DeltaWorkerExtension --logprobs-mode processed_logprobs

On the trainer's box:

    python examples/async_grpo_math.py --bucket hf://buckets/me/math/run-1 --server http://SERVER:8000

Shows: what two machines need that share no fast network. The trainer uploads a few megabytes a step; no NCCL group is
formed, and the server may be restarted, moved or multiplied while training goes on. You should see
`delta/changed_frac` below one per cent, `delta/lag_versions` of 0 or 1 and `sample/staleness_mean` around 1 beside
TRL's own values, and `delta-wire watch BUCKET` on any machine with the server's version following the trainer's.
Needs: two machines with a GPU each, a Hugging Face account with a bucket (or any other address: s3://…, a shared
folder), `pip install '.[trl]'` here and `.[vllm]` there. It has not been run on GPUs yet; with `--tiny` and
a generated model the tests run it on a CPU.
Takes: hours; the first version is served within a minute of the trainer's start.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import tiny_form


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket", required=True, help="the address that the server was given, too")
    parser.add_argument("--server", required=True, help="of the vLLM server, http://host:8000")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="default: Qwen/Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps; default: 500")
    tiny_form.add_option(parser)
    arguments = parser.parse_args()

    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from trl_delta import attach
    from trl_delta.cpu import cpu_training

    settings: dict[str, Any] = {
        "output_dir": "runs/async_grpo_math",
        "max_steps": arguments.steps,
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_completion_length": 2048,
        # a sample that is older by more versions than this is thrown away
        "max_staleness": 4,
        "vllm_server_base_url": arguments.server,
        "logging_steps": 1,
    }
    if arguments.tiny:
        from arithmetic import make_dataset, reward

        dataset, settings = make_dataset(), settings | tiny_form.SETTINGS
    else:
        from datasets import load_dataset
        from trl.rewards import accuracy_reward as reward

        dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
    with cpu_training() if arguments.tiny else nullcontext():
        trainer = AsyncGRPOTrainer(
            model=arguments.model, reward_funcs=reward, train_dataset=dataset, args=AsyncGRPOConfig(**settings)
        )
    # the one line that this project asks for
    attach(trainer, bucket=arguments.bucket)
    trainer.train()


if __name__ == "__main__":
    main()
