# SPDX-License-Identifier: Apache-2.0
"""The example that reads a delta with safetensors and numpy alone agrees with the project, bit for bit."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from delta_wire.bucket import BucketReader
from delta_wire.replay import checkout
from delta_wire.stores import open_store

SCRIPT = Path(__file__).parents[2] / "examples" / "read_a_delta.py"


def read(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], cwd="/", capture_output=True, text=True, timeout=120
    )


def checkout_of(bucket, seq, folder):
    reader = BucketReader(open_store(bucket))
    return checkout(reader, reader.manifest(seq), folder)


@pytest.mark.parametrize("encoding", ["plain", "packed"])
@pytest.mark.parametrize("per_tensor", [3, 8])
def test_it_proves_every_version(run, tools, tmp_path, encoding, per_tensor):
    from delta_wire.state import change_of_digest

    before = {name: bits.copy() for name, bits in run.bits.items()}
    delta, digest = run.next_delta(per_tensor)
    assert digest == run.writer.digest + change_of_digest(delta)
    # with all old bits at hand the smallest tensor is stored whole by `plain`
    run.writer.publish(delta, digest=digest, step=7, encoding=encoding, old_bits=before.__getitem__)
    done = read(run.store.root, "--old", run.base)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proven" in done.stdout and "optimizer step 7" in done.stdout and str(digest) in done.stdout
    # the weights after it are not those before
    after = checkout(run.reader(), run.reader().latest(), tmp_path / "after")
    done = read(run.store.root, "--old", after)
    assert done.returncode == 1 and "not the weights of the version before" in done.stderr


def test_it_refuses_what_is_damaged(run):
    run.publish()
    path = run.store.root / run.reader().latest().delta.objects[0].key
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    done = read(run.store.root)
    assert done.returncode == 1 and "the hash is not that of its manifest" in done.stderr


def test_it_joins_the_parts_of_a_version(tmp_path):
    """Tensors of which several objects list elements."""
    bucket = SCRIPT.parents[1] / "tests" / "golden" / "mixed"
    for seq in (1, 2):
        done = read(bucket, "--version", seq, "--old", checkout_of(bucket, seq - 1, tmp_path / f"old-{seq}"))
        assert "proven" in done.stdout, done.stdout + done.stderr


def test_what_is_not_there_is_named(run, tmp_path):
    done = read(tmp_path / "nowhere")
    assert done.returncode == 1 and done.stderr.startswith(
        f"{tmp_path / 'nowhere' / 'LATEST'}: there is no such object"
    )
    run.publish()
    done = read(run.store.root, "--version", 99)
    assert done.returncode == 1 and "000000000099.json: there is no such object" in done.stderr


def test_it_imports_nothing_of_the_project():
    modules = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
    assert modules - set(sys.stdlib_module_names) == {"numpy", "safetensors"}
