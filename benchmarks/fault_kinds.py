# SPDX-License-Identifier: Apache-2.0
"""The faults of `faults.py` that need no service of their own: processes, calls, objects, disks, clocks, strangers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress

from fault_campaign import Campaign, Child
from fault_processes import train

from delta_wire.errors import StoreError
from delta_wire.manifest import POINTER_KEY


def _kill(campaign: Campaign) -> None:
    campaign.any_child().send("kill", int(2 ** (campaign.random.random() * 10)))


def _kill_now(campaign: Campaign) -> None:
    campaign.any_child().signal(signal.SIGKILL)


def _suspend(campaign: Campaign) -> None:
    child = campaign.any_child()
    child.signal(signal.SIGSTOP)
    campaign.later(lambda: child.signal(signal.SIGCONT), 0.2)


def _suspend_long(campaign: Campaign) -> None:
    """A server that sleeps until what it needed next has been swept."""
    child = campaign.random.choice(campaign.servers)
    child.signal(signal.SIGSTOP)
    campaign.later(lambda: child.signal(signal.SIGCONT), 3 * campaign.place.grace_s)


def _chaos(kind: str) -> Callable[[Campaign], None]:
    def fault(campaign: Campaign) -> None:
        campaign.any_child().send("chaos", (kind, campaign.random.randrange(1, 4)))

    return fault


def _disk(campaign: Campaign) -> None:
    child = campaign.any_child()
    child.send("disk", campaign.random.choice((0, 64, 700)))
    campaign.later(lambda: child.send("disk", -1))


def _clock(campaign: Campaign) -> None:
    campaign.any_child().send("clock", campaign.random.choice((-1e9, -86400, 86400, 3e8)))


def _damage(prefix: str, how: str) -> Callable[[Campaign], None]:
    def fault(campaign: Campaign) -> None:
        keys = campaign.keys(prefix)
        if not keys:
            return
        # the newest are the ones that are looked at
        key = campaign.random.choice(keys[-3:])
        before = campaign.read(key)
        if before is None:
            return
        for_good = prefix in ("deltas/", "anchors/") and campaign.random.random() < 0.5
        campaign.replace(key, before, _broken(campaign, prefix, key, before, how), for_good)

    return fault


def _broken(campaign: Campaign, prefix: str, key: str, data: bytes, how: str) -> bytes | None:
    if how == "missing":
        return None
    if not data:
        # truncated before this one came
        return data
    if how == "truncated":
        return data[: campaign.random.randrange(len(data))]
    if how == "flipped":
        at = campaign.random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << campaign.random.randrange(8)]) + data[at + 1 :]
    other = campaign.random.choice(campaign.keys(prefix) or [key])
    return campaign.read(other) or b""


def _lost_unseen(campaign: Campaign) -> None:
    """The delta of a version that no server has seen yet is lost for good."""
    for server in campaign.servers:
        server.signal(signal.SIGSTOP)
    before = set(campaign.keys("deltas/"))
    campaign.trainer.send("train", 1)
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        new = [key for key in campaign.keys("deltas/") if key not in before]
        content = campaign.read(new[-1]) if new else None
        if content is not None:
            campaign.replace(new[-1], content, None, for_good=True)
            break
        time.sleep(0.004)
    for server in campaign.servers:
        server.signal(signal.SIGCONT)


def _second_writer(campaign: Campaign) -> None:
    """The same run started twice: a trainer that was thought dead, or a job that was submitted twice."""
    second = Child(lambda c, s: train(c, campaign.place, s), campaign.random)
    second.send("train", 2)
    second.send("wait", 0.5)
    campaign.later(second.end, 0.6)


def _foreign(campaign: Campaign) -> None:
    """Somebody writes what is none of ours, or moves the pointer."""
    before = campaign.read(POINTER_KEY)
    keys = campaign.keys("versions/")
    what = campaign.random.choice(("noise", "pointer", "ack"))
    with suppress(StoreError):
        if what == "noise":
            campaign.store.put(f"deltas/{campaign.random.getrandbits(40):012d}-foreign.safetensors", b"noise")
            campaign.store.put("something/else.txt", b"noise")
        elif what == "ack":
            campaign.store.put("acks/stranger.json", b'{"format": 1')
        elif before is not None and keys:
            after = campaign.random.choice((b"", b"{}", before.replace(b'"run":"', b'"run":"x')))
            campaign.replace(POINTER_KEY, before, after, for_good=False)


FAULTS: dict[str, Callable[[Campaign], None]] = {
    "kill_at_a_line": _kill,
    "kill_in_a_row": lambda campaign: [_kill(campaign) for _ in range(3)] and None,
    "kill_now": _kill_now,
    "suspend": _suspend,
    "suspend_long": _suspend_long,
    **{f"call_{kind}": _chaos(kind) for kind in ("refuse", "hang", "lose")},
    **{f"read_{kind}": _chaos(kind) for kind in ("truncate", "flip", "swap", "stale", "missing")},
    **{f"delta_{how}": _damage("deltas/", how) for how in ("missing", "truncated", "flipped", "swapped")},
    "delta_lost_unseen": _lost_unseen,
    **{f"manifest_{how}": _damage("versions/", how) for how in ("missing", "truncated", "flipped", "swapped")},
    **{f"pointer_{how}": _damage(POINTER_KEY, how) for how in ("missing", "truncated", "flipped")},
    **{f"anchor_{how}": _damage("anchors/", how) for how in ("missing", "truncated", "flipped")},
    "table_flipped": _damage("tables/", "flipped"),
    "disk_full": _disk,
    "clock_jump": _clock,
    "second_writer": _second_writer,
    "foreign_writer": _foreign,
}
