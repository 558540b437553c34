# SPDX-License-Identifier: Apache-2.0
"""A version in several objects: uploaded by many, committed by one, merged by readers with every check."""

from pathlib import Path

import numpy as np
import pytest
from faulty_store import FaultyStore

from delta_wire import encodings
from delta_wire.bucket import BucketWriter
from delta_wire.encodings.blob import read
from delta_wire.errors import FormatError, StoreError, WriterConflictError
from delta_wire.manifest import DeltaPart, Manifest, manifest_key
from delta_wire.parts import Part, merge, upload_part
from delta_wire.replay import checkout, materialise, verify
from delta_wire.shards import MAX_SHARDS, WHOLE, Shard
from delta_wire.state import Delta, TensorDelta, TensorSpec, TensorTable, resolve
from delta_wire.stores.memory import MemoryStore

ENCODINGS = ["plain", "packed", "context"]


def tensor(indices: list[int], new: list[int], old: list[int] | None = None, name: str = "w") -> TensorDelta:
    return TensorDelta(
        name,
        np.array(indices, np.int32),
        np.array(new, np.uint16),
        None if old is None else np.array(old, np.uint16),
    )


def share(delta: Delta, table: TensorTable, shard: Shard) -> Delta:
    part = {}
    for name, changes in delta.items():
        start, stop = shard.span(table[name])
        own = (start <= changes.indices) & (changes.indices < stop)
        if own.any():
            part[name] = TensorDelta(name, changes.indices[own], changes.new[own], changes.old[own])
    return part


def old_state(run, delta: Delta) -> dict[str, np.ndarray]:
    before = {name: bits.copy() for name, bits in run.bits.items()}
    for name, part in delta.items():
        before[name].reshape(-1)[part.indices] = part.old
    return before


def upload_all(run, delta: Delta, encoding: str, count: int) -> list[Part]:
    before = old_state(run, delta)
    return [
        upload_part(
            run.store,
            run.table,
            share(delta, run.table, shard),
            seq=run.writer.next_seq,
            encoding=encoding,
            old_bits=shard.old_bits(before.__getitem__, run.table),
            shard=shard,
        )
        for shard in (Shard(i, count) for i in range(count))
    ]


@pytest.mark.parametrize(
    ("shape", "count", "spans"),
    [
        ((10, 3), 4, [(0, 9), (9, 18), (18, 27), (27, 30)]),
        ((5,), 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        ((2, 7), 4, [(0, 7), (7, 14), (14, 14), (14, 14)]),
        ((), 2, [(0, 1), (1, 1)]),
        ((0, 4), 2, [(0, 0), (0, 0)]),
        ((3, 0), 2, [(0, 0), (0, 0)]),
    ],
)
def test_rows_are_cut_as_torch_cuts_them(shape, count, spans):
    import torch

    spec = TensorSpec("w", shape)
    assert [Shard(i, count).span(spec) for i in range(count)] == spans
    if shape and spec.num_elements:
        chunks = torch.arange(spec.num_elements).reshape(shape).chunk(count)
        found = [(int(chunk.flatten()[0]), int(chunk.flatten()[-1]) + 1) for chunk in chunks]
        assert found == [span for span in spans if span[0] < span[1]]
    table = TensorTable([spec, TensorSpec("other", (4,))])
    assert sum(Shard(i, count).table(table).num_params for i in range(count)) == table.num_params


@pytest.mark.parametrize(
    "text", ["", "1", "1/1", "2/2", "-1/2", "01/2", "0/02", "0/0", " 0/2", "0/10001", "0/2/4", "٠/2"]
)
def test_no_shard(text: str):
    with pytest.raises(FormatError, match=r"object: .*shard"):
        Shard.parse(text, "object")
    assert Shard.parse(f"{MAX_SHARDS - 1}/{MAX_SHARDS}", "object") == Shard(MAX_SHARDS - 1, MAX_SHARDS)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 100])
def test_parts_are_read_back(run, encoding: str, count: int, tmp_path: Path):
    for _ in range(2):
        delta, digest = run.next_delta(per_tensor=8)
        parts = upload_all(run, delta, encoding, count)
        published = run.writer.commit(parts, step=run.seed)
        assert published.manifest.digest == digest and run.writer.digest == digest
        assert published.manifest.changed_params == 24
        assert published.delta_bytes == sum(part.ref.size_bytes for part in parts if part.changed_params)
    assert all(check.ok for check in verify(run.reader()))
    with materialise(run.reader(), run.reader().latest()) as state:
        assert all(np.array_equal(state.bits(name), bits) for name, bits in run.bits.items())
    assert checkout(run.reader(), run.reader().latest(), tmp_path / "out").is_dir()


