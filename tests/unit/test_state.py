# SPDX-License-Identifier: Apache-2.0
import hashlib
import json

import numpy as np
import pytest

from delta_wire.errors import FormatError, ModelMismatchError
from delta_wire.state import (
    TensorDelta,
    TensorSpec,
    TensorTable,
    change_of_digest,
    check_part,
    compose,
    num_changed,
    whole,
)

RAW = b'{"a":{"dtype":"BF16","shape":[2,3]},"b":{"dtype":"BF16","shape":[]}}'


def part(name="w", indices=(0, 2), new=(1, 2), old=(3, 4), index_dtype=np.int32):
    bits = [np.array(values, np.uint16) if values is not None else None for values in (new, old)]
    return TensorDelta(name, np.array(indices, index_dtype), bits[0], bits[1])


def test_table_round_trip_is_canonical():
    table = TensorTable([TensorSpec("b", ()), TensorSpec("a", (2, 3))])
    assert table.to_bytes() == RAW
    assert table.sha256 == hashlib.sha256(RAW).hexdigest()
    assert TensorTable.from_bytes(RAW, "x").to_bytes() == RAW
    assert (table.num_params, table.full_bytes, list(table)) == (7, 14, ["a", "b"])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "expected a JSON object"),
        (b"[]", "expected a JSON object"),
        (b"\xff\xfe", "expected a JSON object"),
        (RAW[:-1], "torn or foreign"),
        (b"[" * 100_000, "torn or foreign"),
        (b'{"a":{"dtype":"BF16","shape":[1]},"a":{"dtype":"BF16","shape":[1]}}', "a key is given twice"),
        (b'{"":{"dtype":"BF16","shape":[1]}}', "no tensor name"),
        (b'{"\\ud800":{"dtype":"BF16","shape":[1]}}', "no tensor name"),
        (b'{"a\\nb":{"dtype":"BF16","shape":[1]}}', "no tensor name"),
        (b'{"' + b"x" * 1025 + b'":{"dtype":"BF16","shape":[1]}}', "no tensor name"),
        (b'{"a":{"dtype":"F32","shape":[1]}}', "tensor a: expected dtype BF16"),
        (b'{"a":{"dtype":"BF16","shape":[1],"x":1}}', "tensor a: expected dtype BF16"),
        (b'{"a":{"dtype":"BF16","shape":[-1]}}', "no shape"),
        (b'{"a":{"dtype":"BF16","shape":[true]}}', "no shape"),
        (b'{"a":{"dtype":"BF16","shape":[1.0]}}', "no shape"),
        (b'{"a":{"dtype":"BF16","shape":[1,1,1,1,1,1,1,1,1]}}', "no shape"),
        (b'{"a":{"dtype":"BF16","shape":[8388608,16777216]}}', "more than"),
        (b'{"a":{"dtype":"BF16","shape":[0,1' + b"0" * 4000 + b"]}}", "more than"),
        (b'{"a":{"dtype":"BF16","shape":[1' + b"0" * 5000 + b"]}}", "torn or foreign"),
    ],
)
def test_bad_tables_are_refused_by_name(raw, message):
    with pytest.raises(FormatError, match=message) as caught:
        TensorTable.from_bytes(raw, "bucket/tables/x.json")
    assert str(caught.value).startswith("bucket/tables/x.json")


def test_a_name_twice_is_refused():
    with pytest.raises(FormatError, match="twice"):
        TensorTable([TensorSpec("a", (1,)), TensorSpec("a", (2,))])


def test_require_same_names_every_kind_of_difference():
    expected = TensorTable([TensorSpec("a", (1,)), TensorSpec("b", (2,)), TensorSpec("c", (3,))])
    found = TensorTable([TensorSpec("b", (2,)), TensorSpec("c", (4,)), TensorSpec("d", (1,))])
    expected.require_same(expected, "x", "y")
    with pytest.raises(ModelMismatchError) as caught:
        expected.require_same(found, "the run", "the trainer")
    message = str(caught.value)
    assert "missing in the trainer: a" in message and "only in the trainer: d" in message
    assert "c [3] BF16 ≠ [4] BF16" in message


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (part(indices=(2, 0)), "index 0 after 2 at position 1"),
        (part(indices=(1, 1)), "index 1 after 1 at position 1"),
        (part(indices=(-1, 1)), "index -1 at position 0"),
        (part(indices=(0, 6)), "index 6 after 0 at position 1"),
        (part(indices=(0, 1, 2)), "one value per index"),
        (part(index_dtype=np.int16), "int32 or int64"),
        (TensorDelta("w", np.array([0], np.int32), np.array([0], np.int16)), "int32 or int64"),
        (TensorDelta("w", np.array([[0]], np.int32), np.array([[0]], np.uint16)), "one value per index"),
    ],
)
def test_check_part_names_the_position(bad, message):
    spec = TensorSpec("w", (2, 3))
    check_part(part(), spec, "here")
    check_part(part(indices=(), new=(), old=()), spec, "here")
    with pytest.raises(FormatError, match=f"here: tensor w.*{message}"):
        check_part(bad, spec, "here")


def test_compose_lets_the_second_win_and_drops_what_came_back():
    first = {"w": part(indices=(0, 2, 5), new=(10, 12, 15), old=(1, 2, 3))}
    second = {"w": part(indices=(2, 3, 5), new=(2, 33, 16), old=(12, 4, 15)), "v": part("v")}
    both = compose(first, second)
    assert both["w"].indices.tolist() == [0, 3, 5]
    assert both["w"].new.tolist() == [10, 33, 16]
    assert both["w"].old is not None and both["w"].old.tolist() == [1, 4, 3]
    assert both["v"] is second["v"]
    assert change_of_digest(both) == change_of_digest(first) + change_of_digest(second)


def test_compose_without_old_bits_keeps_everything():
    first = {"w": part(indices=(0, 2), new=(10, 12), old=None)}
    second = {"w": part(indices=(2, 3), new=(2, 33), old=(12, 4))}
    both = compose(first, second)["w"]
    assert (both.indices.tolist(), both.new.tolist(), both.old) == ([0, 2, 3], [10, 2, 33], None)
    with pytest.raises(ValueError, match="w has no old bits"):
        change_of_digest({"w": both})


def test_compose_with_the_inverse_is_nothing():
    forth = {"w": part()}
    back = {"w": part(new=(3, 4), old=(1, 2))}
    assert compose(forth, back) == {}


def test_whole_lists_every_element_and_changes_the_digest_alike():
    bits = np.arange(6, dtype=np.uint16)
    change = part(indices=(1, 4), new=(1, 4), old=(100, 200))
    full = whole(change, bits)
    assert full.indices.tolist() == list(range(6)) and full.indices.dtype == np.int32
    assert full.new.tolist() == [0, 1, 2, 3, 4, 5] and full.old is not None
    assert full.old.tolist() == [0, 100, 2, 3, 200, 5]
    assert change_of_digest({"w": full}) == change_of_digest({"w": change})
    assert num_changed({"w": full}) == num_changed({"w": change}) == 2
    assert num_changed({"w": whole(part(indices=(1, 4), old=None), bits)}) == 6


def test_json_escapes_of_names_survive():
    table = TensorTable([TensorSpec('mödel."x"\\y', (1,))])
    raw = table.to_bytes()
    assert raw.isascii() and list(json.loads(raw)) == list(table)
    assert TensorTable.from_bytes(raw, "x") == table
