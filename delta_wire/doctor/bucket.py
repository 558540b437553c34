# SPDX-License-Identifier: Apache-2.0
"""The bucket: reachable, writable, a run that this release reads, clocks that agree, room and requests enough."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import time
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path

from delta_wire.bucket import BucketReader
from delta_wire.checkpoint import Checkpoint, resolve_reference
from delta_wire.doctor import Context, Finding, ok, problem, warning
from delta_wire.errors import DeltaError, ObjectNotFoundError, SetupError, SignatureError, StoreError
from delta_wire.fleet import LOST, from_bucket
from delta_wire.manifest import Manifest
from delta_wire.signing import Verifier
from delta_wire.stores import Store, open_store

# clocks of machines that use a time server differ by less
_CLOCK_S = 30.0
_RECENT_VERSIONS = 50
# seconds between two looks, where a server is not told otherwise
_POLL_S = 0.5
# reads per token and 5 minutes on the smallest plan of the hub
_HUB_READS_PER_300_S = 5000
# modules that talk to a kind of store
_CLIENTS = {"hf": "huggingface_hub", "s3": "obstore", "gs": "obstore", "az": "obstore"}


def bucket(context: Context) -> Iterator[Finding]:
    """Everything about the bucket; what comes later needs what comes before."""
    address = context.bucket
    if not address:
        yield Finding("bucket", "skipped", "no bucket is named; pass its address or set DELTA_SYNC_BUCKET")
        return
    scheme = address.partition("://")[0] if "://" in address else "file"
    client = _CLIENTS.get(scheme)
    if client and importlib.util.find_spec(client) is None:
        yield problem("bucket", f"{address} needs {client}, which is not installed", f"pip install {client}")
        return
    if scheme == "hf" and context.env.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        yield problem("bucket", f"{address}, but HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
        return
    try:
        store = open_store(address)
        keys = context.env.get("DELTA_SYNC_PUBLIC_KEY", "").strip()
        reader = BucketReader(store, Verifier(keys) if keys else None)
        latest = reader.latest()
    except (SetupError, SignatureError) as error:
        yield problem("bucket", str(error), "see the message")
        return
    except StoreError as error:
        yield problem("bucket", str(error), "create the bucket, or correct its address; both sides must reach it")
        return
    except DeltaError as error:
        yield problem("bucket", str(error), "use an empty bucket, or restore the object")
        return
    yield ok("bucket", f"{store.url} can be read, {latest.version if latest else 'nothing is published yet'}")
    if context.write:
        yield from _permissions(store)
    if scheme == "hf":
        yield from _requests(context)
    yield from _room(store, reader, latest)
    if latest is not None:
        yield from _clock(latest)
        yield from _run(reader, latest)
        yield from _base(context, reader, latest)
        yield from _servers(reader)


def _permissions(store: Store) -> Iterator[Finding]:
    key = f"doctor/{secrets.token_hex(8)}"
    try:
        store.put(key, b"written by delta-wire doctor, to be removed")
    except DeltaError as error:
        yield problem(
            "permissions",
            f"cannot write: {error}",
            "give the trainer's account the right to write; a server can do without (DELTA_SYNC_ACK=0)",
        )
        return
    try:
        store.delete([key])
    except DeltaError as error:
        yield warning("permissions", f"cannot delete: {error}", "without it old versions stay in the bucket for good")
        return
    yield ok("permissions", "an object was written and removed again")
    if not store.create_only:
        yield warning(
            "two trainers",
            f"{store.url} cannot refuse to overwrite, so a second trainer is found only after it has written",
            "make sure that one trainer at a time uses the bucket",
        )


def _requests(context: Context) -> Iterator[Finding]:
    try:
        poll_s = float(context.env.get("DELTA_SYNC_POLL_S", "") or _POLL_S)
    except ValueError:
        # the server's own check tells what is wrong with it
        return
    reads = round(context.num_servers * 300 / poll_s)
    text = f"{context.num_servers} servers that look every {poll_s:g} s make {12 * reads:,} requests an hour"
    if reads > _HUB_READS_PER_300_S:
        slower_s = context.num_servers * 300 / _HUB_READS_PER_300_S
        yield problem(
            "requests",
            f"{text}, more than the {12 * _HUB_READS_PER_300_S:,} of one token on the free plan",
            f"set DELTA_SYNC_POLL_S to {slower_s:.2g} or more, or give groups of servers tokens of their own",
        )
    else:
        yield ok("requests", text)


def _room(store: Store, reader: BucketReader, latest: Manifest | None) -> Iterator[Finding]:
    root = getattr(store, "root", None)
    if not isinstance(root, Path) or latest is None:
        return
    free_bytes, full_bytes = shutil.disk_usage(root).free, reader.table(latest).full_bytes
    if free_bytes < 2 * full_bytes:
        yield warning(
            "room",
            f"{root} has {free_bytes / 1e6:.0f} MB free, a whole checkpoint of this run has {full_bytes / 1e6:.0f} MB",
            "free space there; a full disk holds publishing up, not training",
        )
    else:
        yield ok("room", f"{free_bytes / 1e9:.0f} GB free")


def _clock(latest: Manifest) -> Iterator[Finding]:
    ahead_s = latest.created_unix_s - time.time()
    if ahead_s > _CLOCK_S:
        yield problem(
            "clock",
            f"the newest version was made {ahead_s:.0f} s in the future, by this machine's clock",
            "set the clocks of trainer and servers by a time server (NTP)",
        )
    else:
        yield ok("clock", f"the newest version is {max(0.0, -ahead_s):.0f} s old")


def _run(reader: BucketReader, latest: Manifest) -> Iterator[Finding]:
    """What a server reads when it starts."""
    try:
        restart, table = reader.restart_point(latest), reader.table(latest)
        recent = islice(reader.walk(latest), _RECENT_VERSIONS)
        missing = [
            ref.key
            # what lies before the restart point may have been removed, and no server reads it
            for manifest in takewhile(lambda manifest: manifest.anchor is None, recent)
            if manifest.delta is not None
            for ref in manifest.delta.objects
            if not reader.store.exists(ref.key)
        ]
    except DeltaError as error:
        yield problem("run", str(error), "restore the object, or start a new run in an empty bucket")
        return
    if missing:
        yield problem(
            "run",
            f"{reader.store.url}/{missing[-1]} is missing, and {len(missing) - 1} more",
            f"restore it; {LOST}",
        )
    else:
        chain = latest.version.seq - restart.version.seq
        yield ok("run", f"{len(table)} tensors, {table.num_params:,} parameters; {chain} versions after an anchor")


def _base(context: Context, reader: BucketReader, latest: Manifest) -> Iterator[Finding]:
    """The checkpoint that the run goes back to must be here, too, and be the same model."""
    try:
        restart = reader.restart_point(latest)
    except DeltaError:
        # told already
        return
    reference = restart.anchor.reference if restart.anchor else None
    if reference is None and context.model is None:
        yield ok("base", "uploaded into the bucket")
        return
    try:
        path = context.model or resolve_reference(str(reference))
        reader.table(restart).require_same(Checkpoint(path).table(), f"the run in {reader.store.url}", str(path))
    except DeltaError as error:
        yield problem(
            "base", str(error), "put the checkpoint that the run started from there; servers must start on the same"
        )
        return
    yield ok("base", f"{path} has the tensors of the run")


def _servers(reader: BucketReader) -> Iterator[Finding]:
    try:
        replicas = from_bucket(reader)
    except ObjectNotFoundError:
        replicas = []
    for replica in replicas:
        if replica.needs_anchor is not None:
            yield problem(
                f"server {replica.server}",
                f"serves {replica.version} and cannot get past {replica.needs_anchor}: {replica.reason}",
                LOST,
            )
        elif replica.state == "degraded":
            yield problem(
                f"server {replica.server}",
                f"degraded, serving {replica.version}: {replica.reason}",
                "mend what it names; it recovers by itself",
            )
        else:
            yield ok(f"server {replica.server}", f"serves {replica.version}, {replica.lag_versions} versions behind")
    if not replicas:
        yield Finding("servers", "skipped", "none has acknowledged anything yet")


CHECKS = (bucket,)