@pytest.mark.parametrize("encoding", ["packed", "context"])
def test_positions_are_coded_in_the_rows_of_the_shard(encoding: str, tmp_path: Path):
    rng = np.random.default_rng(0)
    table = TensorTable([TensorSpec("w", (64, 4096))])
    old = rng.integers(0x3C00, 0x3D00, table["w"].num_elements).astype(np.uint16)
    sizes = {}
    for shard in (Shard(5, 64), WHOLE):
        start, stop = Shard(5, 64).span(table["w"])
        indices = np.sort(rng.choice(np.arange(start, stop), 400, replace=False)).astype(np.int32)
        delta = {"w": TensorDelta("w", indices, old[indices] + np.uint16(1), old[indices])}
        path = tmp_path / f"{shard.count}"
        encodings.get(encoding).encode(delta, table, path, 1, shard.old_bits(lambda _: old, table), shard)
        assert read(path, encoding, "file")[1] == shard
        decoded = encodings.get(encoding).decode(path, table, "file", lambda _: old)["w"]
        assert np.array_equal(decoded.indices, indices) and decoded.indices.dtype == np.int32
        assert np.array_equal(resolve(decoded, old[indices]).new, old[indices] + 1)
        sizes[shard] = path.stat().st_size
    # six bits less for each position
    assert sizes[WHOLE] - sizes[Shard(5, 64)] > 400 * 4 / 8


def test_rows_of_a_shard_beyond_what_int32_reaches(tmp_path: Path):
    table = TensorTable([TensorSpec("large", (1 << 20, 1 << 13)), TensorSpec("small", (8, 2))])
    shard = Shard(3, 4)
    start, _ = shard.span(table["large"])
    indices = np.array([start, start + 1, (1 << 33) - 1])
    delta = {
        "large": TensorDelta("large", indices, np.array([1, 2, 3], np.uint16), np.array([4, 5, 6], np.uint16)),
        "small": tensor([12, 15], [7, 8], [9, 10], "small"),
    }
    encodings.get("packed").encode(delta, table, tmp_path / "file", 1, None, shard)
    decoded = encodings.get("packed").decode(tmp_path / "file", table, "file")
    assert decoded["large"].indices.tolist() == indices.tolist() and decoded["large"].indices.dtype == np.int64
    assert decoded["small"].indices.tolist() == [12, 15] and decoded["small"].indices.dtype == np.int32


@pytest.mark.parametrize("encoding", ["packed", "context"])
def test_changes_outside_of_the_shard_are_refused(run, encoding: str):
    delta, _ = run.next_delta()
    with pytest.raises(FormatError, match="shard 1/2 has elements 64 to 127, found changes from"):
        upload_part(
            run.store,
            run.table,
            {"embed.weight": tensor([63, 64], [1, 2], [3, 4], "embed.weight")},
            seq=1,
            encoding=encoding,
            old_bits=run.bits.__getitem__,
            shard=Shard(1, 2),
        )
    assert delta and run.reader().latest().version.seq == 0


def test_parts_that_interleave_are_sorted():
    first = TensorDelta("w", np.array([1, 5, 9], np.int32), np.array([1, 2, 3], np.uint16))
    second = TensorDelta(
        "w", np.array([0, 6], np.int32), np.array([4, 5], np.uint16), relative=np.array([True, False])
    )
    merged = merge([{"w": first, "v": tensor([3], [6], name="v")}, {"w": second}, {}], ["a", "b", "c"])
    assert merged["w"].indices.tolist() == [0, 1, 5, 6, 9] and merged["w"].new.tolist() == [4, 1, 2, 5, 3]
    assert merged["w"].relative.tolist() == [True, False, False, False, False]
    assert merged["v"].indices.tolist() == [3]


@pytest.mark.parametrize("others", [[5], [4, 5, 6], [0, 5]])
def test_parts_that_overlap_are_refused_by_name(others: list[int]):
    first, second = tensor([1, 5, 9], [1, 2, 3]), tensor(others, [2] * len(others))
    with pytest.raises(FormatError, match="two: tensor w: element 5 is also in one; the parts of a delta must not"):
        merge([{"v": tensor([5], [1], name="v")}, {"w": first}, {"w": second}], ["zero", "one", "two"])


