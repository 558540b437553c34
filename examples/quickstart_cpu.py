# SPDX-License-Identifier: Apache-2.0
"""Train with TRL, serve with vLLM, keep the server's weights equal to the trainer's by deltas through a bucket.

    python examples/quickstart_cpu.py                     SmolLM2-135M, about 10 minutes on two cores
    python examples/quickstart_cpu.py --model tiny        a generated two-layer model, under 4 minutes
    python examples/quickstart_cpu.py --bucket s3://…     another bucket than a folder: hf://buckets/…, s3://…

Shows: TRL's own AsyncGRPOTrainer with its spawned rollout worker learns to add numbers, a real `vllm serve` generates
the rollouts, and after every optimizer step only the changed bf16 values travel, through a bucket in
`runs/demo/bucket`. At the end the server reads its live weights back, and they must equal the trainer's in every bit;
the exit code is 0 only then. The result lies in `runs/demo/summary.json`, the trainer's log and what the server
acknowledged beside it (`delta-wire report` draws them).
Needs: Python 3.11 or newer, the environment of `make env` (torch, trl, transformers, vllm on the CPU), 10 GB of
memory. No GPU, no model hub.
Takes: see above.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

MIN_STEPS = 6
# per model: learning rate, so that deltas are as sparse as in real training; longest completion in tokens
SETTINGS = {"smollm2": (1e-6, 20), "tiny": (3e-6, 32)}
PROMPTS_PER_STEP = 4
COMPLETIONS_PER_PROMPT = 4
# how long the end of the demo waits for the bucket, and then for the server
CLOSE_TIMEOUT_S = 10.0
SERVE_TIMEOUT_S = 60.0


def main() -> int:
    began_s = time.monotonic()
    arguments = parse_arguments()
    run_dir = arguments.run_dir.resolve()
    bucket = arguments.bucket or str(run_dir / "bucket")
    if "://" not in bucket:
        # the server has another working folder
        bucket = str(Path(bucket).resolve())
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "summary.json").unlink(missing_ok=True)
    quiet_libraries(offline=not bucket.startswith("hf://"))
    wipe_bucket(bucket)
    # ends the server as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    from demo_report import Progress, say
    from demo_server import DemoServer
    from prepare_model import prepare

    say(f"preparing the model {arguments.model}")
    model = prepare(arguments.model, run_dir.parent / "models" / arguments.model)
    say(f"  {model}")
    server = DemoServer(model, bucket, run_dir)
    try:
        progress = Progress(f"starting vllm serve (log: {server.log})")
        server.wait_ready(progress)
        progress.done(f"vllm serves at {server.url}, {time.monotonic() - began_s:.0f} s after the start")
        return train_and_compare(arguments, model, bucket, run_dir, server, began_s)
    finally:
        server.stop()


def quiet_libraries(offline: bool = True) -> None:
    """Leave the terminal to the demo's own lines and to warnings that say something about it.

    Args:
        offline (`bool`, *optional*, defaults to `True`): ask no model hub for anything; a bucket on a hub needs it.
    """
    # read by the libraries when they are imported, here and in the processes of server and rollout worker
    os.environ.update(
        HF_HUB_OFFLINE="1" if offline else "0",
        TOKENIZERS_PARALLELISM="false",
        TRANSFORMERS_VERBOSITY="error",
        TRL_EXPERIMENTAL_SILENCE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        # TRL says at each import that it has not been tested with this vLLM; the demo has
        PYTHONWARNINGS="ignore:TRL currently supports:UserWarning",
    )
    warnings.filterwarnings("ignore", message="TRL currently supports")
    logging.basicConfig(format="  ! %(message)s", level=logging.WARNING)
    # vLLM speaks about Triton before it has read its own setting
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def train_and_compare(arguments, model: Path, bucket: str, run_dir: Path, server, began_s: float) -> int:
    """Train, wait for the server, compare every tensor; returns the exit code."""
    from demo_report import FleetRecorder, LiveLines, say, summarise

    from delta_wire.errors import DeltaError
    from trl_delta import DeltaSyncConfig, attach

    say("loading TRL and the model")
    trainer = make_trainer(arguments, model, run_dir, server.url)
    config = DeltaSyncConfig(delta_sync_bucket=bucket, delta_sync_close_timeout_s=CLOSE_TIMEOUT_S)
    session = attach(trainer, config=config).session
    lines = LiveLines(session, server.status, run_dir / "log.jsonl")
    trainer.add_callback(lines)
    server.end_demo_when_it_exits()
    fleet = FleetRecorder(bucket, run_dir / "fleet.jsonl")
    try:
        trainer.train()
    except (DeltaError, RuntimeError) as error:
        server.require_alive()
        raise SystemExit(f"demo: training has failed: {error}") from error
    finally:
        lines.close()

    last = session.publisher.durable_seq
    say(f"training has ended; the server is to serve v{last}, the newest in the bucket")
    status = wait_served(server, last)
    fleet.close()
    unequal = compare(session, server) if status else None
    summary = summarise(lines, status, unequal, time.monotonic() - began_s, run_dir)
    problem = problem_of(session, summary, bucket, server)
    say(f"demo FAILED: {problem}" if problem else f"demo passed; summary in {run_dir / 'summary.json'}")
    # in this environment, which need not be the shell's
    command = Path(sys.executable).with_name("delta-wire")
    say(f"look at it: {command} report {bucket} --logs {run_dir / 'log.jsonl'} --fleet {run_dir / 'fleet.jsonl'}")
    return 1 if problem else 0


def make_trainer(arguments, model: Path, run_dir: Path, server_url: str):
    """TRL's AsyncGRPOTrainer as released, on the CPU."""
    from arithmetic import make_dataset, reward
    from transformers import AutoTokenizer, PrinterCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from trl_delta.cpu import cpu_training

    learning_rate, completion_tokens = SETTINGS[arguments.model]
    samples_per_step = PROMPTS_PER_STEP * COMPLETIONS_PER_PROMPT
    args = AsyncGRPOConfig(
        output_dir=str(run_dir / "trainer"),
        max_steps=arguments.steps,
        per_device_train_batch_size=samples_per_step,
        num_generations=COMPLETIONS_PER_PROMPT,
        max_completion_length=completion_tokens,
        learning_rate=learning_rate,
        vllm_server_base_url=server_url,
        # batches of a fixed number of samples
        token_budget=0,
        # one group on its way and one ready: on a machine without a GPU generation is faster than training, and what
        # it produces ahead is stale when it is trained on
        max_inflight_tasks=COMPLETIONS_PER_PROMPT,
        queue_maxsize=COMPLETIONS_PER_PROMPT,
        # a bucket that is lost leaves the server on an old version; the demo shall come to its end even so
        max_staleness=arguments.steps + 1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    with cpu_training():
        trainer = AsyncGRPOTrainer(
            model=str(model),
            args=args,
            reward_funcs=reward,
            train_dataset=make_dataset(),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
    # for the same reason; TRL has no setting for the queue between generation and scoring, which holds 16 groups
    trainer.rollout_worker._loop_kwargs["score_queue_maxsize"] = 1
    # the demo prints lines of its own
    trainer.remove_callback(PrinterCallback)
    return trainer


def wait_served(server, seq: int) -> dict:
    """The server's status once it serves a version, or after a while; empty if it does not answer."""
    deadline_s = time.monotonic() + SERVE_TIMEOUT_S
    status: dict = {}
    while time.monotonic() < deadline_s:
        try:
            status = server.status()
        except OSError:
            return {}
        if status.get("seq") == seq or status.get("state") == "degraded":
            break
        time.sleep(0.2)
    return status


def compare(session, server) -> list[str] | None:
    """Names of the tensors that differ between the server's live weights and the trainer's, both read just now."""
    from trl_delta.detector import tensor_digests

    try:
        served = server.verify()["tensors"]
    except (OSError, KeyError):
        return None
    trained = {name: str(digest) for name, digest in tensor_digests(session.live()).items()}
    return sorted(name for name in trained.keys() | served.keys() if trained.get(name) != served.get(name))


def problem_of(session, summary: dict, bucket: str, server) -> str | None:
    """One sentence that says why the demo has failed, `None` if it has not."""
    if session.publisher.failure is not None:
        return f"publishing has stopped: {session.publisher.failure}"
    if not session.publisher.wait(0):
        return (
            f"the weights of step {session.last_step} are not in the bucket {bucket}; its newest version is "
            f"v{summary['versions_published']}. Keep the bucket in place while the demo runs."
        )
    if summary["version_served"] != summary["versions_published"]:
        return (
            f"the server serves v{summary['version_served']} ({summary['server_state'] or 'no answer'}), published is "
            f"v{summary['versions_published']}; see {server.log}"
        )
    if not summary["bit_exact"]:
        return f"the server's weights are not the trainer's, bit for bit; see {server.log}"
    return None


def wipe_bucket(bucket: str | Path) -> None:
    """Remove the run that an earlier demo left in the bucket, and nothing else."""
    from delta_wire.errors import DeltaError
    from delta_wire.manifest import POINTER_KEY
    from delta_wire.stores import open_store

    try:
        store = open_store(bucket, create=True)
        keys = [info.key for info in store.list("")]
        if keys and POINTER_KEY not in keys:
            raise SystemExit(f"demo: {bucket} is neither empty nor a bucket; give another one with --bucket")
        # the pointer last: a demo that is interrupted here can be started again
        store.delete([key for key in keys if key != POINTER_KEY])
        store.delete([POINTER_KEY])
        store.close()
    except DeltaError as error:
        raise SystemExit(f"demo: {error}") from error


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SETTINGS, default="smollm2", help="default: smollm2")
    parser.add_argument("--steps", type=int, default=8, help=f"optimizer steps, at least {MIN_STEPS}; default: 8")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    parser.add_argument(
        "--bucket",
        help="folder, hf://buckets/…, s3://…; emptied first; default: the folder 'bucket' in the run's folder",
    )
    arguments = parser.parse_args()
    if arguments.steps < MIN_STEPS:
        parser.error(f"--steps: at least {MIN_STEPS}, found {arguments.steps}")
    return arguments


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
