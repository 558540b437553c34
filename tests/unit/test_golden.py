# SPDX-License-Identifier: Apache-2.0
"""The format does not move: golden buckets written again are the same bytes, and a reader written from docs/FORMAT.md
alone (tests/support/second_reader.py) finds in them, and in random files, what the project finds."""

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import second_encodings
import second_format
import second_reader
from safetensors import safe_open

from delta_wire import encodings
from delta_wire.adapter import Adapter
from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.checkpoint import ADAPTER_CONFIG, ADAPTER_FILE, Checkpoint
from delta_wire.container import write_tensors
from delta_wire.digest import digest_tensor
from delta_wire.encodings import blob
from delta_wire.replay import materialise
from delta_wire.state import Delta, TensorDelta, TensorSpec, TensorTable, change_of_digest, resolve
from delta_wire.stores import open_store

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
ENCODINGS = ["plain", "packed", "context"]
# `parts` and `mixed` have versions in several objects
BUCKETS = [*ENCODINGS, "parts", "mixed"]
SLAB = 1 << 20

Bits = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def make_golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", ROOT / "tools" / "make_golden.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sha256_of(state: dict[str, list[int]] | Bits) -> str:
    return hashlib.sha256(b"".join(np.asarray(state[name], "<u2").tobytes() for name in sorted(state))).hexdigest()


def data_files() -> list[Path]:
    return sorted(GOLDEN.rglob("*.safetensors"))


def anchor_of(bucket: Path) -> Path:
    (anchor,) = (bucket / "anchors").iterdir()
    return anchor


def test_writing_again_gives_the_same_bytes(make_golden: ModuleType, tmp_path: Path):
    make_golden.make(tmp_path)
    again, golden = files(tmp_path), files(GOLDEN)
    assert again.keys() == golden.keys()
    assert [key for key in golden if again[key] != golden[key]] == []


@pytest.mark.parametrize("bucket", BUCKETS)
def test_the_project_reads_the_golden_buckets(bucket: str):
    reader = BucketReader(open_store(str(GOLDEN / bucket)))
    latest = reader.latest()
    assert latest is not None and latest.version.seq == EXPECTED[-1]["seq"]
    for manifest, expected in zip(reversed(list(reader.walk(latest))), EXPECTED, strict=True):
        with materialise(reader, manifest) as state:
            assert (manifest.version.seq, str(state.recompute())) == (expected["seq"], expected["digest"])
            assert sha256_of({name: state.bits(name) for name in state.table}) == expected["sha256"]


@pytest.mark.parametrize("name", BUCKETS)
def test_the_second_reader_reads_the_golden_buckets(name: str):
    bucket = GOLDEN / name
    versions = list(second_reader.replay(bucket, anchor_of(bucket)))
    found = [
        {
            "seq": manifest["version"]["seq"],
            "digest": str(second_format.digest_state(state)),
            "sha256": sha256_of(state),
        }
        for manifest, state in versions
    ]
    assert found == EXPECTED


def test_the_golden_deltas_are_of_every_kind():
    def headers(encoding: str, seq: int) -> second_format.Safetensors:
        (path,) = (GOLDEN / encoding / "deltas").glob(f"{seq:012d}-*")
        return second_format.Safetensors(path.read_bytes())

    assert {"layer.0.proj.weight.indices", "layer.0.proj.weight.values", "embed.weight"} <= headers(
        "plain", 2
    ).entries.keys()
    assert headers("plain", 3).entries == {} and headers("packed", 3).entries.keys() == {"delta.0"}
    # new bits in place of steps
    assert second_encodings.Blob(headers("packed", 2).bytes("delta.0", ("U8",), None)).values.bits
    # ranks within exponents
    directory = second_encodings.Blob(headers("context", 1).bytes("delta.0", ("U8",), None)).directory
    entries = [(directory.exp_golomb(0), directory.exp_golomb(8)) for _ in range(directory.exp_golomb(4))]
    assert 0 in [count for _, count in entries]


