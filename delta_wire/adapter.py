# SPDX-License-Identifier: Apache-2.0
"""What a run says about itself whose states are not models but low-rank adapters for one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from delta_wire.digest import Digest
from delta_wire.errors import FormatError
from delta_wire.refs import take_digest
from delta_wire.strict import take, take_int, take_text

# a model's name in requests, and part of a label
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_RANK = 1 << 16
MAX_REFERENCE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter and the model it belongs to.

    Args:
        name (`str`): by which requests ask for it.
        rank (`int`): largest rank of its factors.
        base_digest ([`~delta_wire.digest.Digest`]): of the base model's weights, which the run never changes.
        base_reference (`str`, *optional*): where the trainer had the base model from; for people.
    """

    name: str
    rank: int
    base_digest: Digest
    base_reference: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rank": self.rank,
            "base": {"digest": str(self.base_digest), "reference": self.base_reference},
        }


def parse_adapter(value: object, source: str) -> Adapter | None:
    """The field `adapter` of a manifest; `None` if there is none. `source` names the object in errors."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise FormatError(f"{source}: expected an object, found {value!r:.80}")
    name = take_text(value, "name", source, 64)
    if not ADAPTER_NAME.fullmatch(name):
        raise FormatError(f"{source}: {name!r:.80} is no name of an adapter")
    base = take(value, "base", source)
    if not isinstance(base, dict):
        raise FormatError(f"{source}: base: expected an object, found {base!r:.80}")
    reference = take(base, "reference", f"{source}: base")
    if reference is not None:
        reference = take_text(base, "reference", f"{source}: base", MAX_REFERENCE_CHARS)
    return Adapter(name, take_int(value, "rank", source, 1, MAX_RANK), take_digest(base, f"{source}: base"), reference)
