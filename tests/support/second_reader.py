# SPDX-License-Identifier: Apache-2.0
"""A second reader of the bucket format, written from docs/FORMAT.md alone.

It uses the standard library only and shares no code with the project, so what both of them understand is what the
document says. It favours plainness over speed: a state is a dict from names to lists of 16-bit patterns, and numbers
are read one at a time. `replay` yields the state of every version from a checkpoint to the newest one. Files are read
by second_format.py, deltas by second_encodings.py.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from second_encodings import decode
from second_format import M64, Changes, Safetensors, State, digest_state, integer, need, parse, parse_table
from second_signature import manifest_is_signed

PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.+@=-]{0,199}")

# Sections 2, 3, 4, 8 and 11: the bucket


def fetch(bucket: Path, ref: Any) -> bytes:
    key = ref["key"]
    need(1 <= len(key) <= 512 and all(PART.fullmatch(part) for part in key.split("/")), f"key {key!r}")
    raw = (bucket / key).read_bytes()
    need(len(raw) == integer(ref["size_bytes"], 0, 2**53 - 1), f"size of {key}")
    need(hashlib.sha256(raw).hexdigest() == ref["sha256"], f"hash of {key}")
    return raw


def fetch_manifest(bucket: Path, seq: int, ref: Any, keys: tuple[bytes, ...]) -> dict[str, Any]:
    need(ref["key"] == f"versions/{seq:012d}.json", "key of a manifest")
    raw = fetch(bucket, ref)
    need(len(raw) <= 4 * 2**20, "size of a manifest")
    manifest = parse(raw)
    need(not keys or manifest_is_signed(raw, manifest.get("signature"), keys), "signature of a manifest")
    need(integer(manifest["format"], 1, M64) == 1, "this reader knows format 1 only: upgrade it")
    need(manifest["version"]["seq"] == seq, "number of a manifest")
    need(manifest["table"]["key"] == f"tables/{manifest['table']['sha256']}.json", "key of the table")
    need(manifest["delta"] or manifest["anchor"], "neither delta nor anchor")
    if manifest["delta"]:
        same = manifest["digest"] == manifest["parent"]["digest"]
        need((manifest["changed_params"] == 0) == same, "changed_params and digest of a manifest")
    if manifest.get("adapter") is not None:
        check_adapter(manifest["adapter"])
    return manifest


def check_adapter(adapter: dict[str, Any]) -> None:
    need(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", adapter["name"]), "name of an adapter")
    integer(adapter["rank"], 1, 65_536)
    need(re.fullmatch(r"[0-9a-f]{32}", adapter["base"]["digest"]), "digest of an adapter's base")
    need(adapter["base"]["reference"] is None or isinstance(adapter["base"]["reference"], str), "reference")


def load_checkpoint(folder: Path) -> State:
    """A model's files, or those of an adapter (section 8.1)."""
    adapter = folder / "adapter_model.safetensors"
    index = folder / "model.safetensors.index.json"
    files = set(parse(index.read_bytes())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    if adapter.exists():
        files = {adapter.name}
    state: State = {}
    for file in map(Safetensors, (folder.joinpath(name).read_bytes() for name in sorted(files))):
        state |= {name: file.numbers(name, ("BF16",), None) for name in file.entries}
    return state


def replay(bucket: Path, anchor: Path, keys: tuple[bytes, ...] = ()) -> Iterator[tuple[dict[str, Any], State]]:
    """Yields manifest and state of every version from the checkpoint's to the newest one; with public keys (32 bytes
    each) only those are read that one of them has signed."""
    state = load_checkpoint(anchor)
    digest = digest_state(state)
    pointer = parse((bucket / "LATEST").read_bytes())
    need(integer(pointer["format"], 1, M64) == 1, "this reader knows format 1 only: upgrade it")
    chain = [fetch_manifest(bucket, pointer["version"]["seq"], pointer["manifest"], keys)]
    need(chain[0]["version"] == pointer["version"], "version of the pointer")
    while chain[-1]["digest"] != str(digest):
        child, parent = chain[-1], chain[-1]["parent"]
        need(parent and child["delta"], "no version of the chain has the checkpoint's digest")
        need(parent["seq"] < child["version"]["seq"] and parent["epoch"] <= child["version"]["epoch"], "parent")
        key = f"versions/{parent['seq']:012d}.json"
        size_bytes = (bucket / key).stat().st_size
        ref = {"key": key, "size_bytes": size_bytes, "sha256": parent["manifest_sha256"]}
        chain.append(fetch_manifest(bucket, parent["seq"], ref, keys))
        need(chain[-1]["version"]["run"] == child["version"]["run"], "run of the parent")
        need(chain[-1]["version"]["epoch"] == parent["epoch"] and chain[-1]["digest"] == parent["digest"], "parent")
        need(chain[-1]["table"] == child["table"], "table of the parent")
        need(chain[-1].get("adapter") == child.get("adapter"), "adapter of the parent")
    table = parse_table(fetch(bucket, chain[0]["table"]))
    need({name: math.prod(shape) for name, shape in table.items()} == {n: len(b) for n, b in state.items()}, "tensors")
    need(all(m["num_params"] == sum(map(len, state.values())) for m in chain), "num_params")
    yield chain.pop(), state
    for manifest in reversed(chain):
        changes: Changes = {}
        for ref in manifest["delta"]["objects"]:
            need(ref["key"].startswith("deltas/"), "key of a delta")
            part = decode(fetch(bucket, ref), manifest["delta"]["encoding"], table, state)
            for name, elements in part.items():
                need(not elements.keys() & changes.get(name, {}).keys(), f"an element of {name} is in two parts")
                changes[name] = changes.get(name, {}) | elements
        new_state, changed = dict(state), 0
        for name, elements in changes.items():
            digest.add(name, ((i, state[name][i]) for i in elements), -1)
            digest.add(name, elements.items())
            changed += sum(bits != state[name][i] for i, bits in elements.items())
            new_state[name] = state[name].copy()
            for index, bits in elements.items():
                new_state[name][index] = bits
        need(str(digest) == manifest["digest"], f"digest of version {manifest['version']['seq']}")
        need(changed == manifest["changed_params"], "changed_params")
        state = new_state
        yield manifest, state
