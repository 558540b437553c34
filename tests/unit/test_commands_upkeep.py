# SPDX-License-Identifier: Apache-2.0
"""`delta-wire gc`, `bench` and `keygen`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from delta_wire.commands.bench import BENCHMARKS, _rows


@pytest.fixture
def long_run(run):
    """Versions 0 to 8, with anchors at 3 and 6."""
    from delta_wire.anchors import stream_anchor

    for seq in range(1, 9):
        if seq not in (3, 6):
            run.publish()
            continue
        delta, digest = run.next_delta()
        bits = run.bits.__getitem__
        anchor = stream_anchor(run.store, run.table, bits, seq=seq, digest=digest, files=run.base)
        run.writer.publish(delta, digest=digest, step=seq, anchor=anchor)
    return run


def test_gc_removes_what_no_reader_needs(command, long_run, tmp_path):
    bucket = long_run.store.root
    # what was made a moment ago stays for an hour
    result = command("gc", bucket, "--dry-run", "--json")
    assert result.code == 0 and result.json["delete"] == [] and result.json["waiting"] > 0
    before = {info.key for info in long_run.store.list("")}
    dry = command("gc", bucket, "--dry-run", "--grace", 0, "--json").json
    assert dry["deleted"] == 0 and dry["oldest_kept"].endswith("-3") and dry["newest"].endswith("-8")
    assert {info.key for info in long_run.store.list("")} == before
    text = command("gc", bucket, "--dry-run", "--grace", 0)
    assert "deltas/000000000001-" in text.out and "would remove" in text.err
    result = command("gc", bucket, "--grace", 0, "--yes", "--json").json
    assert result["delete"] == dry["delete"] and result["deleted"] == len(dry["delete"])
    after = {info.key for info in long_run.store.list("")}
    assert before - after == {entry["key"] for entry in dry["delete"]}
    assert command("verify", bucket).code == 0
    assert command("checkout", f"{bucket}@3", tmp_path / "three").code == 0
    assert command("gc", bucket, "--grace", 0, "--yes", "--json").json["delete"] == []
    assert command("gc", bucket, "--restart-points", 1, "--dry-run").code == 2


def test_gc_asks_before_it_removes(long_run):
    """On a terminal; elsewhere it wants to be told."""
    bucket = long_run.store.root
    before = {info.key for info in long_run.store.list("")}
    for answer, code in (("n", 1), ("y", 0)):
        end, other = os.openpty()
        try:
            words = [
                sys.executable,
                "-c",
                "from delta_wire.cli import main; main()",
                "gc",
                str(bucket),
                "--grace",
                "0",
            ]
            process = subprocess.Popen(
                words, cwd="/", stdin=other, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            os.write(end, f"{answer}\n".encode())
            _, err = process.communicate(timeout=60)
        finally:
            os.close(end)
            os.close(other)
        assert process.returncode == code and "Remove " in err
        assert ({info.key for info in long_run.store.list("")} == before) is (answer == "n")


def test_bench_runs_the_scripts_and_keeps_what_they_ran_on(command, tmp_path):
    result = command("bench", "payload", "--quick", "--save", tmp_path / "results", "--json")
    assert result.code == 0, result.err
    row = result.json["results"]["payload"]
    assert row["traces"][0]["encodings"]["packed"]["bytes_per_changed"] < 2
    assert row["measured"]["command"].startswith("python benchmarks/payload.py --trace benchmarks/data/")
    assert row["measured"]["machine"]["cores"] >= 1 and row["measured"]["versions"]["numpy"]
    assert json.loads((tmp_path / "results" / "payload.json").read_text()) == row
    (tmp_path / "empty").mkdir()
    text = command("bench", "extract", "--dir", tmp_path / "empty")
    assert text.code == 1 and "extract.py ended with exit code 2" in text.err
    assert "payload" in command("bench", "--list").out
    assert set(command("bench", "--list", "--json").json["benchmarks"]) >= {"payload", "pause"}


def test_the_table_of_bench_reads_the_results_that_are_kept():
    kept = {path.stem: path for path in (Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json")}
    assert kept.keys() & BENCHMARKS.keys()
    for name in kept.keys() & BENCHMARKS.keys():
        rows = _rows(name, json.loads(kept[name].read_text()))
        assert [row[2] for row in rows] == [what for _, what in BENCHMARKS[name].shown]


def test_signed_runs_are_told_from_others(command, run, tmp_path, monkeypatch):
    from delta_wire.bucket import BucketWriter
    from delta_wire.signing import Signer
    from delta_wire.stores.local import LocalStore

    for name in ("mine", "other"):
        public = command("keygen", tmp_path / f"{name}.key", "--json").json["public_key"]
        (tmp_path / f"{name}.pub").write_text(public)
    again = command("keygen", tmp_path / "mine.key", "--json")
    assert again.code == 1 and "exists already" in again.json["error"]["message"]
    store = LocalStore(tmp_path / "signed")
    store.ensure()
    signer = Signer(tmp_path / "mine.key")
    BucketWriter.start(store, table=run.table, digest=run.base_digest, reference=str(run.base), signer=signer)
    monkeypatch.setenv("DELTA_SYNC_PUBLIC_KEY", str(tmp_path / "mine.pub"))
    assert command("verify", store.root).code == 0
    # the run of the other fixture is not signed at all
    unsigned = command("log", run.store.root, "--json")
    assert unsigned.code == 1 and "the manifest is not signed" in unsigned.json["error"]["message"]
    monkeypatch.setenv("DELTA_SYNC_PUBLIC_KEY", str(tmp_path / "other.pub"))
    wrong = command("log", store.root, "--json")
    assert wrong.code == 1 and wrong.json["error"]["type"] == "SignatureError"
