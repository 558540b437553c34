# SPDX-License-Identifier: Apache-2.0
"""A trainer publishes an adapter by itself, a server with --enable-lora serves it: every version as a fresh server
does that was given a checkout of it as an ordinary adapter, and the base stays what it is."""

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import move_pointer, pointed_to
from vllm_server import Server, Streams, WarmStart, serve
from yaml_training import copy_configs, train

from delta_wire.begin import pointer_bytes
from delta_wire.bucket import BucketReader
from delta_wire.checkpoint import Checkpoint
from delta_wire.manifest import Manifest
from delta_wire.replay import checkout
from delta_wire.stores import open_store

pytestmark = pytest.mark.e2e

SUPPORT = Path(__file__).parents[1] / "support"
LORA = ("--enable-lora", "--max-lora-rank=8", "--max-loras=4")
EXTENSION = "--worker-extension-cls=faulty_extension.Faulty"
PROMPTS = ["What is 12 plus 30?", "The answer is", "First count, then fill. " * 40]
NAME = "policy"
# the last one for what goes wrong
STEPS = 4


@pytest.fixture(scope="module")
def run(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket that `trl-delta sft` has filled with the versions of an adapter, one for every step."""
    folder = copy_configs(tmp_path_factory.mktemp("adapter") / "cpu", tiny_model("qwen3"))
    before = Checkpoint(folder / "model").digest()
    options = ["--use_peft", "--lora_r", "4", "--lora_alpha", "6", "--lora_target_modules", "all-linear"]
    options += ["--delta_sync_adapter", "separate", "--delta_sync_adapter_name", NAME, "--learning_rate", "0.05"]
    options += ["--max_steps", str(STEPS)]
    # wrong bases and all else that would end publishing must end the test
    options += ["--delta_sync_on_failure", "stop"]
    train(folder, "sft", *options, program=(str(SUPPORT / "every_version.py"),))
    bucket = folder / "runs" / "sft-bucket"
    adapter = pointed_to(bucket).adapter
    assert adapter is not None and adapter.base_digest == before == Checkpoint(folder / "model").digest()
    return folder


def environment(bucket: Path) -> dict[str, str]:
    return {
        "DELTA_SYNC_BUCKET": str(bucket),
        "DELTA_SYNC_POLL_S": "0.1",
        "PYTHONPATH": str(SUPPORT),
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }


def versions(bucket: Path) -> list[Manifest]:
    reader = BucketReader(open_store(bucket))
    return list(reader.walk(pointed_to(bucket)))[::-1]


def answers(server: Server, model: str) -> list[Any]:
    """Tokens and log probabilities of all prompts, one after the other."""
    asked = Server(server.url, model, server.log)
    choices = [asked.complete(prompt, max_tokens=24)["logprobs"] for prompt in PROMPTS]
    return [(choice["tokens"], choice["token_logprobs"], choice["top_logprobs"]) for choice in choices]


def headers(server: Server, model: str, **options: Any) -> dict[str, str]:
    body = {"model": model, "prompt": "x", "max_tokens": 2} | options
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()
        return {name: value for name, value in response.headers.items() if name.startswith("x-weight-version")}


def arm(server: Server, *faults: str) -> None:
    body = {"method": "delta_arm", "args": [0, list(faults)]}
    assert server.request("/collective_rpc", body)["results"]


@pytest.fixture(scope="module")
def followed(
    run: Path, tmp_path_factory: pytest.TempPathFactory, warm: WarmStart
) -> Iterator[tuple[Server, Path, list[Manifest]]]:
    """A server that follows a copy of the bucket, whose pointer names the first version, and all versions."""
    bucket = tmp_path_factory.mktemp("followed") / "bucket"
    shutil.copytree(run / "runs" / "sft-bucket", bucket)
    every = versions(bucket)
    move_pointer(bucket, pointer_bytes(every[0]))
    flags = (EXTENSION, *LORA, "--enable-scale-out")
    with serve(run / "model", bucket.with_name("log"), *flags, env=environment(bucket), start=warm) as server:
        server.wait(lambda s: s["seq"] == 0, "version 0")
        yield server, bucket, every


def test_every_version_is_what_a_fresh_server_makes_of_its_checkout(
    followed: tuple[Server, Path, list[Manifest]], run: Path, tmp_path: Path, warm: WarmStart
):
    server, bucket, every = followed
    assert len(every) == STEPS + 1
    base = run / "model"
    before = answers(server, str(base))
    assert [card["id"] for card in server.request("/v1/models")["data"]] == [str(base), NAME]
    # an adapter whose B is zero is the base
    found = [answers(server, NAME)]
    assert found[0] == before
    streams = Streams(Server(server.url, NAME, server.log), [[5, 6, 7], list(range(10, 150))], 300)
    for manifest in every[1:-1]:
        move_pointer(bucket, pointer_bytes(manifest))
        status = server.wait(lambda s, seq=manifest.version.seq: s["seq"] == seq, f"version {manifest.version.seq}")
        assert status["state"] == "serving" and status["digest"] == str(manifest.digest)
        # long prompts find no keys and values of an older version
        found.append(answers(server, NAME))
        assert headers(server, NAME) == {"x-weight-version": str(manifest.version)}
        assert headers(server, NAME, stream=True) == {"x-weight-version": str(manifest.version)}
        assert headers(server, str(base)) == headers(server, str(base), stream=True) == {"x-weight-version": "default"}
    labels = [str(manifest.version) for manifest in every]
    for stream in streams.finish():
        seen = [span["version"] for spans in stream for span in spans]
        assert seen == sorted(seen, key=labels.index)
    assert answers(server, str(base)) == before
    proof = server.verify()
    assert proof["equal"] and proof["version"] == labels[-2] and proof["digest"] == str(every[-2].digest)
    assert proof["base_digest"] == str(Checkpoint(base).digest())

    reader = BucketReader(open_store(bucket))
    folders = [checkout(reader, manifest, tmp_path / f"v{manifest.version.seq}") for manifest in every[:-1]]
    modules = [f"{folder.name}={folder}" for folder in folders]
    # the same extension, so that both use the same kernels; its bucket stays empty
    (tmp_path / "empty").mkdir()
    flags = (EXTENSION, *LORA, "--lora-modules", *modules)
    with serve(base, tmp_path / "fresh.log", *flags, env=environment(tmp_path / "empty"), start=warm) as fresh:
        expected = [answers(fresh, folder.name) for folder in folders]
    assert found == expected
    # and they are different policies
    assert all(left != right for at, left in enumerate(found) for right in found[:at])


def test_a_version_that_does_not_arrive_is_taken_back(followed: tuple[Server, Path, list[Manifest]]):
    server, bucket, every = followed
    old = server.wait(lambda s: s["state"] == "serving", "the version before")
    before = answers(server, NAME)
    arm(server, "adapter")
    move_pointer(bucket, pointer_bytes(every[-1]))
    status = server.wait(lambda s: s["state"] == "degraded", "the refusal")
    assert f"version {every[-1].version} of the adapter could not be put in place" in status["reason"]
    assert "the live adapter is not what" in status["reason"]
    assert f"every rank serves {old['version']} again" in status["reason"]
    assert status["version"] == old["version"] and status["commits"] == old["commits"]
    assert answers(server, NAME) == before
    assert headers(server, NAME) == {"x-weight-version": old["version"]}
    arm(server)
    server.wait(lambda s: s["state"] == "serving" and s["digest"] == str(every[-1].digest), "the version itself")
    assert server.verify()["equal"]


def test_what_is_not_the_version_is_found_and_mended(followed: tuple[Server, Path, list[Manifest]]):
    """A bit of the live adapter flips; and somebody loads another adapter under the run's name."""
    server, _, _ = followed
    before, status = answers(server, NAME), server.status()
    assert server.request("/collective_rpc", {"method": "delta_spoil"})["results"]
    found = server.verify()
    assert not found["equal"] and found["digest"] is None and "the live adapter is not what" in found["problem"]
    server.wait(lambda s: s["state"] == "serving" and s["commits"] > status["commits"], "the recovery")
    assert server.verify()["equal"]
    assert answers(server, NAME) == before

    body = {"lora_name": NAME, "lora_path": "/nowhere", "load_inplace": True}
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.request("/v1/load_lora_adapter", body)
    assert "whose versions are the only ones that are loaded as it" in refused.value.read().decode()
    assert answers(server, NAME) == before


def plan(server: Server, folder: Path) -> dict[str, Any]:
    """What the server's rank says about an adapter that a run would bring, before anything is touched."""
    for method, args in [("delta_submit", [-1, "plan_adapter", str(folder), NAME]), ("delta_poll", [-1])]:
        deadline_s = time.monotonic() + 60
        while True:
            (reply,) = server.request("/collective_rpc", {"method": method, "args": args})["results"]
            if not reply.get("pending"):
                break
            assert time.monotonic() < deadline_s
    return reply


def test_what_cannot_be_served_as_an_adapter_is_refused_by_name(
    followed: tuple[Server, Path, list[Manifest]], tmp_path: Path
):
    server, bucket, every = followed
    before = answers(server, NAME)
    good = checkout(BucketReader(open_store(bucket)), every[-1], tmp_path / "good")
    assert plan(server, good)["digest"] == str(every[-1].digest)

    def changed(name: str, config: dict[str, Any], **tensors: torch.Tensor | None) -> str:
        folder = shutil.copytree(good, tmp_path / name)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        weights = load_file(folder / "adapter_model.safetensors") | {
            f"base_model.model.{key}": value for key, value in tensors.items()
        }
        kept = {key: value for key, value in weights.items() if value is not None}
        save_file(kept, folder / "adapter_model.safetensors", {"format": "pt"})
        return plan(server, folder)["error"]

    zeros = partial(torch.zeros, dtype=torch.bfloat16)
    assert "DoRA" in changed("dora", {"use_dora": True})
    assert "rank 9" in changed("rank", {"r": 9}) and "--max-lora-rank" in changed("again", {"r": 9})
    embedding = {
        "model.embed_tokens.lora_embedding_A": zeros(4, 512),
        "model.embed_tokens.lora_embedding_B": zeros(64, 4),
    }
    assert "embed_tokens" in changed("embedding", {}, **embedding)
    head = {"lm_head.lora_A.weight": zeros(4, 64), "lm_head.lora_B.weight": zeros(512, 4)}
    assert "lm_head" in changed("head", {}, **head)
    experts = {f"model.layers.0.mlp.experts.lora_{side}.weight": zeros(4, 64) for side in "AB"}
    assert "experts" in changed("experts", {}, **experts)
    half = {"model.layers.0.self_attn.q_proj.lora_B.weight": None}
    assert "model.layers.0.self_attn.q_proj" in changed("half", {}, **half)
    # nothing of it has touched what is served
    assert answers(server, NAME) == before and server.verify()["equal"]


def test_other_adapters_fit_beside_the_run_and_no_more(followed: tuple[Server, Path, list[Manifest]], tmp_path: Path):
    """Of four slots the run's adapter keeps one; requests for all at once are answered in the same steps."""
    server, bucket, every = followed
    reader = BucketReader(open_store(bucket))
    folders = {f"v{m.version.seq}": str(checkout(reader, m, tmp_path / f"v{m.version.seq}")) for m in every[:4]}

    def change(verb: str, name: str) -> None:
        """vLLM's own routes, which answer in words."""
        body = {"lora_name": name} | ({"lora_path": folders[name]} if verb == "load" else {})
        request = urllib.request.Request(
            f"{server.url}/v1/{verb}_lora_adapter", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).read()

    names = list(folders)[:3]
    try:
        for name in names:
            change("load", name)
        with pytest.raises(urllib.error.HTTPError) as refused:
            change("load", "v3")
        assert "--max-loras 5" in refused.value.read().decode()
        with ThreadPoolExecutor(4) as pool:
            seen = list(pool.map(lambda name: headers(server, name, max_tokens=200), [*names, NAME] * 2))
        assert [entry["x-weight-version"] for entry in seen[:4]] == ["default"] * 3 + [str(every[-1].version)]
        assert server.verify()["equal"]
    finally:
        for name in names:
            change("unload", name)


def test_an_adapter_of_another_base_is_refused(run: Path, tmp_path: Path, warm: WarmStart):
    """Both digests are told, the adapter is not there, the model is served as it is."""
    other = tmp_path / "other"
    shutil.copytree(run / "model", other)
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    bucket = run / "runs" / "sft-bucket"
    with serve(other, tmp_path / "log", EXTENSION, *LORA, env=environment(bucket), start=warm) as server:
        status = server.wait(lambda s: s["state"] == "degraded", "the refusal")
        assert str(Checkpoint(run / "model").digest()) in status["reason"]
        assert str(Checkpoint(other).digest()) in status["reason"]
        assert [card["id"] for card in server.request("/v1/models")["data"]] == [str(other)]
        assert headers(server, str(other)) == {"x-weight-version": "default"}


@pytest.mark.matrix
def test_two_ranks_hold_their_halves_of_the_adapter(run: Path, tmp_path: Path, warm: WarmStart):
    bucket = run / "runs" / "sft-bucket"
    flags = (EXTENSION, *LORA, "--tensor-parallel-size=2")
    with serve(run / "model", tmp_path / "log", *flags, env=environment(bucket), start=warm) as server:
        newest = pointed_to(bucket)
        server.wait(lambda s: s["state"] == "serving" and s["seq"] == newest.version.seq, "the newest version")
        found = answers(server, NAME)
        proof = server.verify()
        assert proof["equal"] and proof["ranks"] == 2 and proof["digest"] == str(newest.digest)
    folder = checkout(BucketReader(open_store(bucket)), newest, tmp_path / "checkout")
    (tmp_path / "empty").mkdir()
    flags = (*flags, "--lora-modules", f"{NAME}={folder}")
    env = environment(tmp_path / "empty")
    with serve(run / "model", tmp_path / "fresh.log", *flags, env=env, start=warm) as fresh:
        assert found == answers(fresh, NAME)
