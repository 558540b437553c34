# SPDX-License-Identifier: Apache-2.0
"""What `delta-wire` says about runs: `log`, `inspect`, `verify`, `checkout`, `diff`."""

import json
import subprocess

import pytest

from delta_wire.checkpoint import Checkpoint
from delta_wire.manifest import Ack, manifest_key


def test_log(command, bucket, run):
    result = command("log", bucket, "--json")
    assert [version["seq"] for version in result.json["versions"]] == [3, 2, 1, 0]
    newest, oldest = result.json["versions"][0], result.json["versions"][-1]
    assert newest["step"] == run.seed and newest["changed_params"] == 9 and newest["anchor"] is None
    assert newest["changed_frac"] == 9 / run.table.num_params
    assert newest["delta_bytes"] == (bucket / run.reader().latest().delta.objects[0].key).stat().st_size
    assert newest["full_bytes"] == run.table.full_bytes and newest["age_s"] >= 0
    assert oldest["anchor"] == str(run.base) and oldest["delta_bytes"] is None
    assert len(command("log", bucket, "--json", "--limit", 2).json["versions"]) == 2
    assert len(command("log", bucket, "--json", "--limit", 0).json["versions"]) == 4
    lines = command("log", bucket).out.splitlines()
    assert lines[0] == f"{bucket}: run {run.writer.version.run}"
    assert lines[1].split()[:4] == ["version", "step", "changed", "delta"]
    assert lines[2].split()[0] == str(run.writer.version) and str(run.base) in lines[-1]


def test_log_of_an_empty_bucket(command, tmp_path):
    result = command("log", tmp_path, "--json")
    assert result.code == 0 and result.json == {"bucket": str(tmp_path), "run": None, "versions": []}
    result = command("log", tmp_path)
    assert result.code == 0 and result.out == "" and "nothing has been published yet" in result.err


def test_log_of_a_shortened_chain(command, bucket, run):
    run.store.delete([manifest_key(0), manifest_key(1)])
    result = command("log", bucket, "--json")
    assert result.code == 0 and [version["seq"] for version in result.json["versions"]] == [3, 2]
    assert "older versions have been removed" in result.err


def test_log_follows(delta_wire_process, bucket, run):
    process = delta_wire_process(
        "log", bucket, "--follow", "--json", "--limit", 2, "--interval", 0.1, stdout=subprocess.PIPE
    )
    try:
        seqs = [json.loads(process.stdout.readline())["seq"] for _ in range(2)]
        for _ in range(3):
            run.publish()
        seqs += [json.loads(process.stdout.readline())["seq"] for _ in range(3)]
    finally:
        process.kill()
        process.communicate()
    assert seqs == [2, 3, 4, 5, 6]


