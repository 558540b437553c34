# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import numpy as np
import pytest

from delta_wire.digest import Digest, digest_change, digest_tensor, tensor_keys
from delta_wire.errors import FormatError

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """Written from docs/FORMAT.md, not from the code."""
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ x >> 33


def by_hand(name: str, elements: dict[int, int]) -> Digest:
    key_0, key_1 = tensor_keys(name)
    words = [index << 16 | bits for index, bits in elements.items()]
    return Digest(sum(mix(w ^ key_0) for w in words) & MASK, sum(mix(w + key_1 & MASK) for w in words) & MASK)


# the vectors of docs/FORMAT.md
VECTORS = [
    ("a", [0x3F80], "3e5cd9aa4ce10aa47193fa4a6c1093bc"),
    ("a", [0x3F80, 0xBF80, 0x0000], "8fc4f127d619f0338057491e4e844c00"),
    ("model.embed_tokens.weight", [0x0000, 0x8000, 0x7FC1, 0xFF80], "84a6c3838f76d8c2b2cd6ddeec0d50a9"),
]


@pytest.mark.parametrize(("name", "bits", "expected"), VECTORS)
def test_digest_of_a_tensor_is_the_sum_over_its_elements(name, bits, expected):
    assert str(digest_tensor(name, np.array(bits, np.uint16))) == expected
    assert digest_tensor(name, np.array(bits, np.uint16)) == by_hand(name, dict(enumerate(bits)))


def test_shape_does_not_matter_but_name_position_and_bits_do():
    bits = np.arange(24, dtype=np.uint16)
    digest = digest_tensor("w", bits)
    assert digest == digest_tensor("w", bits.reshape(2, 3, 4))
    assert digest != digest_tensor("v", bits)
    assert digest != digest_tensor("w", bits[::-1].copy())
    # minus zero is not zero, a NaN is not another NaN
    assert digest_tensor("w", np.array([0x8000], np.uint16)) != digest_tensor("w", np.array([0], np.uint16))
    assert digest_tensor("w", np.array([0x7FC0], np.uint16)) != digest_tensor("w", np.array([0x7FC1], np.uint16))


def test_change_updates_the_digest_in_order_of_what_changed():
    before = np.arange(100, dtype=np.uint16)
    after = before.copy()
    indices = np.array([0, 7, 99], np.int32)
    after[indices] = [1, 2, 0xFFFF]
    step = digest_change("w", indices, before[indices], after[indices])
    assert digest_tensor("w", before) + step == digest_tensor("w", after)
    assert digest_tensor("w", after) - step == digest_tensor("w", before)


def test_indices_beyond_32_bits():
    index = (1 << 45) + 3
    found = digest_change("w", np.array([index], np.int64), np.array([5], np.uint16), np.array([9], np.uint16))
    assert found == by_hand("w", {index: 9}) - by_hand("w", {index: 5})


def test_an_empty_tensor_adds_nothing():
    assert digest_tensor("w", np.empty((0, 4), np.uint16)) == Digest()


def test_text_round_trip():
    digest = Digest(0x0123456789ABCDEF, 1)
    assert str(digest) == "0123456789abcdef0000000000000001"
    assert Digest.parse(str(digest)) == digest


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "0" * 31 + "A", "0" * 31 + "g", "0" * 32 + "\n", None, 5])
def test_other_text_is_refused(text):
    with pytest.raises(FormatError, match="32 lower-case hexadecimal"):
        Digest.parse(text)


def test_the_vectors_of_the_document():
    text = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| `([0-9a-f ]+)` \| `([0-9a-f]{32})` \|$", text, re.MULTILINE)
    assert len(rows) >= 3
    for name, bits, expected in rows:
        assert str(digest_tensor(name, np.array([int(b, 16) for b in bits.split()], np.uint16))) == expected
    (index, far) = re.search(r"`0001` at index (\d+) minus `0000` there \| `([0-9a-f]{32})`", text).groups()
    found = digest_change("w", np.array([int(index)], np.int64), np.array([0], np.uint16), np.array([1], np.uint16))
    assert str(found) == far
    keys = re.search(r'`keys\("a"\)` is `([0-9a-f]{16})`, `([0-9a-f]{16})`', text).groups()
    assert tuple(int(key, 16) for key in keys) == tensor_keys("a")
