# SPDX-License-Identifier: Apache-2.0
"""TRL's real rollout loop against a server whose answers say which versions have made them."""

import asyncio
import queue
from inspect import signature
from types import SimpleNamespace

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from trl_delta.rollouts import begin_rollout, note_answer, record_versions, version_metrics


@pytest.mark.parametrize(
    ("headers", "noted"),
    [
        ({"x-weight-version": "ab12-1-7"}, [7]),
        ({"x-weight-version": "ab12-1-8", "x-weight-versions": "ab12-1-7, ab12-1-8"}, [7, 8]),
        ({}, []),
        ({"x-weight-version": "default"}, []),
        ({"x-weight-version": ""}, []),
    ],
)
def test_what_headers_say(headers, noted):
    found = begin_rollout()
    note_answer(headers)
    assert found == noted


def test_metrics_of_a_sample():
    assert version_metrics([]) == {}
    assert version_metrics([7, 7]) == {"delta/mixed_frac": 0.0, "delta/sample_version": 7.0}
    assert version_metrics([7, 9, 8]) == {"delta/mixed_frac": 1.0, "delta/sample_version": 7.0}


def test_only_trls_own_loop_is_replaced():
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

    from trl_delta.rollout_loop import VersionedRolloutLoop

    worker = SimpleNamespace(_loop_cls=AsyncRolloutWorker._loop_cls)
    assert record_versions(worker)
    assert worker._loop_cls is VersionedRolloutLoop
    assert not record_versions(SimpleNamespace(_loop_cls=object))
    assert not record_versions(SimpleNamespace())


def reward(completions, **kwargs):
    return [float(index) for index, _ in enumerate(completions)]


def test_samples_of_a_group_say_which_versions_have_made_them(tiny_model):
    """One answer per prompt; the second request is answered by two versions."""
    from accelerate.state import PartialState
    from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup

    # as the worker's process does; TRL's logger asks for it
    PartialState(cpu=True)
    versions = iter(["ab-1-3", "ab-1-3, ab-1-4", "ab-1-4"])

    async def answer(request: web.Request) -> web.Response:
        given = next(versions)
        headers = {"x-weight-version": given.split(", ")[-1]} | ({"x-weight-versions": given} if "," in given else {})
        choice = {"token_ids": [20, 21], "logprobs": {"token_logprobs": [-1.0, -2.0]}}
        return web.json_response({"choices": [choice]}, headers=headers)

    async def run() -> list:
        application = web.Application()
        application.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # pyright: ignore
        loop = make_loop(tiny_model("qwen3"), f"http://127.0.0.1:{port}")
        import aiohttp

        try:
            async with aiohttp.ClientSession() as loop.session:
                prompt = [{"role": "user", "content": "?"}]
                results = [
                    await asyncio.create_task(loop._generate_one(prompt, tool_dict={}, tools=[])) for _ in range(3)
                ]
                completions, ids, sequences, calls, failures, rewards = map(list, zip(*results, strict=True))
                group = RolloutGroup(
                    prompts=[prompt] * 3,
                    reward_kwargs={},
                    completions=completions,
                    completions_ids=ids,
                    completions_sequences=sequences,
                    tool_call_counts=calls,
                    tool_failure_counts=failures,
                    model_version=3,
                    group_id=0,
                    env_rewards=[None] * 3,
                    rollout_rewards=rewards,
                )
                samples = await loop._score_group(group)
                assert loop._noted == {}
                return samples
        finally:
            await runner.cleanup()

    samples = asyncio.run(run())
    assert [sample.metrics["delta/sample_version"] for sample in samples] == [3, 3, 4]
    assert [sample.metrics["delta/mixed_frac"] for sample in samples] == [0, 1, 0]
    assert all("reward" in sample.metrics for sample in samples)


def make_loop(model, url):
    from datasets import Dataset

    from trl_delta.rollout_loop import VersionedRolloutLoop

    value = SimpleNamespace(value=0)
    # which tokens end a completion is the tokenizer's affair before TRL 1.15
    known = signature(VersionedRolloutLoop.__mro__[1].__init__).parameters
    return VersionedRolloutLoop(
        **({"eos_token_ids": [2]} if "eos_token_ids" in known else {}),
        model_name=str(model),
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}]),
        reward_funcs=[reward],
        processing_class=AutoTokenizer.from_pretrained(model),
        num_generations=3,
        max_inflight_tasks=3,
        queue_maxsize=0,
        vllm_server_url=url,
        max_tokens=2,
        temperature=1.0,
        request_timeout=30,
        rollout_buffer=queue.Queue(),
        model_version_value=value,
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=None,
        exception_info_queue=None,
        metrics_queue=queue.Queue(),
    )
