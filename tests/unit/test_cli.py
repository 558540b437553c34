# SPDX-License-Identifier: Apache-2.0
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from delta_wire.checkpoint import Checkpoint
from delta_wire.cli import cli, main
from delta_wire.manifest import Ack

ARGUMENTS = [sys.executable, "-c", "from delta_wire.cli import main; main()"]


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err
        self.json = None
        if "--json" in sys.argv:
            self.json = json.loads(out)


@pytest.fixture
def command(monkeypatch, capfd):
    def call(*arguments) -> Result:
        monkeypatch.setattr(sys, "argv", ["delta-wire", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Result(caught.value.code, *capfd.readouterr())

    return call


@pytest.fixture
def bucket(run):
    for _ in range(3):
        run.publish()
    return run.store.root


def test_log(command, bucket, run):
    result = command("log", bucket, "--json")
    assert result.code == 0 and result.err == ""
    assert [version["seq"] for version in result.json["versions"]] == [3, 2, 1, 0]
    newest, oldest = result.json["versions"][0], result.json["versions"][-1]
    assert newest["step"] == run.seed and newest["changed_params"] == 9 and newest["anchor"] is None
    assert newest["changed_frac"] == 9 / run.table.num_params
    assert newest["delta_bytes"] == (bucket / run.reader().latest().delta.objects[0].key).stat().st_size
    assert newest["full_bytes"] == run.table.full_bytes and newest["age_s"] >= 0
    assert oldest["anchor"] == str(run.base) and oldest["delta_bytes"] is None
    assert len(command("log", bucket, "--json", "--limit", 2).json["versions"]) == 2
    assert len(command("log", bucket, "--json", "--limit", 0).json["versions"]) == 4
    text = command("log", bucket)
    lines = text.out.splitlines()
    assert text.code == 0 and lines[0] == f"{bucket}: run {run.writer.version.run}"
    assert lines[1].split()[:4] == ["version", "step", "changed", "delta"]
    assert lines[2].split()[0] == str(run.writer.version) and str(run.base) in lines[-1]


def test_log_of_an_empty_bucket(command, tmp_path):
    result = command("log", tmp_path, "--json")
    assert result.code == 0 and result.json == {"bucket": str(tmp_path), "run": None, "versions": []}
    result = command("log", tmp_path)
    assert result.code == 0 and result.out == "" and "nothing has been published yet" in result.err


def test_log_of_a_shortened_chain(command, bucket, run):
    from delta_wire.manifest import manifest_key

    run.store.delete([manifest_key(0), manifest_key(1)])
    result = command("log", bucket, "--json")
    assert result.code == 0 and [version["seq"] for version in result.json["versions"]] == [3, 2]
    assert "older versions have been removed" in result.err


def test_inspect_a_run(command, bucket, run):
    run.reader().write_ack(Ack("server-1", run.writer.version, run.writer.digest, "degraded", "disk full", 2.0, 1.0))
    value = command("inspect", bucket, "--json").json
    assert value["run"] == run.writer.version.run and value["latest"]["digest"] == str(run.writer.digest)
    assert value["model"]["tensors"] == 3 and value["model"]["num_params"] == run.table.num_params
    assert value["restart_point"]["seq"] == 0
    assert value["servers"][0]["server"] == "server-1" and value["servers"][0]["reason"] == "disk full"
    text = command("inspect", bucket)
    assert text.code == 0 and "server-1 degraded" in text.out and str(run.writer.digest) in text.out


def test_inspect_a_version(command, bucket, run):
    name = str(run.reader().manifest(2).version)
    for version in ("2", name, "000000000002"):
        value = command("inspect", f"{bucket}@{version}", "--json").json
        assert value["version"] == name
        assert [tensor["listed"] for tensor in value["tensors"]] == [3, 3, 3]
    assert command("inspect", f"{bucket}@latest", "--json").json["seq"] == 3
    assert command("inspect", f"{bucket}@0", "--json").json["tensors"] == []
    text = command("inspect", f"{bucket}@2")
    assert text.code == 0 and "layer.0.norm.weight" in text.out


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
    assert json.loads(again.err) == again.json
    copy = command("checkout", f"{bucket}@2", tmp_path / "two", "--base", tmp_path / "one")
    assert copy.code == 1 and "its weights are others" in copy.err


def test_a_folder_with_an_at_in_its_name(command, bucket, tmp_path):
    bucket.rename(tmp_path / "bucket@3")
    assert len(command("inspect", tmp_path / "bucket@3", "--json").json["model"]) == 4
    assert command("inspect", f"{tmp_path}/bucket@3@1", "--json").json["seq"] == 1


@pytest.mark.parametrize("name", ["log", "inspect", "verify"])
def test_errors_are_one_line_and_one_object(command, tmp_path, name):
    result = command(name, tmp_path / "nowhere")
    assert (
        result.code == 1 and result.out == "" and result.err.startswith("error: ") and "no such folder" in result.err
    )
    assert result.err.count("\n") == 1
    result = command(name, tmp_path / "nowhere", "--json")
    assert result.code == 1 and result.json["error"]["type"] == "BucketNotFoundError"
    assert json.loads(result.err) == result.json
    result = command(name, "hf://buckets/a/b", "--json")
    assert result.code == 1 and "not supported yet" in result.json["error"]["message"]
    (tmp_path / "LATEST").write_bytes(b'{"format":7}')
    result = command(name, tmp_path, "--json")
    assert result.code == 1 and result.json["error"]["type"] == "UnsupportedFormatError"


def test_usage(command, bucket, tmp_path):
    for arguments in (
        [],
        ["nothing"],
        ["log"],
        ["log", bucket, "--limit", "-1"],
        ["checkout", bucket, tmp_path / "x"],
    ):
        result = command(*arguments)
        assert result.code in (0, 2) and ("Usage" in result.err or "Usage" in result.out)
        assert result.code == 2 or not arguments
    assert "expected BUCKET@VERSION" in command("checkout", bucket, tmp_path / "x").err
    assert command("--version").out.startswith("delta-wire")
    for name in cli.commands:
        assert command(name, "--help").code == 0


def run_process(*arguments, **options):
    return subprocess.run([*ARGUMENTS, *map(str, arguments)], cwd="/", timeout=60, **options)


def test_a_closed_pipe_is_no_traceback(bucket):
    read, write = os.pipe()
    os.close(read)
    try:
        for arguments in (["log", bucket], ["verify", bucket, "--json"], ["--help"]):
            done = run_process(*arguments, stdout=write, stderr=subprocess.PIPE, text=True)
            assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr and done.returncode in (0, 1)
    finally:
        os.close(write)


def test_a_full_disk_behind_standard_output(bucket):
    with open("/dev/full", "w") as full:
        done = run_process("log", bucket, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "No space left" in done.stderr


def test_interrupt(tmp_path):
    """A pipe in place of the pointer's folder would hang a careless reader; here a slow store stands for it."""
    code = (
        "import time, delta_wire.stores.local as l; l.LocalStore.get = lambda *_: (print('ready', flush=True), "
        "time.sleep(60)); from delta_wire.cli import main; main()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "log", str(tmp_path)],
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130 and "interrupted" in err and "Traceback" not in err


def test_help_does_not_load_numpy():
    code = (
        "import sys, contextlib\nimport delta_wire.cli as c\nsys.argv = ['delta-wire', '--help']\n"
        "with contextlib.suppress(SystemExit):\n    c.main()\n"
        "assert not {'numpy', 'numba', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd="/", check=True, timeout=60, stdout=subprocess.DEVNULL)