def test_the_golden_parts_are_of_every_kind():
    def tensors(bucket: str, seq: int) -> list[set[str]]:
        reader = BucketReader(open_store(str(GOLDEN / bucket)))
        manifest = reader.manifest(seq)
        assert manifest.delta is not None
        encoding, table = encodings.get(manifest.delta.encoding), reader.table(manifest)
        with materialise(reader, reader.manifest(seq - 1)) as state:
            return [
                set(encoding.decode(GOLDEN / bucket / ref.key, table, ref.key, state.bits))
                for ref in manifest.delta.objects
            ]

    # tensors that several parts speak of, by rows and interleaved; rows that a shard does not have
    assert set.intersection(*tensors("parts", 1)) >= {"layer.0.proj.weight", "embed.weight"}
    assert "scalar" in tensors("parts", 2)[0] and "scalar" not in set.union(*tensors("parts", 2)[1:])
    assert tensors("parts", 3) == [set()]
    for seq in (1, 2):
        assert set.intersection(*tensors("mixed", seq)) >= {"layer.0.proj.weight", "embed.weight"}


@pytest.mark.parametrize("path", data_files(), ids=lambda path: path.relative_to(GOLDEN).as_posix())
def test_data_files_open_as_safetensors(path: Path):
    own = second_format.Safetensors(path.read_bytes())
    with safe_open(path, "np") as file:
        assert set(file.keys()) == own.entries.keys() and file.metadata() == own.metadata
        assert all(file.get_slice(name).get_shape() == own.entries[name]["shape"] for name in file.keys())  # noqa: SIM118


def damage_delta(bucket: Path) -> None:
    # of version 3, whose delta is empty: not even its digest depends on it
    (path,) = (bucket / "deltas").glob("000000000003-*")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


def swap_deltas(bucket: Path) -> None:
    """Version 3 gets the delta of version 1, with the right hashes all along: only the digest can tell."""
    path = bucket / "versions" / "000000000003.json"
    manifest, first = json.loads(path.read_bytes()), json.loads(path.with_name("000000000001.json").read_bytes())
    manifest["delta"] = first["delta"]
    path.write_text(json.dumps(manifest))
    raw = path.read_bytes()
    pointer = json.loads((bucket / "LATEST").read_bytes())
    pointer["manifest"] |= {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (bucket / "LATEST").write_text(json.dumps(pointer))


def damage_anchor(bucket: Path) -> None:
    path = anchor_of(bucket) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (damage_delta, "hash of deltas"),
        (swap_deltas, "digest of version 3|more changes than"),
        (damage_anchor, "checkpoint's digest"),
    ],
)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_the_second_reader_refuses_damage(bucket: str, damage, complaint: str, tmp_path: Path):
    for key, raw in files(GOLDEN / bucket).items():
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(raw)
    damage(tmp_path)
    with pytest.raises(second_format.Refused, match=complaint):
        list(second_reader.replay(tmp_path, anchor_of(tmp_path)))


def test_the_second_reader_reads_adapters(tmp_path: Path):
    """Section 8.1: a folder as PEFT's for an anchor, and one field more in every manifest."""
    rng = np.random.default_rng(0)
    bits = {f"base_model.model.q.lora_{factor}.weight": weights(rng, 64).reshape(4, 16) for factor in "AB"}
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_tensors(folder / ADAPTER_FILE, {name: ("BF16", array.shape, array) for name, array in bits.items()}, {})
    (folder / ADAPTER_CONFIG).write_text("{}")
    checkpoint = Checkpoint(folder)
    table, digest = checkpoint.table(), checkpoint.digest()
    writer = BucketWriter.start(
        open_store(tmp_path / "bucket", create=True),
        table=table,
        digest=digest,
        reference=None,
        anchor_dir=folder,
        adapter=Adapter("policy", 4, digest_tensor("base", bits["base_model.model.q.lora_A.weight"]), "me/base@1"),
    )
    delta: Delta = {}
    for name, array in bits.items():
        after = change(rng, array.reshape(-1), 0.3, "ulp")
        (indices,) = np.nonzero(after != array.reshape(-1))
        delta[name] = TensorDelta(name, indices.astype(np.int32), after[indices], array.reshape(-1)[indices])
        bits[name] = after
    digest = digest + change_of_digest(delta)
    writer.publish(delta, digest=digest, step=1)
    (_, (manifest, state)) = second_reader.replay(tmp_path / "bucket", anchor_of(tmp_path / "bucket"))
    assert manifest["adapter"]["name"] == "policy" and str(second_format.digest_state(state)) == str(digest)
    assert sha256_of(state) == sha256_of(bits)


