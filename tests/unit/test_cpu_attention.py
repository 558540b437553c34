# SPDX-License-Identifier: Apache-2.0
"""Attention over packed prefix trees on a CPU, against plain forwards of each sample."""

import importlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from delta_wire.errors import SetupError
from trl_delta.cpu import cpu_training, sdpa_tree_attention, tree_mask

packing = pytest.importorskip("trl.experimental.async_grpo.packing", reason="TRL folds samples into trees since 1.16")
TREE_ATTENTION = packing.TREE_ATTENTION


def make_samples(seed: int) -> list[list[int]]:
    """Token lists that share prefixes of all kinds: a common prompt, forks inside completions, equal samples, none."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(4, 500) for _ in range(rng.randint(3, 9))] for _ in range(3)]
    prompts[1][:3] = prompts[0][:3]
    samples = [p + [rng.randrange(4, 500) for _ in range(rng.randint(1, 12))] for p in prompts for _ in range(3)]
    fork = samples[0][: len(samples[0]) - 1]
    return [*samples, [*fork, 5, 6, 7], [*fork, 5, 8], list(samples[3]), [499, 498]]


def pack(samples: list[list[int]]) -> tuple[Any, dict[str, torch.Tensor]]:
    row = packing.TreeRow()
    for i, tokens in enumerate(samples):
        row.add(
            {
                "input_ids": np.array(tokens),
                "completion_mask": np.array([0] + [1] * (len(tokens) - 1)),
                "old_log_probs": np.zeros(len(tokens), dtype=np.float32),
                "advantage": 1.0,
                "group_id": i,
            }
        )
    return row, row.pack()


def tree_arguments(packed: dict[str, torch.Tensor]) -> dict:
    longest_q, longest_k = packed["tree_max_seqlens"].tolist()
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    return {name: packed[name] for name in names} | {"tree_max_seqlen_q": longest_q, "tree_max_seqlen_k": longest_k}


@pytest.fixture
def on_cpu():
    """TRL's constructor registers its GPU kernel; the demo's mode replaces it, and the test puts it back."""
    packing.register_tree_attention()
    AttentionInterface.register(TREE_ATTENTION, sdpa_tree_attention)
    yield
    packing.register_tree_attention()


@pytest.mark.parametrize("kind", ["qwen3", "llama-tied"])
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_log_probs_are_those_of_each_sample_alone(tiny_model, on_cpu, kind, seed):
    samples = make_samples(seed)
    _, packed = pack(samples)
    assert packed["input_ids"].numel() < sum(map(len, samples)), "the samples must share something"
    tree = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype="float32", attn_implementation=TREE_ATTENTION)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype="float32", attn_implementation="sdpa")
    with torch.no_grad():
        logits = tree(
            input_ids=packed["input_ids"][None], position_ids=packed["position_ids"][None], **tree_arguments(packed)
        ).logits[0]
        for i, tokens in enumerate(samples):
            expected = plain(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
            # one loss term per token but the first, in order
            found = logits[packed["token_index"][packed["segment_id"] == i]].log_softmax(-1)
            assert torch.allclose(found, expected[:-1], atol=2e-4), (kind, i)


def test_gradients_are_those_of_the_samples_alone(tiny_model, on_cpu):
    samples = make_samples(2)
    _, packed = pack(samples)
    gradients = []
    for attention in (TREE_ATTENTION, "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(
            tiny_model("qwen3"), dtype="float32", attn_implementation=attention
        )
        total = torch.zeros(())
        if attention == TREE_ATTENTION:
            log_probs = (
                model(
                    input_ids=packed["input_ids"][None],
                    position_ids=packed["position_ids"][None],
                    **tree_arguments(packed),
                )
                .logits[0]
                .log_softmax(-1)
            )
            targets = torch.tensor([token for tokens in samples for token in tokens[1:]])
            total = log_probs[packed["token_index"], targets].sum()
        else:
            for tokens in samples:
                log_probs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
                total = total + log_probs[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].sum()
        total.backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    for name, expected in gradients[1].items():
        scale = expected.abs().max()
        assert torch.allclose(gradients[0][name], expected, atol=1e-4 * float(scale) + 1e-6), name


@pytest.mark.parametrize("seed", range(4))
def test_the_mask_shows_each_token_its_own_sample_up_to_itself(seed):
    samples = make_samples(seed)
    _, packed = pack(samples)
    mask = tree_mask(
        packed["input_ids"].numel(), packed["tree_kv_index"], packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"]
    )
    # the row lays nodes out in an order of its own; tokens are found back through each sample's loss terms
    seen = torch.zeros_like(mask)
    for i in range(len(samples)):
        path = packed["token_index"][packed["segment_id"] == i].tolist()
        ends = [p for p in range(mask.shape[0]) if packed["position_ids"][p] == len(samples[i]) - 1]
        last = [p for p in ends if mask[p, path].all() and int(mask[p].sum()) == len(samples[i])]
        for at, position in enumerate(path):
            assert mask[position].nonzero().flatten().tolist() == sorted(path[: at + 1])
            seen[position, path[: at + 1]] = True
        assert last, f"sample {i} has no last token"
        for position in last:
            seen[position, [*path, position]] |= mask[position, [*path, position]]
    assert torch.equal(seen, mask)


def test_windows_and_soft_caps_are_refused(tiny_model):
    query = torch.zeros(1, 2, 3, 4)
    arguments = {
        "tree_kv_index": torch.arange(3),
        "tree_cu_seqlens_q": torch.tensor([0, 3]),
        "tree_cu_seqlens_k": torch.tensor([0, 3]),
    }
    for unsupported in ({"sliding_window": 2}, {"softcap": 30.0}):
        with pytest.raises(SetupError, match="sliding window or a soft cap"):
            sdpa_tree_attention(torch.nn.Identity(), query, query, query, None, **arguments, **unsupported)


def test_the_mode_refuses_a_machine_with_a_gpu_and_changes_nothing(monkeypatch):
    trainer_module = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    before = trainer_module.get_peak_flops_per_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SetupError, match="has a GPU"), cpu_training():
        pytest.fail("the body must not run")
    assert trainer_module.get_peak_flops_per_device is before


def test_the_constructor_is_followed_by_attention_for_cpus(on_cpu):
    trainer_module = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    with cpu_training():
        assert trainer_module.get_peak_flops_per_device(None, "float32") is None
        packing.register_tree_attention()
    assert AttentionInterface()[TREE_ATTENTION] is sdpa_tree_attention
