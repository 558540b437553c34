# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT trained on several processes; see `rank_programs.run_ranks`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rank_programs import WAIT_S, await_replay, batches, learn, load, wrap
from torch.distributed.tensor import DTensor

from trl_delta import DeltaSyncConfig, DeltaSyncSession
from trl_delta.resume import Resumed

# linear layers of all shapes, and the embedding, whose rows are columns of the adapter
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"]


def adapt(base: str, dora: bool = False) -> torch.nn.Module:
    """The same on every process, with adapters that change what the model says; scaled by what is no power of two."""
    torch.manual_seed(1)
    # the embedding's lengths are sums over rows, which no process has all
    targets = TARGETS[:-1] if dora else TARGETS
    model = get_peft_model(load(Path(base)), LoraConfig(r=3, lora_alpha=7, target_modules=targets, use_dora=dora))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                param.normal_(std=0.02)
            elif "lora_magnitude" in name:
                param.mul_(1 + 0.1 * torch.rand_like(param))
    return model


def train_adapter(
    rank: int, count: int, base: str, folder: str, kind: str, steps: int, dora: bool = False
) -> dict[str, Any]:
    """Train an adapter and publish it both ways; beside it, on the first rank, one process publishes the gathered
    adapter after each step."""
    model = adapt(base, dora)
    single = copy.deepcopy(model)
    model = wrap(model, kind, count)
    frozen = {name: _local(param).clone() for name, param in model.named_parameters() if not param.requires_grad}
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    sessions, alone = {}, {}
    for how in ("merged", "separate"):
        config = DeltaSyncConfig(delta_sync_adapter=how, delta_sync_anchor_factor=0.5)
        sessions[how] = DeltaSyncSession(f"{folder}/{how}/sharded", config)
        sessions[how].start(model, world_size=count)
        if rank == 0:
            alone[how] = DeltaSyncSession(f"{folder}/{how}/single", config)
            alone[how].start(single)
    states = []
    for step, ids in enumerate(batches(rank, steps), 1):
        learn(model, optimizer, ids, single)
        for session in sessions.values():
            session.step(step)
        for session in alone.values():
            session.step(step)
            assert session.publisher.wait(WAIT_S)
        for session in sessions.values():
            # a version of every step, as the other ones publish
            assert session.publisher.wait(WAIT_S)
            await_replay(session)
        states.append({name: _local(param).detach().clone() for name, param in model.named_parameters()})
    resumed = sessions["separate"].resume_state()
    finished = [session.finish() for session in (*sessions.values(), *alone.values())]
    moved = [
        name for name, param in model.named_parameters() if name in frozen and not _local(param).equal(frozen[name])
    ]
    # from the trainer's checkpoint of the step before
    with torch.no_grad():
        for name, param in model.named_parameters():
            _local(param).copy_(states[-2][name])
    again = DeltaSyncSession(f"{folder}/separate/sharded", DeltaSyncConfig(delta_sync_adapter="separate"))
    again.start(model, world_size=count, step=steps - 1, resumed=Resumed.parse(resumed))
    return {
        "finished": [*finished, again.finish()],
        "moved": moved,
        "sharded": sum(isinstance(param, DTensor) for param in model.parameters()),
    }


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param
