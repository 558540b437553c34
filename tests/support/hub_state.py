# SPDX-License-Identifier: Apache-2.0
"""What the hub of hub_server.py keeps: buckets, their files, and what is to go wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

WRITE_TOKEN, READ_TOKEN = "hf_write_token_of_the_tests", "hf_read_token_of_the_tests"


@dataclass
class Fault:
    """What happens to requests that match, instead of or beside the answer.

    Args:
        pattern (`re.Pattern`): searched in `METHOD /path` of a request.
        times (`int`): for so many requests.
        after (`int`): the first ones that match are spared.
        status (`int`, *optional*): answer with this status; nothing takes effect.
        headers (`dict`): of that answer.
        delay_s (`float`): before anything else happens.
        hang (`bool`): never answer; nothing takes effect.
        close (`bool`): close the connection without an answer; nothing takes effect.
        lose (`bool`): let it take effect, then close the connection without an answer.
        truncate (`bool`): send half of the answer's body.
        partial (`str`, *optional*): operations of a batch on paths that contain this fail, the others take effect.
        stale (`bool`): answer a listing with what it was before the last batch.
    """

    pattern: re.Pattern[str]
    times: int = 1
    after: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    hang: bool = False
    close: bool = False
    lose: bool = False
    truncate: bool = False
    partial: str | None = None
    stale: bool = False


@dataclass
class File:
    """One path of a bucket."""

    xet_hash: str
    size_bytes: int
    mtime: str


@dataclass
class Bucket:
    """Paths, what they were before the last batch, and the feed of changes."""

    files: dict[str, File] = field(default_factory=dict)
    before: dict[str, File] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)
    visibility: str = "public"
