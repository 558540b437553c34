# SPDX-License-Identifier: Apache-2.0
"""Hostile buckets: every object broken in every way, and read as a server reads it.

    python benchmarks/fuzz.py --count 10000 --json

Data files of all encodings, anchors, manifests, pointers, tensor tables and acks are changed, blindly or by somebody
who knows the format, and mostly signed off with the right hashes, so that nothing but the reader itself can notice. A
case is all right if it is refused with one of our errors, or if it leads to exactly the bits of the version that it
says it is. Anything else is a failure: other bits, another exception, a crash, more than 5 s, more memory than a small
bound, an index out of range. `--boundscheck` compiles the kernels with a check of every access, which takes a minute
more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if "--boundscheck" in sys.argv:
    os.environ["NUMBA_BOUNDSCHECK"] = "1"
    os.environ["NUMBA_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "delta-fuzz-numba")

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import mutations

from delta_wire.acks import Ack
from delta_wire.anchors import stream_anchor
from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.digest import Digest, digest_tensor
from delta_wire.errors import BaseMismatchError, DeltaError, DigestMismatchError
from delta_wire.machine import measured
from delta_wire.manifest import POINTER_KEY, Manifest, manifest_key, table_key
from delta_wire.parts import upload_part
from delta_wire.replay import State
from delta_wire.shards import Shard
from delta_wire.state import Delta, TensorDelta, TensorSpec, TensorTable, change_of_digest, resolve
from delta_wire.stores.memory import MemoryStore

SHAPES = {"embed.weight": (40, 16), "norm.weight": (16,), "proj.weight": (16, 48), "scale": ()}
_MAX_S = 5.0
_MAX_EXTRA_BYTES = 1 << 30
_KINDS = ("plain", "packed", "context", "parts", "anchor", "manifest", "pointer", "table", "ack")
Bits = dict[str, np.ndarray]


class Corpus:
    """A run with one version of every kind, all of whose states are known."""

    def __init__(self) -> None:
        self.store = MemoryStore(f"fuzz-{os.getpid()}")
        self.store.ensure()
        self._random = np.random.default_rng(5)
        self.table = TensorTable(TensorSpec(name, shape) for name, shape in SHAPES.items())
        bits = {name: self._random.integers(0, 0x7F00, shape).astype(np.uint16) for name, shape in SHAPES.items()}
        self.bits: Bits = {name: np.asarray(array, dtype=np.uint16).copy() for name, array in bits.items()}
        self.digest = sum((digest_tensor(name, array) for name, array in self.bits.items()), Digest())
        # states by digest
        self.states: dict[str, Bits] = {}
        self.version_of: dict[str, Manifest] = {}
        self._keep()
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            self._write_base(base)
            self.writer = BucketWriter.start(
                self.store, table=self.table, digest=self.digest, reference=None, anchor_dir=base
            )
        for encoding in ("plain", "packed", "context"):
            self._publish(encoding, encoding, 6)
            self._publish(encoding, f"{encoding}_dense", 400)
        self._publish_parts()
        self._publish_anchor()
        self.objects = {info.key: self.store.get(info.key, 1 << 30) for info in self.store.list("")}
        ack = Ack("one", self.writer.version, self.digest, "serving", None, 1.5, 1.7e9)
        self.ack = ack.to_bytes()

    def _write_base(self, folder: Path) -> None:
        from delta_wire.container import write_tensors

        tensors = {name: ("BF16", array.shape, array) for name, array in self.bits.items()}
        write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
        (folder / "config.json").write_text("{}")

    def _keep(self) -> None:
        self.states[str(self.digest)] = {name: array.copy() for name, array in self.bits.items()}

    def _change(self, per_tensor: int) -> tuple[Delta, Bits]:
        old_bits = {name: array.copy() for name, array in self.bits.items()}
        delta: Delta = {}
        for name, array in self.bits.items():
            flat = array.reshape(-1)
            count = min(per_tensor, flat.size)
            indices = np.sort(self._random.choice(flat.size, count, replace=False)).astype(np.int32)
            old = flat[indices].copy()
            new = (old + self._random.integers(1, 40, count)).astype(np.uint16)
            flat[indices] = new
            delta[name] = TensorDelta(name, indices, new, old)
        self.digest = self.digest + change_of_digest(delta)
        self._keep()
        return delta, old_bits

    def _publish(self, encoding: str, label: str, per_tensor: int) -> None:
        delta, old_bits = self._change(per_tensor)
        published = self.writer.publish(
            delta, digest=self.digest, step=1, encoding=encoding, old_bits=old_bits.__getitem__
        )
        self.version_of[label] = published.manifest

    def _publish_parts(self) -> None:
        delta, _ = self._change(12)
        parts = []
        for index in range(2):
            shard = Shard(index, 2)
            own: Delta = {}
            for name, part in delta.items():
                begin, end = shard.span(self.table[name])
                inside = (part.indices >= begin) & (part.indices < end)
                if inside.any() and part.old is not None:
                    own[name] = TensorDelta(name, part.indices[inside], part.new[inside], part.old[inside])
            parts.append(upload_part(self.store, self.table, own, seq=self.writer.next_seq, shard=shard))
        self.version_of["parts"] = self.writer.commit(parts, step=2).manifest

    def _publish_anchor(self) -> None:
        delta, _ = self._change(3)
        anchor = stream_anchor(
            self.store,
            self.table,
            self.bits.__getitem__,
            seq=self.writer.next_seq,
            digest=self.digest,
            max_shard_bytes=1000,
        )
        self.version_of["anchor"] = self.writer.publish(delta, digest=self.digest, step=3, anchor=anchor).manifest


class Case:
    """One broken bucket.

    Args:
        corpus (`Corpus`): the intact one.
        rng (`random.Random`): what is done to it.
        label (`str`, *optional*): the version to break; any, otherwise.
    """

    def __init__(self, corpus: Corpus, rng: random.Random, label: str | None = None):
        self._corpus = corpus
        self._rng = rng
        self.kind = rng.choice(_KINDS)
        labels = [label for label in corpus.version_of if label.startswith(self.kind)] or list(corpus.version_of)
        self.manifest = corpus.version_of[label or rng.choice(labels)]
        self.honest = rng.random() < 0.15

    def run(self, store: MemoryStore, folder: Path) -> str:
        """Read it; `"refused"` or `"identical"`, anything else raises."""
        if self.kind == "ack":
            return self._run_ack()
        self._write(store)
        reader = BucketReader(store)
        try:
            found = self._read(reader, folder)
        except DeltaError as error:
            text = str(error)
            assert text and "\n" not in text, f"an error of one line, found {text!r}"
            return "refused"
        if found is None:
            return "refused"
        digest, bits = found
        truth = self._corpus.states.get(digest)
        assert truth is not None, f"accepted a state that was never published: {digest}"
        for name, array in truth.items():
            assert np.array_equal(bits[name].reshape(-1), array.reshape(-1)), f"other bits in {name}"
        return "identical"

    def check_intact(self, folder: Path) -> None:
        """Nothing is broken: it has to lead to the version."""
        assert self.manifest.parent is not None
        start = self.manifest.parent.digest
        bits = {name: array.copy() for name, array in self._corpus.states[str(start)].items()}
        found = self._apply(BucketReader(self._corpus.store), self.manifest, bits, start, folder)
        assert found == self.manifest.digest

    def _run_ack(self) -> str:
        raw = self._mutate(self._corpus.ack, mutations.json_text)
        try:
            ack = Ack.from_bytes(raw, "acks/one.json")
        except DeltaError:
            return "refused"
        # any server may say what it likes, but it has to be something
        assert Ack.from_bytes(ack.to_bytes(), "again") == ack
        return "identical"

    def _mutate(self, raw: bytes, aware: Callable[[bytes, random.Random], bytes]) -> bytes:
        for _ in range(self._rng.choice((1, 1, 1, 2))):
            try:
                raw = aware(raw, self._rng) if self._rng.random() < 0.65 else mutations.bytewise(raw, self._rng)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error):
                # the second change found nothing left that it knows
                raw = mutations.bytewise(raw, self._rng)
        return raw

    def _write(self, store: MemoryStore) -> None:
        """The corpus up to a version, with something broken and, unless `honest`, hashes that agree with it."""
        objects, manifest, rng = self._corpus.objects, self.manifest, self._rng
        for key, raw in objects.items():
            store.put(key, raw)
        document = json.loads(manifest.to_bytes())
        key = manifest_key(manifest.version.seq)
        raw = objects[key]
        if self.kind in ("plain", "packed", "context", "parts"):
            assert manifest.delta is not None
            ref = rng.choice(document["delta"]["objects"])
            aware = rng.choice((mutations.tensor_file, mutations.tensor_file, mutations.reordered))
            self._replace(store, ref, self._mutate(objects[ref["key"]], aware))
            if rng.random() < 0.2:
                document["changed_params"] = 1
        elif self.kind == "anchor":
            ref = rng.choice(document["anchor"]["objects"])
            aware = mutations.tensor_file if ref["key"].endswith(".safetensors") else mutations.json_text
            self._replace(store, ref, self._mutate(objects[ref["key"]], aware))
        elif self.kind == "table":
            table = self._mutate(objects[manifest.table.key], mutations.json_text)
            self._replace(store, document["table"], table)
            if not self.honest:
                document["table"]["key"] = table_key(document["table"]["sha256"])
                store.put(document["table"]["key"], table)
        if not self.honest:
            raw = json.dumps(document, separators=(",", ":")).encode()
        if self.kind == "manifest":
            raw = self._mutate(raw, mutations.json_text)
        store.put(key, raw)
        pointer = {
            "format": 1,
            "version": document["version"],
            "manifest": {"key": key, "size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()},
        }
        text = json.dumps(pointer, separators=(",", ":")).encode()
        store.put(POINTER_KEY, self._mutate(text, mutations.json_text) if self.kind == "pointer" else text)

    def _replace(self, store: MemoryStore, ref: dict[str, Any], raw: bytes) -> None:
        store.put(ref["key"], raw)
        if not self.honest:
            ref |= {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}

    def _read(self, reader: BucketReader, folder: Path) -> tuple[str, Bits] | None:
        target = reader.latest()
        if target is None:
            return None
        if self.kind == "anchor":
            state = State(reader, target, folder)
            return str(state.digest), {name: state.bits(name) for name in state.table}
        assert self.manifest.parent is not None
        start = str(self.manifest.parent.digest)
        chain = reader.chain(Digest.parse(start), target)
        if chain is None:
            return None
        bits = {name: array.copy() for name, array in self._corpus.states[start].items()}
        digest = Digest.parse(start)
        for step in chain:
            digest = self._apply(reader, step, bits, digest, folder)
        return str(digest), bits

    def _apply(self, reader: BucketReader, step: Manifest, bits: Bits, digest: Digest, folder: Path) -> Digest:
        if step.parent is None or step.parent.digest != digest:
            raise BaseMismatchError(f"version {step.version}: another base")
        fetched = reader.fetch_delta(step, folder, bits.__getitem__)
        delta: Delta = {}
        for name, part in fetched.items():
            indices, size = part.indices, bits[name].size
            assert indices.ndim == 1 and indices.dtype in (np.int32, np.int64)
            assert indices.shape == part.new.shape and part.new.dtype == np.uint16
            assert not indices.size or (indices[0] >= 0 and indices[-1] < size), "an index out of range"
            assert (np.diff(indices.astype(np.int64)) > 0).all(), "indices that do not ascend"
            delta[name] = resolve(part, bits[name].reshape(-1)[indices])
        found = digest + change_of_digest(delta)
        if found != step.digest:
            raise DigestMismatchError(f"version {step.version}: another result")
        for name, part in delta.items():
            bits[name].reshape(-1)[part.indices] = part.new
        return found


def work(connection: Connection, seed: int, numbers: range) -> None:
    """Go through cases in a process of its own; what is written last is what it died of."""
    logging.disable(logging.CRITICAL)
    corpus = Corpus()
    with tempfile.TemporaryDirectory(prefix="delta-fuzz-") as name:
        # what has to be compiled is compiled before the clock runs, and what is intact is read
        for label in corpus.version_of:
            Case(corpus, random.Random(0), label).check_intact(Path(name))
        _bound_memory()
        for number in numbers:
            connection.send(("case", number))
            case = Case(corpus, random.Random(f"{seed}-{number}"))
            store = MemoryStore(f"fuzz-case-{os.getpid()}")
            store.drop()
            store.ensure()
            began_s = time.monotonic()
            try:
                outcome = case.run(store, Path(name))
            except BaseException as error:
                outcome = f"{case.kind}: {type(error).__name__}: {error}"[:500]
            if time.monotonic() - began_s > _MAX_S:
                outcome = f"{case.kind}: took {time.monotonic() - began_s:.1f} s"
            connection.send((case.kind, outcome))
        connection.send(("end", None))


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MAX_EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--boundscheck", action="store_true", help="check every access of the kernels")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    began_s = time.monotonic()
    outcomes: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    number = 0
    context = multiprocessing.get_context("spawn")
    while number < args.count:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, args.seed, range(number, args.count)), daemon=True)
        process.start()
        theirs.close()
        while True:
            # the first case waits for imports and compilation
            try:
                kind, value = ours.recv() if ours.poll(_MAX_S + 5 if by_kind else 300) else ("hang", None)
            except EOFError:
                kind, value = "crash", None
            if kind == "case":
                number = value
                continue
            if kind == "end":
                number = args.count
                break
            if kind in ("hang", "crash"):
                process.kill()
                process.join()
                failures.append({"case": number, "problem": f"{kind}, exit code {process.exitcode}"})
                number += 1
                break
            by_kind[kind] += 1
            if value in ("refused", "identical"):
                outcomes[value] += 1
            else:
                failures.append({"case": number, "problem": value})
        process.join()
    report = {
        "cases": outcomes.total() + len(failures),
        "seed": args.seed,
        "boundscheck": args.boundscheck,
        "failures": len(failures),
        "refused": outcomes["refused"],
        "identical": outcomes["identical"],
        "by_kind": dict(sorted(by_kind.items())),
        "wall_s": round(time.monotonic() - began_s, 1),
        "problems": failures[:20],
        "measured": measured(),
    }
    print(json.dumps(report, indent=None if args.json else 2))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
