# SPDX-License-Identifier: Apache-2.0
"""What one of several training processes reports of its part of a version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from delta_wire.digest import Digest
from delta_wire.parts import Part
from delta_wire.refs import ObjectRef
from trl_delta.rows import Rows


@dataclass(frozen=True, slots=True)
class Contribution:
    """Told to the first process through the key/value store.

    Args:
        parts (list of [`~delta_wire.parts.Part`]): objects of the delta, none if nothing has changed here.
        digest ([`~delta_wire.digest.Digest`]): of what the process owns after the change.
        rows ([`~trl_delta.rows.Rows`], *optional*): what it owns, for an anchor.
        failure (`str`, *optional*): why it has no part; empty if another process is to blame.
    """

    parts: list[Part]
    digest: Digest
    rows: Rows | None = None
    failure: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "parts": [
                {
                    "ref": part.ref.to_json(),
                    "encoding": part.encoding,
                    "changed_params": part.changed_params,
                    "change": str(part.change),
                }
                for part in self.parts
            ],
            "digest": str(self.digest),
            "rows": self.rows and self.rows.to_json(),
            "failure": self.failure,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Contribution:
        parts = [
            Part(
                ObjectRef.from_json(part["ref"], "a part", "deltas/"),
                part["encoding"],
                part["changed_params"],
                Digest.parse(part["change"]),
            )
            for part in value["parts"]
        ]
        rows = value["rows"] and Rows.from_json(value["rows"])
        return cls(parts, Digest.parse(value["digest"]), rows, value["failure"])
