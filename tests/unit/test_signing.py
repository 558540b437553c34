# SPDX-License-Identifier: Apache-2.0
"""Signed runs: what an intruder with write access can do, and is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import second_format
import second_reader

pytest.importorskip("cryptography")

from delta_wire.bucket import BucketReader, BucketWriter
from delta_wire.errors import FormatError, SetupError, SignatureError
from delta_wire.manifest import Manifest, manifest_key
from delta_wire.signing import Signer, Verifier, generate_key
from vllm_delta.settings import Settings


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    generate_key(tmp_path / "key.pem")
    return Signer(tmp_path / "key.pem")


@pytest.fixture
def signed(run, signer: Signer):
    """The run of the other tests, begun again with a key."""
    run.store.delete([info.key for info in run.store.list("")])
    run.writer = BucketWriter.start(
        run.store, table=run.table, digest=run.base_digest, reference=str(run.base), signer=signer
    )
    run.publish()
    return run


def forge(run, edit) -> None:
    """Change the newest manifest and let the pointer follow."""
    key = manifest_key(run.writer.version.seq)
    raw = edit(run.store.get(key, 1 << 20))
    run.store.put(key, raw)
    pointer = json.loads(run.store.get("LATEST", 1 << 16))
    pointer["manifest"] |= {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    run.store.put("LATEST", json.dumps(pointer).encode())


def test_a_signed_run_is_read_with_the_key_and_without_one(signed, signer: Signer):
    for verifier in (None, signer.verifier(), Verifier(f"{'0' * 63}1, {signer.public_key}")):
        reader = BucketReader(signed.store, verifier)
        latest = reader.latest()
        assert latest is not None and latest.version.seq == 1 and latest.signature
        assert len(list(reader.walk(latest))) == 2
    other, own = bytes(31) + b"\1", bytes.fromhex(signer.public_key)
    for keys in ((), (other, own)):
        assert len(list(second_reader.replay(signed.store.root, signed.base, keys))) == 2
    with pytest.raises(second_format.Refused, match="signature"):
        list(second_reader.replay(signed.store.root, signed.base, (other,)))


def test_an_unsigned_manifest_is_refused(run, signer: Signer):
    with pytest.raises(SignatureError, match="is not signed"):
        BucketReader(run.store, signer.verifier()).latest()
    with pytest.raises(second_format.Refused, match="signature"):
        list(second_reader.replay(run.store.root, run.base, (bytes.fromhex(signer.public_key),)))


def test_another_key_is_refused_by_name(signed, tmp_path: Path):
    other = generate_key(tmp_path / "other.pem")
    with pytest.raises(SignatureError, match=f"{manifest_key(1)}.*{other[:16]}"):
        BucketReader(signed.store, Verifier(other)).latest()


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw.replace(b'"step":1', b'"step":2'),
        lambda raw: raw.replace(b'"signature":"', b'"x":"'),
        lambda raw: raw + b" ",
        lambda raw: raw[:-4] + bytes([raw[-4] ^ 1 if raw[-4] not in b"9f" else raw[-4] - 1]) + raw[-3:],
        # the same signature once more, where a careless reader might look for it
        lambda raw: raw[:-1] + b',"again":"' + raw[-130:-2] + b'"}',
        # the first digit as an escape: equal text, other bytes
        lambda raw: raw[:-130] + f"\\u00{raw[-130]:02x}".encode() + raw[-129:],
    ],
)
def test_changed_manifests_are_refused(signed, signer: Signer, edit):
    forge(signed, edit)
    with pytest.raises((SignatureError, FormatError)):
        BucketReader(signed.store, signer.verifier()).latest()
    with pytest.raises(second_format.Refused):
        list(second_reader.replay(signed.store.root, signed.base, (bytes.fromhex(signer.public_key),)))


def test_a_torn_signature_is_no_signature():
    with pytest.raises(FormatError):
        Manifest.from_bytes(b'{"format":1,"signature":"12"}', "here")


def test_a_trainer_without_the_key_does_not_go_on(signed):
    with pytest.raises(SetupError, match="delta_sync_signing_key"):
        signed.start()


def test_a_trainer_with_a_key_does_not_go_on_with_an_unsigned_run(run, signer: Signer):
    with pytest.raises(SignatureError):
        BucketWriter.start(run.store, table=run.table, digest=run.base_digest, reference=str(run.base), signer=signer)


def test_keys_are_files_of_their_owner_and_never_overwritten(tmp_path: Path):
    path = tmp_path / "key.pem"
    public = generate_key(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert Signer(path).public_key == public
    with pytest.raises(SetupError, match="never overwritten"):
        generate_key(path)
    (tmp_path / "public").write_text(public + "\n")
    assert Verifier(str(tmp_path / "public")).keys == (public,)


@pytest.mark.parametrize("text", ["", " , ", "12", "z" * 64, "/nowhere", "a\0b"])
def test_public_keys_that_are_none_are_refused(text: str, tmp_path: Path):
    with pytest.raises(SetupError, match=r"DELTA_SYNC_PUBLIC_KEY.*key"):
        Settings.from_env({"DELTA_SYNC_BUCKET": str(tmp_path), "DELTA_SYNC_PUBLIC_KEY": text})


def test_private_keys_that_are_none_are_refused_without_showing_them(tmp_path: Path):
    with pytest.raises(SetupError, match="keygen"):
        Signer(tmp_path / "missing")
    (tmp_path / "wrong").write_text("-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----\n")
    with pytest.raises(SetupError, match="Ed25519") as caught:
        Signer(tmp_path / "wrong")
    assert "secret" not in str(caught.value)


def test_the_servers_environment_names_the_key(signer: Signer, tmp_path: Path):
    env = {"DELTA_SYNC_BUCKET": str(tmp_path)}
    assert Settings.from_env(env).verifier is None
    verifier = Settings.from_env(env | {"DELTA_SYNC_PUBLIC_KEY": signer.public_key}).verifier
    assert verifier is not None and verifier.keys == (signer.public_key,)