def test_log_follows_through_an_outage(delta_wire_process, bucket, run, tmp_path):
    process = delta_wire_process(
        "log", bucket, "--follow", "--limit", 1, "--interval", 0.1, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline().split()[0] == "version"
        assert process.stdout.readline().split()[0].endswith("-3")
        bucket.rename(tmp_path / "away")
        assert process.stderr.readline().startswith(f"waiting: {bucket}: there is no such folder")
        (tmp_path / "away").rename(bucket)
        run.publish()
        assert process.stdout.readline().split()[0].endswith("-4")
    finally:
        process.kill()
        process.communicate()


def test_inspect_a_run(command, bucket, run):
    run.reader().write_ack(Ack("server-1", run.writer.version, run.writer.digest, "degraded", "disk full", 2.0, 1.0))
    value = command("inspect", bucket, "--json").json
    assert value["run"] == run.writer.version.run and value["latest"]["digest"] == str(run.writer.digest)
    assert value["model"]["tensors"] == 3 and value["model"]["num_params"] == run.table.num_params
    assert value["restart_point"]["seq"] == 0
    assert value["servers"][0]["server"] == "server-1" and value["servers"][0]["reason"] == "disk full"
    text = command("inspect", bucket)
    assert text.code == 0 and "server-1 degraded" in text.out and str(run.writer.digest) in text.out
    assert command("inspect", bucket, "--plot", "x.png").code == 2


def test_inspect_a_version(command, bucket, run):
    name = str(run.reader().manifest(2).version)
    for version in ("2", name, "000000000002"):
        value = command("inspect", f"{bucket}@{version}", "--json").json
        assert value["version"] == name and value["encoding"] == "plain"
        assert [tensor["listed"] for tensor in value["tensors"]] == [3, 3, 3]
        # an index of 32 bits and 16 bits of value
        assert [tensor["bits_per_change"] for tensor in value["tensors"]] == [48, 48, 48]
        assert [tensor["form"] for tensor in value["tensors"]] == ["values"] * 3
        assert [sum(tensor["steps"].values()) for tensor in value["tensors"]] == [3, 3, 3]
    assert command("inspect", f"{bucket}@latest", "--json").json["seq"] == 3
    assert command("inspect", f"{bucket}@0", "--json").json["tensors"] == []
    text = command("inspect", f"{bucket}@2")
    assert text.code == 0 and "layer.0.norm.weight" in text.out and "steps     in neighbouring" in text.out


@pytest.mark.parametrize("encoding", ["packed", "context"])
def test_inspect_counts_the_steps_of_every_encoding(command, run, encoding, tmp_path):
    """A change of known steps: two of one neighbour, one of three, in a tensor of its own."""
    import numpy as np

    from delta_wire.entropy import on_line
    from delta_wire.state import TensorDelta, change_of_digest

    name = "layer.0.proj.weight"
    flat = run.bits[name].reshape(-1)
    indices = np.array([5, 70, 90], dtype=np.int32)
    old = flat[indices].copy()
    before = {key: value.copy() for key, value in run.bits.items()}
    flat[indices] = on_line(on_line(old) + np.array([1, 65535, 3], dtype=np.uint16))
    delta = {name: TensorDelta(name, indices, flat[indices].copy(), old)}
    run.writer.publish(
        delta,
        digest=run.writer.digest + change_of_digest(delta),
        step=1,
        encoding=encoding,
        old_bits=before.__getitem__,
    )
    (tensor,) = command("inspect", f"{run.store.root}@1", "--json").json["tensors"]
    assert tensor["name"] == name and tensor["form"] == "steps"
    assert tensor["steps"] == {"1": 2, "2": 0, "3-4": 1, "5-8": 0, "9-16": 0, "17-64": 0, ">64": 0}
    assert 0 < tensor["bits_per_change"] < 8 * 300


def test_inspect_without_the_base_says_what_it_does_not_know(command, bucket, run):
    import shutil

    shutil.rmtree(run.base)
    value = command("inspect", f"{bucket}@2", "--json").json
    assert [tensor["steps"] for tensor in value["tensors"]] == [None] * 3
    assert [tensor["bits_per_change"] for tensor in value["tensors"]] == [48, 48, 48]


def test_inspect_draws(command, bucket, tmp_path):
    result = command("inspect", f"{bucket}@2", "--plot", tmp_path / "two.png")
    assert result.code == 0 and (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    result = command("inspect", f"{bucket}@0", "--plot", tmp_path / "none.png", "--json")
    assert result.code == 1 and "no delta" in result.json["error"]["message"]
    result = command("inspect", f"{bucket}@2", "--plot", tmp_path / "two.bmpx", "--json")
    assert result.code == 1 and "two.bmpx" in result.json["error"]["message"]


@pytest.mark.parametrize("version", ["4", "999", "wrong-1-2", "{run}-9-2"])
def test_versions_that_are_not_there(command, bucket, run, version):
    version = version.format(run=run.writer.version.run)
    result = command("inspect", f"{bucket}@{version}", "--json")
    assert result.code == 1 and f"there is no version {version}" in result.json["error"]["message"]


def test_verify(command, bucket, run):
    result = command("verify", bucket, "--json")
    assert result.code == 0 and result.json["ok"] is True
    assert [version["checks"] for version in result.json["versions"]] == [
        ["anchor"],
        ["delta"],
        ["delta"],
        ["delta", "state"],
    ]
    text = command("verify", bucket)
    assert text.code == 0 and text.out.count("ok ") == 4 and "4 of 4 versions proven" in text.err
    path = bucket / run.reader().manifest(2).delta.objects[0].key
    path.write_bytes(path.read_bytes()[:-2])
    result = command("verify", bucket, "--json")
    assert result.code == 1 and result.json["ok"] is False
    assert [version["ok"] for version in result.json["versions"]] == [True, True, False, False]
    assert path.name in result.json["versions"][2]["reason"]
    text = command("verify", bucket)
    assert text.code == 1 and text.out.count("FAILED") == 2 and path.name in text.err
    # what comes of it, and what to do
    assert "the newest version cannot be rebuilt" in text.err and "resume it" in text.err
    run.publish_anchor()
    text = command("verify", bucket)
    assert text.code == 1 and "the newest version is proven" in text.err


def test_checkout(command, bucket, run, tmp_path):
    result = command("checkout", f"file://{bucket}@latest", tmp_path / "out", "--json")
    assert result.code == 0 and result.json == {
        "version": str(run.writer.version),
        "digest": str(run.writer.digest),
        "folder": str(tmp_path / "out"),
    }
    assert Checkpoint(tmp_path / "out").digest() == run.writer.digest
    text = command("checkout", f"{bucket}@1", tmp_path / "one")
    assert text.code == 0 and text.out.strip() == str(tmp_path / "one") and "proven" in text.err
    again = command("checkout", f"{bucket}@1", tmp_path / "one", "--json")
    assert again.code == 1 and again.json["error"]["type"] == "SetupError"
    copy = command("checkout", f"{bucket}@2", tmp_path / "two", "--base", tmp_path / "one")
    assert copy.code == 1 and "its weights are others" in copy.err


def test_diff(command, bucket, run, tmp_path):
    value = command("diff", f"{bucket}@1", f"{bucket}@1", "--json").json
    assert value["equal"] and value["changed_params"] == 0 and value["tensors"] == []
    assert command("diff", f"{bucket}@1", f"{bucket}@1").out.startswith("equal in all")
    value = command("diff", f"{bucket}@0", run.base, "--json").json
    assert value["equal"], "version 0 is the base"
    value = command("diff", run.base, f"{bucket}@1", "--json").json
    assert value["changed_params"] == 9 and [tensor["changed"] for tensor in value["tensors"]] == [3, 3, 3]
    assert sum(value["tensors"][0]["steps"].values()) == 3
    assert command("diff", run.base, tmp_path / "nowhere").code == 2


def test_diff_of_two_models_is_refused_by_name(command, bucket, tools, tmp_path):
    bits = tools.random_bits()
    del bits["layer.0.norm.weight"]
    other = tools.write_checkpoint(tmp_path / "other-model", bits)
    result = command("diff", f"{bucket}@1", other, "--json")
    assert result.code == 1 and "layer.0.norm.weight" in result.json["error"]["message"]


def test_a_folder_with_an_at_in_its_name(command, bucket, tmp_path):
    bucket.rename(tmp_path / "bucket@3")
    assert len(command("inspect", tmp_path / "bucket@3", "--json").json["model"]) == 4
    assert command("inspect", f"{tmp_path}/bucket@3@1", "--json").json["seq"] == 1


@pytest.mark.parametrize("name", ["log", "inspect", "verify"])
def test_what_is_no_bucket_is_told_by_its_kind(command, tmp_path, name):
    result = command(name, tmp_path / "nowhere", "--json")
    assert result.json["error"]["type"] == "BucketNotFoundError"
    assert "no such folder" in result.json["error"]["message"]
    (tmp_path / "LATEST").write_bytes(b'{"format":7}')
    result = command(name, tmp_path, "--json")
    assert result.code == 1 and result.json["error"]["type"] == "UnsupportedFormatError"


@pytest.mark.parametrize("name", ["log", "inspect", "verify", "report"])
def test_a_folder_beside_a_run_is_told(command, bucket, name):
    """The folder above the bucket, and one inside it."""
    for folder in (bucket.parent, bucket / "versions"):
        result = command(name, folder)
        assert result.code == (name != "log") and f"{bucket} holds a run" in result.err
    alone = bucket.parent / "deep" / "alone"
    alone.mkdir(parents=True)
    assert "nothing has been published yet" in command(name, alone).err
    assert "holds a run" not in command(name, alone).err


def test_log_without_its_table_is_no_shortened_chain(command, bucket, run):
    run.store.delete([run.reader().latest().table.key])
    result = command("log", bucket, "--json")
    assert result.code == 1 and "tables/" in result.json["error"]["message"]
    assert "have been removed:" not in result.err
