# SPDX-License-Identifier: Apache-2.0
"""`delta-wire doctor` finds what is planted, names it, and finds nothing where nothing is wrong."""

import json
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest

from delta_wire.checkpoint import Checkpoint
from delta_wire.manifest import Ack, Pointer, manifest_key
from delta_wire.refs import ObjectRef
from delta_wire.retention import Policy, plan, sweep

SERVE = "vllm serve {base} --worker-extension-cls vllm_delta.DeltaWorkerExtension --dtype bfloat16"


@pytest.fixture
def healthy(command, bucket, run, monkeypatch, tmp_path):
    """A setting in which doctor finds nothing; `examine` runs it, each test breaks one thing before."""
    pytest.importorskip("torch")
    (run.base / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELTA_SYNC_BUCKET", str(bucket))
    run.reader().write_ack(Ack("server-1", run.writer.version, run.writer.digest, "serving", None, 2.0, 1.0))

    def examine(*arguments, serve=SERVE):
        result = command("doctor", "--serve", serve.format(base=run.base), *arguments, "--json")
        problems = [finding for finding in result.json["findings"] if finding["state"] in ("problem", "warning")]
        assert result.code == (not result.json["ok"]) and all(finding["fix"] for finding in problems)
        return problems

    return SimpleNamespace(examine=examine, bucket=bucket, run=run, env=monkeypatch.setenv, patch=monkeypatch.setattr)


def test_nothing_is_found_where_nothing_is_wrong(healthy):
    assert healthy.examine() == []
    assert not (healthy.bucket / "doctor").exists() or not list((healthy.bucket / "doctor").iterdir())


def test_what_retention_removed_is_not_missing(healthy):
    run = healthy.run
    for _ in range(3):
        run.publish_anchor()
    run.publish()
    # keeps the two newest restart points
    assert sweep(run.store, plan(run.reader(), Policy(grace_s=0, lease_s=0), now_unix_s=time.time() + 10))
    run.reader().write_ack(Ack("server-1", run.writer.version, run.writer.digest, "serving", None, 2.0, 1.0))
    assert not run.store.exists(manifest_key(2)) and healthy.examine() == []


def no_bucket(healthy):
    shutil.rmtree(healthy.bucket)


def bucket_that_cannot_be_written(healthy):
    # a name that the probe needs is taken by a file; root may write to any folder
    shutil.rmtree(healthy.bucket / "doctor", ignore_errors=True)
    (healthy.bucket / "doctor").write_text("in the way")


def torn_pointer(healthy):
    (healthy.bucket / "LATEST").write_bytes(b'{"format":1,"vers')


def missing_delta(healthy):
    (healthy.bucket / healthy.run.reader().manifest(2).delta.objects[0].key).unlink()


def clock_ahead(healthy):
    from dataclasses import replace

    old = healthy.run.reader().latest()
    # the manifest as a trainer with a wrong clock would have written it
    new = replace(old, created_unix_s=time.time() + 3600)
    raw = new.to_bytes()
    import hashlib

    (healthy.bucket / manifest_key(3)).write_bytes(raw)
    ref = ObjectRef(manifest_key(3), len(raw), hashlib.sha256(raw).hexdigest())
    (healthy.bucket / "LATEST").write_bytes(Pointer(new.version, ref).to_bytes())


def base_that_is_gone(healthy):
    # the server's checkpoint is another copy
    shutil.rmtree(healthy.run.base)


def base_of_another_model(healthy):
    from delta_wire.container import write_tensors

    bits = {name: Checkpoint(healthy.run.base).bits(name).copy() for name in list(healthy.run.table)[:2]}
    write_tensors(
        healthy.run.base / "model.safetensors",
        {name: ("BF16", array.shape, array) for name, array in bits.items()},
        {"format": "pt"},
    )


def misspelt_variable(healthy):
    healthy.env("DELTA_SYNC_POL_S", "0.1")


def poll_out_of_range(healthy):
    healthy.env("DELTA_SYNC_POLL_S", "fast")


def stage_folder_missing(healthy):
    healthy.env("DELTA_SYNC_STAGE_DIR", "/nonexistent/stage")


def full_stage_folder(healthy):
    healthy.patch("shutil.disk_usage", lambda path: SimpleNamespace(total=10**12, used=10**12, free=10**6))


def little_shared_memory(healthy):
    """As in a container that is started without --ipc and --shm-size."""
    usage = shutil.disk_usage
    little = SimpleNamespace(total=64 << 20, used=0, free=64 << 20)
    healthy.patch("shutil.disk_usage", lambda path: little if str(path) == "/dev/shm" else usage(path))


def plugin_left_out(healthy):
    healthy.env("VLLM_PLUGINS", "something_else")


def key_of_somebody_else(healthy):
    healthy.env("DELTA_SYNC_PUBLIC_KEY", "ab" * 32)


def unknown_encoding(healthy):
    healthy.env("DELTA_SYNC_ENCODING", "zip")


def started_in_a_checkout(healthy):
    import pathlib

    (pathlib.Path.cwd() / "triton_kernels").mkdir()


def degraded_server(healthy):
    run = healthy.run
    run.reader().write_ack(
        Ack("server-1", run.writer.version, run.writer.digest, "degraded", "q_proj was repacked", 2.0, 1.0)
    )


def server_that_is_cut_off(healthy):
    run = healthy.run
    run.reader().write_ack(
        Ack("server-1", None, None, "degraded", "delta gone", 2.0, 1.0, needs_anchor=run.writer.version)
    )


def quantised_checkpoint(healthy):
    (healthy.run.base / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": {}}))


def float16_checkpoint(healthy):
    (healthy.run.base / "config.json").write_text(json.dumps({"torch_dtype": "float16"}))


# what is planted, the check that finds it, what the message names, and what the remedy says
PLANTED = [
    (no_bucket, "bucket", "no such folder", "create the bucket"),
    (bucket_that_cannot_be_written, "permissions", "cannot write", "right to write"),
    (torn_pointer, "bucket", "LATEST", "restore the object"),
    (missing_delta, "run", "deltas/000000000002", "restore it"),
    (clock_ahead, "clock", "in the future", "time server"),
    (base_that_is_gone, "base", "is no folder on this machine", "put the checkpoint"),
    (base_of_another_model, "base", "1 missing in", "put the checkpoint"),
    (misspelt_variable, "variables", "DELTA_SYNC_POL_S is set", "did you mean DELTA_SYNC_POLL_S?"),
    (poll_out_of_range, "server settings", "DELTA_SYNC_POLL_S='fast'", "see the message"),
    (stage_folder_missing, "server settings", "/nonexistent/stage", "see the message"),
    (full_stage_folder, "staging folder", "1 MB free", "free space"),
    (little_shared_memory, "shared memory", "67 MB free", "--ipc=host"),
    (plugin_left_out, "vllm plugin", "VLLM_PLUGINS='something_else'", "add vllm_delta"),
    (key_of_somebody_else, "bucket", "the manifest is not signed", "see the message"),
    (unknown_encoding, "encoding", "DELTA_SYNC_ENCODING='zip'", "packed"),
    (started_in_a_checkout, "working folder", "triton_kernels", "another folder"),
    (degraded_server, "server server-1", "q_proj was repacked", "mend"),
    (server_that_is_cut_off, "server server-1", "delta gone", "ask for an anchor"),
    (quantised_checkpoint, "checkpoint", "it is quantised", "unquantised"),
    (float16_checkpoint, "checkpoint", "float16", "delta-wire checkout"),
]


@pytest.mark.parametrize(("plant", "check", "found", "fix"), PLANTED, ids=[entry[0].__name__ for entry in PLANTED])
def test_what_is_planted_is_found(healthy, plant, check, found, fix):
    plant(healthy)
    problems = healthy.examine()
    (finding,) = [problem for problem in problems if problem["check"] == check]
    assert found in finding["found"] and fix in finding["fix"]


FLAGS = [
    (SERVE.replace("--worker-extension-cls vllm_delta.DeltaWorkerExtension", ""), "add --worker-extension-cls"),
    (SERVE + " --quantization fp8", "without --quantization"),
    (SERVE + " --worker-extension-cls x", "add --worker-extension-cls"),
    (SERVE + " -q=awq", "without --quantization"),
    (SERVE.replace("bfloat16", "float16"), "--dtype bfloat16"),
    (SERVE + " --load-format dummy", "load the run's checkpoint"),
    (SERVE + " --distributed-executor-backend=ray", "without Ray"),
    (SERVE + " --data-parallel-size 2", "one server for each replica"),
    (SERVE + " --speculative-config x", "fewer accepted tokens"),
]


@pytest.mark.parametrize(("serve", "fix"), FLAGS)
def test_flags_of_vllm(healthy, serve, fix):
    (finding,) = healthy.examine(serve=serve)
    assert finding["check"] == "vllm flags" and fix in finding["fix"]


def test_quantisation_that_was_run_is_none_to_warn_of(healthy):
    assert healthy.examine(serve=SERVE + " --quantization fp8_per_channel") == []


def test_settings_before_the_command_count(healthy, monkeypatch):
    """README's line, pasted whole."""
    monkeypatch.delenv("DELTA_SYNC_BUCKET")
    assert healthy.examine(serve=f"DELTA_SYNC_BUCKET={healthy.bucket} {SERVE}") == []
    (finding,) = healthy.examine(serve=f"DELTA_SYNC_BUCKET={healthy.bucket} DELTA_SYNC_POLL_S=often {SERVE}")
    assert "DELTA_SYNC_POLL_S='often'" in finding["found"]


def test_a_servers_settings_are_looked_at_beside_a_bucket_by_name(command, bucket, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DELTA_SYNC_BUCKET", raising=False)
    monkeypatch.setenv("DELTA_SYNC_CACHE_POLICY", "drop")
    result = command("doctor", bucket, "--json")
    found = [finding["found"] for finding in result.json["findings"] if finding["check"] == "server settings"]
    assert result.code == 1 and "DELTA_SYNC_CACHE_POLICY='drop' is not one of" in found[0]


def test_a_run_of_adapters(healthy, base, tmp_path, monkeypatch):
    from delta_wire.adapter import Adapter
    from delta_wire.bucket import BucketWriter
    from delta_wire.container import write_tensors
    from delta_wire.stores import open_store

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_tensors(adapter / "adapter_model.safetensors", {"lora_A": ("BF16", (32, 4), np.zeros((32, 4), "u2"))}, {})
    (adapter / "adapter_config.json").write_text("{}")
    bucket, checkpoint = tmp_path / "adapters", Checkpoint(adapter)
    BucketWriter.start(
        open_store(bucket, create=True),
        table=checkpoint.table(),
        digest=checkpoint.digest(),
        reference=None,
        anchor_dir=adapter,
        adapter=Adapter("policy", 32, Checkpoint(base).digest(), "me/base@1"),
    )
    monkeypatch.setenv("DELTA_SYNC_BUCKET", str(bucket))
    right = SERVE + " --enable-lora --max-lora-rank 32"
    assert healthy.examine("--model", base, serve=right) == [] == healthy.examine(serve=right)
    for serve, found in ((SERVE, "--enable-lora is not given"), (SERVE + " --enable-lora", "--max-lora-rank is 16")):
        (finding,) = healthy.examine(serve=serve)
        assert finding["check"] == "adapter" and found in finding["found"]
        assert "--max-lora-rank 32" in finding["fix"]
    (finding,) = healthy.examine("--model", adapter, serve=right)
    assert finding["check"] == "base" and "me/base@1" in finding["found"]


def test_a_package_that_is_too_old(healthy, monkeypatch, tmp_path):
    """A distribution as pip would have installed it, found before the real one."""
    folder = tmp_path / "site" / "trl-0.9.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (finding,) = healthy.examine()
    assert finding["check"] == "trl" and finding["found"].startswith("0.9.0, expected 1.14")


def test_many_fast_servers_on_one_token_are_counted():
    from delta_wire.doctor import Context, bucket

    def requests(num_servers, poll_s):
        context = Context(env={"DELTA_SYNC_POLL_S": poll_s}, cwd=None, num_servers=num_servers)  # type: ignore[arg-type]
        (finding,) = bucket._requests(context)
        return finding

    assert requests(4, "0.5").state == "ok"
    finding = requests(40, "0.5")
    assert finding.state == "problem" and "288,000 requests an hour" in finding.found
    assert "DELTA_SYNC_POLL_S to 2.4 or more" in finding.fix


def test_nothing_is_written_where_that_is_forbidden(healthy):
    before = sorted(path for path in healthy.bucket.rglob("*"))
    assert healthy.examine("--read-only") == []
    assert sorted(path for path in healthy.bucket.rglob("*")) == before


def test_without_a_bucket_only_the_machine_is_looked_at(command, monkeypatch, tmp_path):
    monkeypatch.delenv("DELTA_SYNC_BUCKET", raising=False)
    monkeypatch.chdir(tmp_path)
    result = command("doctor")
    assert result.code == 0 and "no bucket is named" in result.out and "ok       python" in result.out
