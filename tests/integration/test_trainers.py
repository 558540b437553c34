# SPDX-License-Identifier: Apache-2.0
"""TRL's real trainers from the YAML files in configs/cpu alone, with a real server where they generate."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from training import pointed_to
from transformers import AutoModelForCausalLM
from vllm_server import Server, serve
from yaml_training import ACCELERATED, copy_configs, train

from delta_wire.bucket import BucketReader
from delta_wire.digest import Digest
from delta_wire.replay import checkout, verify
from delta_wire.stores import open_store
from trl_delta.detector import tensor_digests
from trl_delta.names import live_tensors

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """configs/cpu with a model, as its README says."""
    return copy_configs(tmp_path_factory.mktemp("trainers") / "cpu", tiny_model("qwen3"))


def digest_of_saved(folder: Path) -> Digest:
    """Of a model that a trainer has saved in fp32, rounded to bf16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return sum(tensor_digests(live_tensors(model)).values(), Digest())


def test_sft_publishes_what_it_saves(folder: Path):
    said = train(folder, "sft")
    assert len(re.findall(r"'delta/changed_frac'", said)) == 3
    bucket = folder / "runs" / "sft-bucket"
    assert pointed_to(bucket).step == 3
    assert pointed_to(bucket).digest == digest_of_saved(folder / "runs" / "sft")
    assert all(check.ok for check in verify(BucketReader(open_store(bucket))))


def test_sft_on_two_processes_by_accelerate_launch(folder: Path):
    """Every process publishes its part; together they are what the first one saves."""
    # the bucket of another run; the rest is in the files
    train(folder, "sft", "--delta_sync", "runs/sft-2-bucket", "--output_dir", "runs/sft-2", program=ACCELERATED)
    last = pointed_to(folder / "runs" / "sft-2-bucket")
    assert last.step == 3 and last.delta is not None and len(last.delta.objects) == 2
    assert last.digest == digest_of_saved(folder / "runs" / "sft-2")
    assert all(check.ok for check in verify(BucketReader(open_store(folder / "runs" / "sft-2-bucket"))))


def test_dpo_with_an_adapter_publishes_merged_weights(folder: Path, tmp_path: Path):
    train(folder, "dpo")
    bucket = folder / "runs" / "dpo-bucket"
    assert pointed_to(bucket).step == 3
    manifest = pointed_to(bucket)
    assert manifest.delta is not None
    assert manifest.delta.encoding == "context"
    # the adapter that was saved, merged into the base by PEFT itself, is what was published
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    merged = PeftModel.from_pretrained(base, str(folder / "runs" / "dpo")).merge_and_unload()
    served = AutoModelForCausalLM.from_pretrained(
        checkout(BucketReader(open_store(bucket)), manifest, tmp_path / "served")
    )
    moved = 0
    for name, value in merged.state_dict().items():
        bits = [tensor.bfloat16().view(torch.int16).int() for tensor in (value, served.state_dict()[name])]
        steps = (bits[0] - bits[1]).abs()
        assert int(steps.max()) <= 1, name
        moved += int(steps.count_nonzero())
    assert moved < 500


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    environment = {"DELTA_SYNC_BUCKET": str(folder / "runs" / "bucket"), "DELTA_SYNC_POLL_S": "0.1"}
    flags = ["--worker-extension-cls=vllm_delta.DeltaWorkerExtension", "--logprobs-mode=processed_logprobs"]
    # AsyncGRPO asks for the model by the name that the trainer loads it by
    flags += ["--served-model-name", "model", "again"]
    (folder / "runs").mkdir(exist_ok=True)
    with serve(folder / "model", folder / "server.log", *flags, env=environment) as server:
        yield server


def test_grpo_in_server_mode_generates_with_the_weights_of_its_step(
    folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    """TRL's own sync is NCCL and skips the last step's weights. Here every generation has those of its step, and the
    server ends with the model that is saved. The server is no development server."""
    from trl_delta import cli, transfer

    generated: list[tuple[int, int | None, float]] = []
    sync = transfer.ServerSync.__call__

    def recorded(self) -> None:
        sync(self)
        session = self.session
        generated.append((session.last_step, session.watcher.step, session.pace.lag_versions))

    monkeypatch.setattr(transfer.ServerSync, "__call__", recorded)
    monkeypatch.chdir(folder)
    cli.train("grpo", ["--config", "grpo.yaml", "--vllm_server_base_url", server.url])
    assert generated == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]
    bucket = folder / "runs" / "bucket"
    last = pointed_to(bucket)
    assert last.step == 3
    assert last.digest == digest_of_saved(folder / "runs" / "grpo")
    server.wait(lambda s: s["version"] == str(last.version), "the weights of the last step")
    assert server.verify()["digest"] == str(last.digest)


def test_async_grpo_goes_on_with_the_run(folder: Path, server: Server):
    """From a checkout of the newest version; samples say which versions have made them."""
    bucket = folder / "runs" / "bucket"
    before = pointed_to(bucket)
    checkout(BucketReader(open_store(bucket)), before, folder / "again")
    said = train(folder, "async_grpo", "--vllm_server_base_url", server.url, "--model_name_or_path", "again")
    after = pointed_to(bucket)
    assert (after.version.run, after.version.epoch) == (before.version.run, before.version.epoch + 1)
    assert after.step == 3
    assert after.digest == digest_of_saved(folder / "runs" / "async_grpo")
    server.wait(lambda s: s["version"] == str(after.version), "the weights of the last step")
    assert server.verify()["digest"] == str(after.digest)
    lines = [line for line in said.splitlines() if "'delta/changed_frac'" in line]
    assert len(lines) == 3
    for line in lines:
        sampled = float(re.search(r"'delta/sample_version': '?([\d.]+)", line)[1])  # pyright: ignore
        assert before.version.seq <= sampled <= after.version.seq
        assert 0 <= float(re.search(r"'delta/mixed_frac': '?([\d.]+)", line)[1]) <= 1  # pyright: ignore


@pytest.mark.matrix
@pytest.mark.parametrize("command", ["grpo", "async_grpo"])
def test_two_processes_go_on_with_the_run_for_a_real_server(folder: Path, server: Server, command: str):
    """Both publish, the first one generates, and the server ends with the model that is saved."""
    bucket = folder / "runs" / "bucket"
    if not (bucket / "LATEST").exists():
        train(folder, "grpo", "--vllm_server_base_url", server.url)
    before = pointed_to(bucket)
    # under one of the names that the server goes by
    shutil.rmtree(folder / "again", ignore_errors=True)
    checkout(BucketReader(open_store(bucket)), before, folder / "again")
    options = ("--vllm_server_base_url", server.url, "--model_name_or_path", "again", "--output_dir", "runs/two")
    said = train(folder, command, *options, program=ACCELERATED)
    after = pointed_to(bucket)
    assert (after.version.run, after.version.epoch) == (before.version.run, before.version.epoch + 1)
    assert after.step == 3 and after.delta is not None and len(after.delta.objects) == 2
    assert after.digest == digest_of_saved(folder / "runs" / "two")
    server.wait(lambda s: s["version"] == str(after.version), "the weights of the last step")
    assert server.verify()["digest"] == str(after.digest)
    assert len([line for line in said.splitlines() if "'delta/served_version'" in line]) == 3
