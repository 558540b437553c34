# SPDX-License-Identifier: Apache-2.0
"""What every command owes its callers: exit codes, one JSON object, one line of error, quiet ends."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from delta_wire.cli import cli
from delta_wire.commands import common
from delta_wire.replay import verify
from delta_wire.stores.local import LocalStore

# a call of each command that succeeds, and one that is refused; {bucket}, {tmp} and {scripts} are filled in
SUCCESS = {
    "log": ["{bucket}"],
    "inspect": ["{bucket}@2"],
    "verify": ["{bucket}"],
    "checkout": ["{bucket}@latest", "{tmp}/out"],
    "diff": ["{bucket}@1", "{bucket}@3"],
    "watch": ["{bucket}", "--once"],
    "doctor": ["{bucket}"],
    "report": ["{bucket}", "--output", "{tmp}/report"],
    "gc": ["{bucket}", "--dry-run"],
    "keygen": ["{tmp}/run.key"],
    "bench": ["extract", "--dir", "{scripts}"],
    "completion": ["bash"],
}
REFUSED = {
    "log": ["{tmp}/nowhere"],
    "inspect": ["{bucket}@99"],
    "verify": ["{tmp}/nowhere"],
    "checkout": ["{bucket}@99", "{tmp}/out"],
    "diff": ["{bucket}@1", "{bucket}@99"],
    "watch": ["{tmp}/nowhere", "--once"],
    "doctor": ["{tmp}/nowhere"],
    "report": ["{tmp}/nowhere"],
    "gc": ["{tmp}/nowhere", "--yes"],
    "keygen": ["{tmp}/nowhere/run.key"],
    "bench": ["payload", "--dir", "{scripts}"],
}
WRONG = {
    "log": ["{bucket}", "--limit", "-1"],
    "inspect": [],
    "verify": ["{bucket}", "--base", "{tmp}/nowhere"],
    "checkout": ["{bucket}", "{tmp}/out"],
    "diff": ["{bucket}@1"],
    "watch": [],
    "doctor": ["--serve", "'"],
    "report": ["{bucket}", "--limit", "0"],
    "gc": ["{bucket}"],
    "keygen": [""],
    "bench": ["nothing"],
    "completion": ["tcsh"],
}
# keys of each command's object and the types of their values
SCHEMA = {
    "log": {"bucket": str, "run": str, "versions": list},
    "inspect": {
        "version": str,
        "seq": int,
        "changed_frac": float,
        "delta_bytes": int,
        "encoding": str,
        "tensors": list,
    },
    "verify": {"bucket": str, "ok": bool, "versions": list},
    "checkout": {"version": str, "digest": str, "folder": str},
    "diff": {"a": str, "b": str, "equal": bool, "num_params": int, "changed_params": int, "tensors": list},
    "watch": {"unix_s": float, "servers": list},
    "doctor": {"ok": bool, "findings": list},
    "report": {"page": str, "pictures": dict, "data": dict},
    "gc": {"bucket": str, "dry_run": bool, "newest": str, "oldest_kept": str, "delete": list, "kept_bytes": int},
    "keygen": {"private_key_file": str, "public_key": str},
    "bench": {"results": dict, "failed": dict},
    "completion": {"shell": str, "script": str},
}


@pytest.fixture
def fill(bucket, run, tmp_path):
    """The arguments of a call, with a fleet in the bucket and a folder of benchmarks."""
    from delta_wire.manifest import Ack

    run.reader().write_ack(Ack("server-1", run.writer.version, run.writer.digest, "serving", None, 2.0, 1.0))
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    numbers = {"135M": {"ours_s": 0.1, "speedup_vs_blog": 8.0, "copy_s": 0.05}}
    (scripts / "extract.py").write_text(f"print('starting')\nprint('''{json.dumps(numbers)}''')\n")
    (scripts / "payload.py").write_text("raise SystemExit('payload: no memory')\n")

    def arguments(calls, name):
        return [word.format(bucket=bucket, tmp=tmp_path, scripts=scripts) for word in calls[name]]

    return arguments


def test_the_tables_of_this_file_know_every_command():
    assert set(cli.commands) == set(SUCCESS) == set(WRONG) == set(SCHEMA)


@pytest.mark.parametrize("name", SUCCESS)
def test_success(command, fill, name):
    result = command(name, *fill(SUCCESS, name))
    assert result.code == 0 and result.out.strip() and "error" not in result.err


@pytest.mark.parametrize("name", SUCCESS)
def test_json(command, fill, name):
    result = command(name, *fill(SUCCESS, name), "--json")
    assert result.code == 0 and result.out.count("\n") == 1
    for key, kind in SCHEMA[name].items():
        assert type(result.json[key]) is kind, key


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_object_and_one_line(command, fill, name):
    result = command(name, *fill(REFUSED, name))
    assert result.code == 1 and "Traceback" not in result.err
    result = command(name, *fill(REFUSED, name), "--json")
    assert result.code == 1
    if name == "doctor":
        assert result.json["ok"] is False
    elif name == "bench":
        assert "payload.py ended with exit code 1" in result.json["failed"]["payload"]
    else:
        message = result.json["error"]["message"]
        assert result.json["error"]["type"].endswith("Error") and result.err == f"error: {message}\n"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_usage_is_told_on_both_outputs(command, fill, name):
    result = command(name, *fill(WRONG, name))
    assert result.code == 2 and result.out == "" and "Usage: delta-wire" in result.err
    result = command(name, *fill(WRONG, name), "--json")
    assert result.code == 2 and result.json["error"]["message"] and result.out.count("\n") == 1
    assert "Usage: delta-wire" in result.err


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, ["--json"]) for name in SUCCESS] + [(name, []) for name in ("log", "inspect", "verify", "diff")],
)
def test_a_closed_pipe_is_no_traceback(delta_wire_process, fill, name, form):
    read, write = os.pipe()
    os.close(read)
    try:
        process = delta_wire_process(name, *fill(SUCCESS, name), *form, stdout=write, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=120)
    finally:
        os.close(write)
    assert process.returncode == 1 and "Traceback" not in err and "BrokenPipe" not in err and "Exception" not in err


@pytest.mark.parametrize(
    "arguments", [["log", "{bucket}"], ["log", "{bucket}", "--json"], ["log", "/nowhere", "--json"]]
)
def test_a_full_disk_behind_standard_output_is_one_line(delta_wire_process, bucket, arguments):
    with open("/dev/full", "w") as full:
        words = [word.format(bucket=bucket) for word in arguments]
        process = delta_wire_process(*words, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "No space left" in err
    assert "Traceback" not in err and "Exception ignored" not in err and err.count("error:") == 1


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_stream_that_the_caller_has_closed(bucket, closed):
    """As `delta-wire … >&-` in a shell."""
    words = [sys.executable, "-c", "from delta_wire.cli import main; main()", "log", str(bucket)]
    code = f"import os; os.close({closed}); os.execv({words[0]!r}, {words!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert (str(bucket) in done.stdout) is (closed != 1)


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300", "-1", "soon"])
@pytest.mark.parametrize(
    "words",
    [
        ["log", "--follow", "--interval"],
        ["watch", "--interval"],
        ["gc", "--yes", "--grace"],
        ["gc", "--yes", "--lease"],
    ],
)
def test_seconds_that_are_none(command, bucket, words, seconds):
    result = command(*words, seconds, bucket, "--json")
    assert result.code == 2 and f"'{words[-1]}'" in result.json["error"]["message"]


@pytest.mark.parametrize("name", ["log", "verify", "watch", "report"])
def test_a_version_where_a_bucket_is_expected_is_told(command, bucket, name):
    result = command(name, f"{bucket}@1", "--json")
    assert result.code == 2 and "BUCKET without @VERSION" in result.json["error"]["message"]


def test_usage_of_the_whole(command, bucket):
    assert command("--version").out.startswith("delta-wire, version")
    assert "Usage" in command().err
    result = command("nothing", "--json")
    assert result.code == 2 and "nothing" in result.json["error"]["message"]
    for name in cli.commands:
        text = command(name, "--help").out
        assert "Example" in text and text.startswith("Usage: delta-wire"), name


def test_checkout_does_not_take_an_empty_name_for_this_folder(command, bucket, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    result = command("checkout", f"{bucket}@latest", "", "--json")
    assert result.code == 2 and "FOLDER is empty" in result.json["error"]["message"]
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("arguments", [["log", "--follow"], ["watch"]])
def test_an_interrupt_is_one_word(delta_wire_process, bucket, arguments):
    name, *options = arguments
    process = delta_wire_process(name, bucket, *options, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # it has begun
    assert process.stdout.readline().startswith("{")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.strip() == "interrupted"


# nothing of these takes long
SHORT = {"keygen", "completion"}


@pytest.mark.parametrize("name", [name for name in SUCCESS if name not in SHORT])
def test_what_may_take_long_shows_how_far_it_is(command, fill, monkeypatch, name):
    """One line at a time, and nothing is read from the bucket without one."""
    lines, open_now, blind = [], [], []

    @contextlib.contextmanager
    def recorded(label):
        assert not open_now, f"{label!r} inside {open_now[0]!r}: two lines in one place"
        open_now.append(label)
        lines.append(label)
        yield common.Progress(label)
        open_now.pop()

    get, here = LocalStore.get, threading.get_ident()

    def watched(store, key, max_bytes):
        if not open_now and threading.get_ident() == here:
            blind.append(key)
        return get(store, key, max_bytes)

    for module in (common, importlib.import_module(f"delta_wire.commands.{name}")):
        monkeypatch.setattr(module, "progress", recorded)
    monkeypatch.setattr(LocalStore, "get", watched)
    assert command(name, *fill(SUCCESS, name)).code == 0
    assert lines and not blind


# with what a later call finds if an earlier one was interrupted
TOUCHING = {name: SUCCESS[name] for name in ("log", "inspect", "verify", "checkout", "diff", "watch", "doctor")} | {
    "report": ["{bucket}", "--output", "{tmp}/out"],
    "gc": ["{bucket}", "--grace", "0", "--yes"],
}


@pytest.mark.parametrize("name", TOUCHING)
def test_an_interrupt_at_any_access_of_the_bucket_leaves_nothing_half_done(
    command, fill, run, tmp_path, monkeypatch, name
):
    if name == "gc":
        # something to remove
        run.publish_anchor()
        run.publish_anchor()
    arguments = fill(TOUCHING, name)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    calls = stop_at = 0
    here = threading.get_ident()

    def stopping(method):
        def call(store, first, *others, **options):
            nonlocal calls
            # threads that other tests have left follow buckets of their own
            if threading.get_ident() == here:
                calls += 1
            if calls != stop_at or threading.get_ident() != here:
                return method(store, first, *others, **options)
            if method.__name__ == "delete":
                # in the middle of it
                method(store, first[:1])
            raise KeyboardInterrupt

        return call

    with monkeypatch.context() as patch:
        for method in ("get", "get_file", "put", "list", "delete", "exists"):
            patch.setattr(LocalStore, method, stopping(getattr(LocalStore, method)))
        while stop_at <= calls:
            calls, stop_at = 0, stop_at + 1
            result = command(name, *arguments)
            interrupted = calls == stop_at
            assert result.code == (130 if interrupted else 0) and "Traceback" not in result.err
            assert ("interrupted" in result.err) is interrupted
            assert not (tmp_path / "out").exists() or not interrupted
            assert not list((tmp_path / "temporary").iterdir())
    assert stop_at > 2 and all(check.ok for check in verify(run.reader()))


IMPORT = """
import os, signal, sys

