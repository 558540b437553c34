# SPDX-License-Identifier: Apache-2.0
"""A small run in a bucket, which the tests of the wire read, break and continue."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from delta_wire.anchors import stream_anchor
from delta_wire.bucket import BucketReader, BucketWriter, Published
from delta_wire.checkpoint import Checkpoint
from delta_wire.container import write_tensors
from delta_wire.digest import Digest, digest_tensor
from delta_wire.state import Delta, TensorDelta, change_of_digest
from delta_wire.stores import Store
from delta_wire.stores.local import LocalStore

if TYPE_CHECKING:
    from followed_run import Server

Bits = dict[str, np.ndarray]
SHAPES = {"embed.weight": (16, 8), "layer.0.norm.weight": (8,), "layer.0.proj.weight": (8, 24)}


def random_bits(seed: int = 0) -> Bits:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 1 << 16, shape).astype(np.uint16) for name, shape in SHAPES.items()}


def digest_of(bits: Bits) -> Digest:
    total = Digest()
    for name, array in bits.items():
        total = total + digest_tensor(name, array)
    return total


def write_checkpoint(folder: Path, bits: Bits, shards: int = 1) -> Path:
    """A checkpoint folder with configuration, tokenizer and things that are no part of it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(bits)
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    )
    layout = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        write_tensors(
            folder / file,
            {name: ("BF16", bits[name].shape, bits[name]) for name in names if layout[name] == file},
            {"format": "pt"},
        )
    if shards > 1:
        index = {"metadata": {"total_size": 2 * sum(array.size for array in bits.values())}, "weight_map": layout}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"file": name}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "optimizer.pt").write_bytes(b"not weights of the model")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    (folder / ".hidden").write_text("hidden")
    return folder


def change(bits: Bits, seed: int, per_tensor: int = 3) -> Delta:
    """Change `per_tensor` elements of every tensor in place and return the delta."""
    rng = np.random.default_rng(seed)
    delta: Delta = {}
    for name, array in bits.items():
        flat = array.reshape(-1)
        indices = np.sort(rng.choice(flat.size, per_tensor, replace=False)).astype(np.int32)
        old = flat[indices].copy()
        flat[indices] ^= rng.integers(1, 1 << 16, per_tensor).astype(np.uint16)
        delta[name] = TensorDelta(name, indices, flat[indices].copy(), old)
    return delta


class Run:
    """A trainer and its bucket."""

    def __init__(self, store: Store, base: Path):
        store.ensure()
        self.store = store
        self.base = base
        checkpoint = Checkpoint(base)
        self.table = checkpoint.table()
        self.bits: Bits = {name: checkpoint.bits(name).copy() for name in self.table}
        self.base_digest = checkpoint.digest()
        self.seed = 1000
        self.writer = self.start()

    def start(self) -> BucketWriter:
        return BucketWriter.start(self.store, table=self.table, digest=digest_of(self.bits), reference=str(self.base))

    def next_delta(self, per_tensor: int = 3) -> tuple[Delta, Digest]:
        self.seed += 1
        delta = change(self.bits, self.seed, per_tensor)
        return delta, digest_of(self.bits)

    def publish(self) -> Published:
        delta, digest = self.next_delta()
        assert digest == self.writer.digest + change_of_digest(delta)
        return self.writer.publish(delta, digest=digest, step=self.seed, encoding="plain")

    def publish_anchor(self) -> Published:
        """A version with a delta and an anchor, in several shards."""
        delta, digest = self.next_delta()
        anchor = stream_anchor(
            self.store,
            self.table,
            self.bits.__getitem__,
            seq=self.writer.next_seq,
            digest=digest,
            files=self.base,
            max_shard_bytes=300,
        )
        return self.writer.publish(delta, digest=digest, step=self.seed, anchor=anchor)

    def reader(self) -> BucketReader:
        return BucketReader(self.store)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", random_bits())


@pytest.fixture
def run(tmp_path: Path, base: Path) -> Run:
    return Run(LocalStore(tmp_path / "bucket"), base)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    def make(name: str = "other", shards: int = 1, seed: int = 0) -> Run:
        base = write_checkpoint(tmp_path / f"{name}-base", random_bits(seed), shards)
        return Run(LocalStore(tmp_path / f"{name}-bucket"), base)

    return make


@pytest.fixture
def tools() -> type:
    """The functions of this file, which a test cannot import."""

    class Tools:
        pass

    for function in (random_bits, digest_of, write_checkpoint, change, Run):
        setattr(Tools, function.__name__, function if isinstance(function, type) else staticmethod(function))
    return Tools


class Result:
    """What a command did; `json` is its last object if it was called with `--json`."""

    def __init__(self, code: int, out: str, err: str, as_json: bool):
        self.code, self.out, self.err = code, out, err
        self.json = json.loads(out) if as_json else None


@pytest.fixture
def command(monkeypatch, capfd) -> Callable[..., Result]:
    """Run `delta-wire` in this process, entry point and exit code included."""
    from delta_wire.cli import main

    def call(*arguments) -> Result:
        words = ["delta-wire", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as caught:
            main()
        return Result(caught.value.code, *capfd.readouterr(), as_json="--json" in words)

    return call


@pytest.fixture
def delta_wire_process() -> Callable[..., subprocess.Popen[str]]:
    """Start `delta-wire` in a process of its own, in the root folder."""

    def start(*arguments, **options) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", "from delta_wire.cli import main; main()", *map(str, arguments)]
        return subprocess.Popen(words, text=True, **({"cwd": "/"} | options))

    return start


@pytest.fixture
def bucket(run: Run) -> Path:
    """A bucket with versions 0 to 3."""
    for _ in range(3):
        run.publish()
    return run.store.root


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """A server that has not looked at its bucket yet."""
    from followed_run import Server

    return Server(tmp_path)


@pytest.fixture
def following(server: Server) -> Server:
    """A server that follows a run."""
    server.writer = server.training.start()  # type: ignore[attr-defined]
    assert server.step()["state"] == "serving"
    return server