def forge(run, manifest: Manifest, objects) -> Manifest:
    """The same version with other objects."""
    forged = Manifest(
        **{
            name: getattr(manifest, name)
            for name in ("version", "digest", "table", "num_params", "changed_params", "step", "created_unix_s")
        },
        parent=manifest.parent,
        delta=DeltaPart(manifest.delta.encoding, tuple(objects)),
        anchor=None,
    )
    run.store.put(manifest_key(manifest.version.seq), forged.to_bytes())
    return run.reader().manifest(manifest.version.seq)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_missing_doubled_or_foreign_part_is_refused(run, encoding: str, tmp_path: Path):
    delta, _ = run.next_delta(per_tensor=8)
    parts = upload_all(run, delta, encoding, 3)
    manifest = run.writer.commit(parts, step=1).manifest
    before = old_state(run, delta)
    refs = [part.ref for part in parts]
    again = upload_part(
        run.store,
        run.table,
        share(delta, run.table, Shard(1, 3)),
        seq=1,
        encoding=encoding,
        old_bits=before.__getitem__ if encoding == "context" else None,
        shard=WHOLE,
    )
    if encoding != "plain":
        overlapping = forge(run, manifest, [*refs, again.ref])
        with pytest.raises(FormatError, match=r"tensor .*: element \d+ is also in .*deltas/000000000001"):
            run.reader().fetch_delta(overlapping, tmp_path, before.__getitem__)
    with pytest.raises(FormatError, match="changed_params is 24, the delta has only"):
        run.reader().fetch_delta(forge(run, manifest, refs[:2]), tmp_path, before.__getitem__)
    with pytest.raises(FormatError, match="listed twice"):
        forge(run, manifest, [*refs, refs[0]])
    run.store.put(refs[2].key, b"torn")
    with pytest.raises(FormatError, match=f"{refs[2].key}: expected {refs[2].size_bytes} bytes"):
        run.reader().fetch_delta(forge(run, manifest, refs), tmp_path, before.__getitem__)


def test_more_bytes_than_any_parts_take_are_refused(run, tmp_path: Path):
    delta, _ = run.next_delta()
    manifest = run.writer.commit(upload_all(run, delta, "packed", 2), step=1).manifest
    large = [type(ref)(ref.key, 1 << 30, ref.sha256) for ref in manifest.delta.objects]
    with pytest.raises(FormatError, match=r"at most \d+ in 2 objects"):
        run.reader().fetch_delta(forge(run, manifest, large), tmp_path)


@pytest.mark.parametrize("density", [0.001, 0.5, 1.0])
@pytest.mark.parametrize("count", [2, 50])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_honest_parts_are_never_too_large(encoding: str, count: int, density: float, tmp_path: Path):
    """Interleaved, which costs more than rows."""
    rng = np.random.default_rng(1)
    table = TensorTable([TensorSpec("w", (256, 256)), TensorSpec("b", (256,))])
    total = 0
    old = {name: rng.integers(0, 1 << 16, spec.num_elements).astype(np.uint16) for name, spec in table.items()}
    for at in range(count):
        delta: Delta = {}
        for name, spec in table.items():
            indices = np.arange(at, spec.num_elements, count, dtype=np.int32)
            indices = indices[rng.random(indices.size) < density]
            if indices.size:
                delta[name] = TensorDelta(name, indices, ~old[name][indices], old[name][indices])
        whole = old.__getitem__ if encoding == "context" else None
        encodings.get(encoding).encode(delta, table, tmp_path / "file", 1, whole)
        total += (tmp_path / "file").stat().st_size
    assert total <= encodings.get(encoding).max_bytes(table, count)


class Flaky(FaultyStore):
    """Writes, and loses the answer."""

    def put(self, key: str, data: bytes | Path, *, create_only: bool = False) -> None:
        MemoryStore.put(self, key, data, create_only=create_only)
        if self.fault is not None:
            self.fault(key)


@pytest.mark.parametrize("store", [FaultyStore, Flaky])
@pytest.mark.parametrize("prefix", ["versions/", "LATEST"])
def test_a_commit_is_repeated_until_its_outcome_is_known(tools, base: Path, store: type[FaultyStore], prefix: str):
    run = tools.Run(store(), base)
    delta, digest = run.next_delta()
    parts = upload_all(run, delta, "packed", 2)

    def fault(key: str) -> None:
        if key.startswith(prefix):
            raise StoreError(f"{key}: no answer")

    run.store.fault = fault
    with pytest.raises(StoreError, match="no answer"):
        run.writer.commit(parts, step=1)
    with pytest.raises(ValueError, match="must be settled first"):
        run.writer.commit(parts[:1], step=1)
    run.store.fault = None
    published = run.writer.commit(parts, step=1)
    assert published.manifest.version.seq == 1 and run.writer.next_seq == 2
    assert run.reader().latest().digest == digest
    delta, digest = run.next_delta()
    run.writer.commit(upload_all(run, delta, "packed", 2), step=2)
    assert run.reader().latest().digest == digest and all(check.ok for check in verify(run.reader()))


def test_a_commit_after_another_writer_is_refused(run):
    other = BucketWriter.start(run.store, table=run.table, digest=run.base_digest, reference=str(run.base))
    delta, digest = run.next_delta()
    parts = upload_all(run, delta, "packed", 2)
    other.publish(delta, digest=digest, step=1, encoding="plain")
    with pytest.raises(WriterConflictError):
        run.writer.commit(parts, step=1)