def weights(rng: np.random.Generator, size: int) -> np.ndarray:
    return ((rng.standard_normal(size) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def change(rng: np.random.Generator, bits: np.ndarray, density: float, kind: str) -> np.ndarray:
    chosen = rng.random(bits.size) < density
    if kind == "by exponent":
        # the smaller the weight, the likelier it moves: what encoding context is for
        chosen = rng.random(bits.size) < density * 2.0 ** (121 - (bits >> 7 & 0xFF).astype(np.float64))
    moved = rng.integers(0, 1 << 16, bits.size) if kind == "any" else bits + rng.choice([-2, -1, 1, 1, 3], bits.size)
    return np.where(chosen, moved, bits).astype(np.uint16)


def require_agreement(encoding: str, before: Bits, after: Bits, path: Path) -> None:
    """Write the change, read it with both readers, and compare both with the truth."""
    table = TensorTable(TensorSpec(name, bits.shape) for name, bits in before.items())
    delta: Delta = {}
    for name, bits in after.items():
        indices = np.nonzero(before[name] != bits)[0].astype(np.int32)
        if indices.size:
            delta[name] = TensorDelta(name, indices, bits[indices], before[name][indices])
    encodings.get(encoding).encode(delta, table, path, 1, before.__getitem__)

    decoded = encodings.get(encoding).decode(path, table, path.name, before.__getitem__)
    shapes = {name: list(spec.shape) for name, spec in table.items()}
    state = {name: bits.tolist() for name, bits in before.items()}
    changes = second_encodings.decode(path.read_bytes(), encoding, shapes, state)
    assert changes.keys() == decoded.keys()
    for name, bits in after.items():
        project, second = before[name].copy(), before[name].copy()
        if name in decoded:
            part = decoded[name]
            project[part.indices] = resolve(part, before[name][part.indices]).new
            second[list(changes[name])] = list(changes[name].values())
        assert np.array_equal(project, bits) and np.array_equal(second, bits)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", ["any", "ulp", "by exponent"])
@pytest.mark.parametrize("density", [0.0, 0.002, 0.03, 0.2, 0.45, 0.55, 0.8, 0.99, 1.0])
def test_both_readers_agree(encoding: str, kind: str, density: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # several blobs, as in the file of a large model
    monkeypatch.setattr(blob, "_CHANGES_PER_BLOB", 300)
    rng = np.random.default_rng(round(1000 * density))
    before = {f"tensor.{i}": weights(rng, size) for i, size in enumerate([1, 64, 0, 65, 700, 1501])}
    after = {name: change(rng, bits, density, kind) for name, bits in before.items()}
    # one tensor among those that change stays
    after["tensor.3"] = before["tensor.3"]
    require_agreement(encoding, before, after, tmp_path / "delta.safetensors")


@pytest.mark.parametrize("encoding", ["packed", "context"])
def test_both_readers_agree_across_slabs(encoding: str, tmp_path: Path):
    rng = np.random.default_rng(0)
    before = {"large": weights(rng, SLAB + 77), "small": weights(rng, 3000), "zeros": np.zeros(500, np.uint16)}
    after = {name: change(rng, bits, 0.02, "by exponent") for name, bits in before.items()}
    # a change on either side of the border, and in the last element
    for at in (SLAB - 1, SLAB, SLAB + 76):
        after["large"][at] = before["large"][at] + 1
    path = tmp_path / "delta.safetensors"
    require_agreement(encoding, before, after, path)
    if encoding == "context":
        # the first tensor of the first blob is coded by rank
        entry = f"{blob.PREFIX}0"
        directory = second_encodings.Blob(
            second_format.Safetensors(path.read_bytes()).bytes(entry, ("U8",), None)
        ).directory
        assert directory.exp_golomb(4) >= 1 and (directory.exp_golomb(0), directory.exp_golomb(8)) == (0, 0)
