# SPDX-License-Identifier: Apache-2.0
"""What the processes of a distributed training do in tests. `run_ranks` starts them and returns what each returns."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from delta_wire.errors import ModelMismatchError
from delta_wire.stores.local import LocalStore
from trl_delta import DeltaSyncCallback, DeltaSyncConfig, DeltaSyncSession
from trl_delta.ranks import RankError

WAIT_S = 240.0
# one import for all processes of all tests, of what is installed: this folder is not on the path of that process
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "accelerate",
        "delta_wire.kernels.cpu",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
        "trl.experimental.async_grpo",
        "trl.trainer.grpo_trainer",
        "trl_delta.transfer",
    ]
)


def run_ranks(count: int, program: Callable[..., Any], *args: Any, died: tuple[int, ...] = ()) -> list[Any]:
    """Run a program of this file in `count` processes with torch.distributed on gloo.

    Args:
        count (`int`): processes.
        program (callable): takes rank and count, and `args`.
        died (`tuple`, *optional*): ranks that are expected to end without a word; their result is `None`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(count):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_begin, args=(theirs, port, rank, count, program, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results: list[Any] = []
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(WAIT_S), f"rank {rank} of {count} has not ended"
            try:
                ok, result = pipe.recv()
            except EOFError:
                ok, result = rank in died, None
            assert ok, f"rank {rank} of {count}: {result}"
            results.append(result)
    finally:
        for process in processes:
            process.join(0 if not results else 20)
            process.kill()
            process.join()
    return results


def _begin(pipe: Any, port: int, rank: int, count: int, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        result = program(rank, count, *args)
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    else:
        pipe.send((True, result))


def make_model(folder: Path, tied: bool = True) -> Path:
    """A checkpoint whose tensors no number of processes divides, some with fewer rows than processes."""
    config = LlamaConfig(
        vocab_size=515,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=18,
        num_key_value_heads=1,
        head_dim=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def load(folder: Path | str) -> PreTrainedModel:
    """In fp32, as trainers do."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def wrap(model: torch.nn.Module, kind: str, count: int) -> torch.nn.Module:
    """`fsdp2` or `ddp`."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (count,))
    for layer in [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, gathered: what a test compares with."""
    for name, param in model.named_parameters():
        value = param.full_tensor() if isinstance(param, DTensor) else param
        yield name.removeprefix("module."), value.detach()


def batches(rank: int, steps: int) -> Iterator[torch.Tensor]:
    """Other tokens on each rank."""
    random = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randint(0, 515, (2, 16), generator=random)


def train(
    rank: int,
    count: int,
    base: str,
    bucket: str,
    kind: str,
    encoding: str,
    steps: int,
    anchor_factor: float = 1.0,
) -> dict[str, Any]:
    """Train and publish; beside it, on the first rank, one process publishes the gathered weights after each step."""
    model = wrap(load(Path(base)), kind, count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = DeltaSyncConfig(delta_sync_encoding=encoding, delta_sync_anchor_factor=anchor_factor)
    session = DeltaSyncSession(f"{bucket}/sharded", config)
    session.start(model, world_size=count)
    single, alone = load(Path(base)), None
    if rank == 0:
        alone = DeltaSyncSession(f"{bucket}/single", config)
        alone.start(single)
    for step, ids in enumerate(batches(rank, steps), 1):
        learn(model, optimizer, ids, single)
        session.step(step)
        if alone is not None:
            alone.step(step)
            assert alone.publisher.wait(WAIT_S)
        # a version of every step, as the other one publishes
        assert session.publisher.wait(WAIT_S)
        await_replay(session)
    finished = session.finish()
    if alone is not None:
        assert alone.finish()
    return {
        "finished": finished,
        "left_no_files": (anchors := session._upkeep._replayed) is None or anchors._folder is None,
        "held_bytes": session.detector.num_bytes,
        "versions": [record.seq for record in session.publisher.records],
    }


class EveryStep(TrainerCallback):
    """A version of every step, however slow the machine is: waits for each before training goes on."""

    def __init__(self, session: DeltaSyncSession):
        self.session = session
        self.sharded_params = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.sharded_params = sum(isinstance(param, DTensor) for param in kwargs["model"].parameters())
        assert self.session.publisher.wait(WAIT_S)


def train_with_trainer(
    rank: int,
    count: int,
    base: str,
    folder: str,
    steps: int,
    make: Callable[[str], Any] = load,
    config: DeltaSyncConfig | None = None,
) -> dict[str, Any]:
    """`transformers.Trainer` and the callback; on several processes with FSDP2 by accelerate, as users configure it.

    Every process gets the same row, another at each step, so that the mean of their gradients is the gradient of one
    process in every bit and the training is the same whatever `count` is. `make` makes the model.
    """
    fsdp: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }
    args = TrainingArguments(
        output_dir=f"{folder}/trainer-{count}",
        max_steps=steps,
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        # its norm is a sum, in another order on each number of processes
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **(fsdp if count > 1 else {}),
    )
    if count > 1:
        # accelerate takes FSDP for an affair of GPUs and would use DDP; all else here is its own code
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    callback = DeltaSyncCallback(f"{folder}/{'single' if count == 1 else 'sharded'}", config)
    every_step = EveryStep(callback.session)
    tokens = torch.randint(0, 515, (steps, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens.repeat_interleave(count, 0).tolist()]
    trainer = Trainer(model=make(base), args=args, train_dataset=rows, callbacks=[callback, every_step])
    trainer.train()
    return {
        "sharded_params": every_step.sharded_params,
        "versions": [record.seq for record in callback.session.publisher.records],
        "logged": [entry["delta/version"] for entry in trainer.state.log_history if "delta/version" in entry],
    }


def learn(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, single: torch.nn.Module
) -> None:
    """One step, after which `single` has the whole weights; all processes call this."""
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, value in whole(model):
        single.get_parameter(name).data.copy_(value)


def await_replay(session: DeltaSyncSession) -> None:
    """If an anchor is due, until the next version gets one, however slow the machine is."""
    anchors = session._upkeep._replayed
    until_s = time.monotonic() + WAIT_S
    while anchors is not None and anchors.due and not anchors.ready:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def _move(model: torch.nn.Module, step: int) -> None:
    """What a step of training does here: the same on every rank, without a collective."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.view(-1)[step + number :: 7] += 0.01


def lose_a_rank(rank: int, count: int, base: str, bucket: str, lost: int) -> dict[str, Any]:
    """A process dies while it uploads its part of version 2; the others go on without collectives and finish."""
    model = load(Path(base))
    session = DeltaSyncSession(bucket, DeltaSyncConfig(delta_sync_close_timeout_s=2.0))
    session.start(model, world_size=count)
    put = LocalStore.put

    def die(store: LocalStore, key: str, data: bytes | Path, *, create_only: bool = False) -> None:
        if rank == lost and key.startswith("deltas/000000000002"):
            os._exit(9)
        put(store, key, data, create_only=create_only)

    LocalStore.put = die  # type: ignore[method-assign]
    step_s = []
    for step in range(1, 7):
        _move(model, step)
        began_s = time.monotonic()
        session.step(step)
        step_s.append(time.monotonic() - began_s)
        if step == 1:
            assert session.publisher.wait(WAIT_S)
            # the others have read how version 1 ended before anybody dies
            dist.barrier()
    began_s = time.monotonic()
    finished = session.finish()
    return {"finished": finished, "step_s": max(step_s), "finish_s": time.monotonic() - began_s}


def carry_on(rank: int, count: int, checkpoint: str, bucket: str, base: str) -> int | None:
    """The training that is started again: from the newest version, and on to what the lost one had reached."""
    model, ahead = load(Path(checkpoint)), load(Path(base))
    for step in range(1, 7):
        _move(ahead, step)
    session = DeltaSyncSession(bucket)
    session.start(model, world_size=count)
    model.load_state_dict(ahead.state_dict())
    session.step(1)
    assert session.finish()
    return session.publisher.durable_seq


def begin_without_a_checkpoint(rank: int, count: int, base: str, bucket: str) -> str | None:
    """Weights that no checkpoint has: the first version is gathered and uploaded. Every rank may fail alone."""
    model = load(Path(base))
    _move(model, 1)
    session = DeltaSyncSession(bucket)
    session.start(wrap(model, "fsdp2", count), world_size=count)
    assert session.finish()
    try:
        DeltaSyncSession(f"{bucket}-refused").start(load(Path(base)) if rank else nn.Linear(2, 2), world_size=count)
    except (ModelMismatchError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return None