class Interrupt:
    # the first module of the command that is looked for
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from delta_wire.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["click", "delta_wire.commands.log", "delta_wire.describe"])
def test_an_interrupt_while_modules_are_loaded_is_one_word(bucket, module):
    words = [sys.executable, "-c", IMPORT.format(module=module), "log", str(bucket)]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stderr.strip() == "interrupted"


def test_an_error_of_the_system_is_not_blamed_on_standard_output(command, tmp_path, monkeypatch):
    """A relative address in a folder that somebody has removed."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = command("log", "bucket", "--json")
    assert result.code == 1 and result.json["error"]["type"] == "FileNotFoundError"
    assert result.err == f"error: {result.json['error']['message']}\n" and "output" not in result.err


def test_following_goes_on_into_a_closed_pipe_quietly(delta_wire_process, bucket, run):
    process = delta_wire_process(
        "log", bucket, "--follow", "--interval", 0.1, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    # the next version has nowhere to go
    run.publish()
    assert process.wait(60) == 1
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_command(command, shell):
    result = command("completion", shell)
    assert result.code == 0 and "_DELTA_WIRE_COMPLETE" in result.out and "delta-wire" in result.out


def test_completion_completes(delta_wire_process):
    environment = os.environ | {
        "_DELTA_WIRE_COMPLETE": "bash_complete",
        "COMP_WORDS": "delta-wire ver",
        "COMP_CWORD": "1",
    }
    process = delta_wire_process(env=environment, stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=60)
    assert out.split() == ["plain,verify"]


def test_help_does_not_load_numpy():
    code = (
        "import sys, contextlib\nimport delta_wire.cli as c\nsys.argv = ['delta-wire', '--help']\n"
        "with contextlib.suppress(SystemExit):\n    c.main()\n"
        "assert not {'numpy', 'numba', 'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd="/", check=True, timeout=60, stdout=subprocess.DEVNULL)
