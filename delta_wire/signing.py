# SPDX-License-Identifier: Apache-2.0
"""Signed manifests: whoever can write the bucket but has no key cannot change what servers load.

The signature is a field of the manifest itself, made over its bytes with zeros in the place of the signature. What a
manifest names (its parent, the table, every object) it names by hash, so one signature vouches for all of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_wire.errors import FormatError, SetupError, SignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FIELD = "signature"
_CONTEXT = b"delta-weight-sync manifest 1\n"
_DIGITS = 128
_SIGNATURE = re.compile(rb"[0-9a-f]{128}")
_PUBLIC = re.compile(r"[0-9a-f]{64}")
_MAX_KEY_FILE_BYTES = 64 << 10


def generate_key(path: Path) -> str:
    """Write a new private key into a file that only its owner can read, and return the public key, 64 hex digits."""
    ed25519 = _ed25519()
    from cryptography.hazmat.primitives import serialization as form

    key = ed25519.Ed25519PrivateKey.generate()
    raw = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SetupError(f"{path}: exists already; a key is never overwritten, choose another file") from None
    except OSError as error:
        raise SetupError(f"{path}: cannot write the key: {error.strerror}; choose another folder") from error
    with os.fdopen(handle, "wb") as file:
        file.write(raw)
    return _public_hex(key)


class Signer:
    """Signs manifests.

    Args:
        path (`str` or `Path`): file with a private key, as [`generate_key`] or `openssl genpkey -algorithm ed25519`
            writes it.
    """

    def __init__(self, path: str | Path):
        ed25519 = _ed25519()
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            with open(path, "rb") as file:
                raw = file.read(_MAX_KEY_FILE_BYTES)
        except OSError as error:
            raise SetupError(
                f"{path}: cannot read the signing key: {error.strerror}; make one with delta-wire keygen"
            ) from None
        try:
            key: Any = load_pem_private_key(raw, password=None)
        except (ValueError, TypeError):
            key = None
        # what the file holds is in no message
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise SetupError(
                f"{path}: expected an Ed25519 private key in PEM form without a password, found something else; make "
                "one with delta-wire keygen"
            )
        self._key: Ed25519PrivateKey = key

    @property
    def public_key(self) -> str:
        """64 hex digits; what servers are given."""
        return _public_hex(self._key)

    def verifier(self) -> Verifier:
        """Accepts what this key has signed."""
        return Verifier(self.public_key)

    def sign(self, raw: bytes) -> bytes:
        """Add the signature to a manifest without one."""
        zeros = raw[:-1] + b',"' + FIELD.encode() + b'":"' + b"0" * _DIGITS + b'"}'
        signature = self._key.sign(_CONTEXT + zeros).hex().encode()
        return zeros.replace(b"0" * _DIGITS + b'"}', signature + b'"}')


class Verifier:
    """Accepts manifests that one of some keys has signed.

    Args:
        keys (`str`): public keys of 64 hex digits, or files that hold one, separated by commas.
    """

    def __init__(self, keys: str):
        ed25519 = _ed25519()
        self.keys = tuple(_read_public(part.strip()) for part in keys.split(",") if part.strip())
        if not self.keys:
            raise SetupError("expected a public key of 64 hexadecimal digits, found none (delta-wire keygen)")
        try:
            self._keys = [ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)) for key in self.keys]
        except ValueError as error:
            raise SetupError(f"a public key cannot be used: {error}; make a new one with delta-wire keygen") from None

    def check(self, raw: bytes, signature: str | None, source: str) -> None:
        """Raise [`SignatureError`] unless one of the keys has signed these bytes.

        Args:
            raw (`bytes`): the manifest as stored, parsed before.
            signature (`str`, *optional*): its signature as parsed.
            source (`str`): what errors call it.
        """
        from cryptography.exceptions import InvalidSignature

        trusted = " or ".join(f"{key[:16]}…" for key in self.keys)
        if signature is None:
            raise SignatureError(
                f"{source}: expected a signature by the key {trusted}, the manifest is not signed; sign the run "
                "(delta_sync_signing_key on the trainer, an empty bucket), or take the public key off this side"
            )
        # escaped digits would be other bytes
        if raw.count(signature.encode()) == 1:
            message = _CONTEXT + raw.replace(signature.encode(), b"0" * _DIGITS)
            for key in self._keys:
                try:
                    key.verify(bytes.fromhex(signature), message)
                    return
                except InvalidSignature:
                    continue
        raise SignatureError(
            f"{source}: expected a signature by the key {trusted}, found one by another key or of other content; "
            "somebody else has written it, or this side has the wrong public key"
        )


def take_signature(value: dict[str, Any], source: str) -> str | None:
    """The field of a parsed manifest, if it has one."""
    found = value.get(FIELD)
    if found is None:
        return None
    if not isinstance(found, str) or not found.isascii() or not _SIGNATURE.fullmatch(found.encode()):
        raise FormatError(f"{source}: a signature is {_DIGITS} lower-case hexadecimal digits, found {found!r:.80}")
    return found


def _read_public(text: str) -> str:
    if _PUBLIC.fullmatch(text):
        return text
    try:
        with open(text, encoding="ascii") as file:
            found = file.read(_MAX_KEY_FILE_BYTES).strip()
    except (OSError, ValueError) as error:
        raise SetupError(
            f"the public key {text!r:.200} is neither 64 hexadecimal digits nor a file that holds them "
            f"({type(error).__name__}); delta-wire keygen prints it"
        ) from None
    if not _PUBLIC.fullmatch(found):
        raise SetupError(f"{text}: expected a public key of 64 lower-case hexadecimal digits, found something else")
    return found


def _public_hex(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise SetupError(
            "signed manifests need the package cryptography; pip install '.[signing]' in a checkout of "
            "delta-weight-sync"
        ) from error
    return ed25519
