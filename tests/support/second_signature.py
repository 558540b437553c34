# SPDX-License-Identifier: Apache-2.0
"""Ed25519 signatures of manifests, verified from RFC 8032 and section 4.1 of docs/FORMAT.md with the standard library
only; a part of `second_reader`."""

import hashlib

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
ROOT = pow(2, (P - 1) // 4, P)  # of -1
Point = tuple[int, int, int, int]  # extended coordinates


def add(p: Point, q: Point) -> Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]), (p[1] + p[0]) * (q[1] + q[0])
    c, d = 2 * p[3] * q[3] * D, 2 * p[2] * q[2]
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def multiply(factor: int, p: Point) -> Point:
    total: Point = (0, 1, 1, 0)
    while factor:
        if factor & 1:
            total = add(total, p)
        p, factor = add(p, p), factor >> 1
    return total


def point(raw: bytes) -> Point | None:
    y, sign = int.from_bytes(raw, "little") & 2**255 - 1, raw[31] >> 7
    x_squared = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(x_squared, (P + 3) // 8, P)
    if (x * x - x_squared) % P:
        x = x * ROOT % P
    if y >= P or (x * x - x_squared) % P or (not x and sign):
        return None
    x = P - x if x & 1 != sign else x
    return x, y, 1, x * y % P


BASE = point((4 * pow(5, -1, P) % P).to_bytes(32, "little"))


def is_signed(message: bytes, signature: bytes, public_key: bytes) -> bool:
    """Section 5.1.7 of the RFC; 32 bytes of key, 64 of signature."""
    a, r, s = point(public_key), point(signature[:32]), int.from_bytes(signature[32:], "little")
    if a is None or r is None or s >= ORDER:
        return False
    assert BASE is not None
    k = int.from_bytes(hashlib.sha512(signature[:32] + public_key + message).digest(), "little") % ORDER
    left, right = multiply(s, BASE), add(r, multiply(k, a))
    return all((left[i] * right[2] - right[i] * left[2]) % P == 0 for i in (0, 1))


def manifest_is_signed(raw: bytes, signature: object, public_keys: tuple[bytes, ...]) -> bool:
    """Whether one of the keys has signed a manifest with this field `signature`."""
    if not isinstance(signature, str) or raw.count(signature.encode()) != 1:
        return False
    if len(signature) != 128 or not set(signature) <= set("0123456789abcdef"):
        return False
    message = b"delta-weight-sync manifest 1\n" + raw.replace(signature.encode(), b"0" * 128)
    return any(is_signed(message, bytes.fromhex(signature), key) for key in public_keys)
