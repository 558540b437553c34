# SPDX-License-Identifier: Apache-2.0
"""Write the golden buckets: one small run per encoding, the same to the byte whoever writes it and whenever.

    python tools/make_golden.py [FOLDER]

FOLDER (default `tests/golden`) is replaced. It receives a bucket for each encoding and two whose deltas have several
parts, each with the checkpoint uploaded as anchor and three versions after it, and `expected.json` with what every
version's state must be. A difference to what is committed is a change of the format: old readers would refuse new
files, or new readers old ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np

from delta_wire.bucket import BucketWriter
from delta_wire.checkpoint import Checkpoint
from delta_wire.container import write_tensors
from delta_wire.digest import Digest, digest_tensor
from delta_wire.parts import upload_part
from delta_wire.shards import WHOLE, Shard
from delta_wire.state import Delta, TensorDelta, TensorTable, change_of_digest
from delta_wire.stores import open_store

FOLDER = Path(__file__).parents[1] / "tests" / "golden"
ENCODINGS = ("plain", "packed", "context")
# per version: what it is coded by, and the shards of its parts. `parts` is cut as training processes cut, `mixed` has
# parts that interleave: elements of even and of odd flat index.
BUCKETS: dict[str, list[tuple[str, list[Shard]]]] = {
    **{encoding: [(encoding, [WHOLE])] * 3 for encoding in ENCODINGS},
    "parts": [
        ("context", [Shard(i, 3) for i in range(3)]),
        ("packed", [Shard(i, 4) for i in range(4)]),
        ("packed", [Shard(1, 2)]),
    ],
    "mixed": [("packed", [WHOLE, WHOLE]), ("plain", [WHOLE, WHOLE]), ("plain", [WHOLE])],
}
RUN = "901de201"
BEGAN_UNIX_S = 1_800_000_000.0
# odd sizes, no dimension, no element, one element; names with a space, quotes, and characters of two and of four bytes
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (40, 33),
    "layer.0.norm.weight": (65,),
    "layer.0.proj.weight": (63, 257),
    'm"größe 𝛼.weight': (7, 3, 1),
    "no_elements": (0, 4),
    "one_element": (1,),
    "scalar": (),
}
# zeros, infinities, NaNs with payloads, denormals, the largest finite numbers
SPECIAL = np.array(
    [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x807F, 0x7F7F, 0xFF7F],
    np.uint16,
)

Bits = dict[str, np.ndarray]


def noise(label: str, count: int) -> np.ndarray:
    """`count` random 32-bit numbers; unlike numpy's generators, the same in every release."""
    return np.frombuffer(hashlib.shake_256(label.encode()).digest(4 * count), "<u4").astype(np.int64)


def first_state() -> Bits:
    """Weights whose exponents are spread as those of a trained model: half as many with every step down."""
    state: Bits = {}
    for name, shape in SHAPES.items():
        random = noise(f"base {name}", int(np.prod(shape)))
        spread = random >> 16 | 1 << 12
        depth = np.log2(spread & -spread).astype(np.int64)
        state[name] = ((random & 0x807F) | (124 - depth) << 7).astype(np.uint16).reshape(shape)
    return state


def one_ulp(state: Bits) -> Bits:
    """One step up or down for few of the large weights and for many of the small ones."""
    after = {}
    for name, bits in state.items():
        random = noise(f"ulp {name}", bits.size).reshape(bits.shape)
        depth = 124 - (bits.astype(np.int64) >> 7 & 0xFF)
        moved = (random & 0xFFFF) < 300 << depth
        after[name] = np.where(moved, bits + 1 - 2 * (random >> 16 & 1), bits).astype(np.uint16)
    return after


def anything(state: Bits) -> Bits:
    """One tensor becomes anything, others take on special patterns here and there, the rest stay."""
    after = dict(state)
    for name, share in {"embed.weight": 1, "layer.0.proj.weight": 0.02, 'm"größe 𝛼.weight': 0.7, "scalar": 1}.items():
        bits = state[name]
        random = noise(f"any {name}", bits.size).reshape(bits.shape)
        new = random & 0xFFFF if name == "embed.weight" else SPECIAL[random % SPECIAL.size]
        after[name] = np.where((random >> 16) < share * 65536, new, bits).astype(np.uint16)
    return after


def states() -> Iterator[Bits]:
    """The state of every version, from version 0 on; the last delta is empty."""
    state = first_state()
    yield state
    for change in (one_ulp, anything, dict):
        state = change(state)
        yield state


def difference(before: Bits, after: Bits) -> Delta:
    """Changed elements, with old and new bits."""
    delta: Delta = {}
    for name, bits in after.items():
        old, new = before[name].reshape(-1), bits.reshape(-1)
        indices = np.nonzero(old != new)[0].astype(np.int32)
        if indices.size:
            delta[name] = TensorDelta(name, indices, new[indices], old[indices])
    return delta


def share(delta: Delta, table: TensorTable, shards: list[Shard], at: int) -> Delta:
    """Changes that belong to a part: rows of its shard, or every so-manieth element of whole tensors."""
    part: Delta = {}
    for name, changes in delta.items():
        start, stop = shards[at].span(table[name])
        own = (start <= changes.indices) & (changes.indices < stop)
        if shards[at] == WHOLE:
            own &= changes.indices % len(shards) == at
        if own.any() and changes.old is not None:
            part[name] = TensorDelta(name, changes.indices[own], changes.new[own], changes.old[own])
    return part


def write_bucket(folder: Path, versions: list[tuple[str, list[Shard]]]) -> None:
    """One run, published as a trainer would."""
    clock = (BEGAN_UNIX_S + 10 * second for second in range(100))
    state, *later = states()
    with tempfile.TemporaryDirectory() as checkpoint:
        path = Path(checkpoint) / "model.safetensors"
        write_tensors(path, {name: ("BF16", bits.shape, bits) for name, bits in state.items()}, {"format": "pt"})
        (path.parent / "config.json").write_text("{}\n")
        with (
            mock.patch("delta_wire.begin.secrets.token_hex", lambda size: RUN),
            mock.patch("delta_wire.begin.time.time", lambda: next(clock)),
        ):
            writer = BucketWriter.start(
                open_store(str(folder), create=True),
                table=Checkpoint(path.parent).table(),
                digest=digest_of(state),
                reference=None,
                anchor_dir=path.parent,
                step=0,
            )
            for step, (after, (encoding, shards)) in enumerate(zip(later, versions, strict=True), 1):
                delta = difference(state, after)
                if shards == [WHOLE]:
                    digest = writer.digest + change_of_digest(delta)
                    writer.publish(delta, digest=digest, step=step, encoding=encoding, old_bits=state.__getitem__)
                else:
                    publish_parts(writer, delta, step, encoding, shards, state)
                state = after


def publish_parts(
    writer: BucketWriter, delta: Delta, step: int, encoding: str, shards: list[Shard], state: Bits
) -> None:
    """Upload a part for each shard and commit them, as several training processes do."""
    parts = []
    for at, shard in enumerate(shards):
        own = share(delta, writer.table, shards, at)
        # other rows of the state are not at hand; parts of whole tensors are sent sparse, for they share tensors
        old_bits = None if shard == WHOLE else shard.old_bits(state.__getitem__, writer.table)
        parts.append(
            upload_part(
                writer.store, writer.table, own, seq=writer.next_seq, encoding=encoding, old_bits=old_bits, shard=shard
            )
        )
    writer.commit(parts, step=step)


def digest_of(state: Bits) -> Digest:
    """Digest of a whole state."""
    total = Digest()
    for name, bits in state.items():
        total = total + digest_tensor(name, bits)
    return total


def expected() -> list[dict[str, str | int]]:
    """What a reader must find: digest, and SHA-256 of all bits, little endian, in the order of the names."""
    return [
        {
            "seq": seq,
            "digest": str(digest_of(state)),
            "sha256": hashlib.sha256(
                b"".join(state[name].astype("<u2").tobytes() for name in sorted(state))
            ).hexdigest(),
        }
        for seq, state in enumerate(states())
    ]


def make(folder: Path) -> None:
    """Write everything below `folder`."""
    for name, versions in BUCKETS.items():
        write_bucket(folder / name, versions)
    (folder / "expected.json").write_text(json.dumps(expected(), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden buckets.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args().folder
    if folder.exists():
        shutil.rmtree(folder)
    make(folder)


if __name__ == "__main__":
    main()
