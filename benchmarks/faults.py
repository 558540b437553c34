# SPDX-License-Identifier: Apache-2.0
"""Everything that can go wrong between a trainer and its servers, many times over, in a real bucket.

    python benchmarks/faults.py --count 1000 --seed 1 --store file --json

One trainer and several servers run in processes of their own and share nothing but the bucket. Faults come one to
three at a time: a process is killed by SIGKILL at a random line of the protocol or suspended, calls to the store are
refused, hang, or lose their answer, what is read is truncated, flipped, swapped, stale or missing, objects in the
bucket are damaged, lost or put in each other's place, disks are full, clocks jump, a second trainer or a stranger
writes. After each round training goes on, and every server has to arrive at the newest version without help.

At every step of its engine a server notes its label and a hash of its live weights. Both must belong together: the
label is a version that a trainer committed, the bits are that version's in full. `wrong_states` counts where they do
not, `unrecovered` the rounds in which a server or the trainer did not arrive in time.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fault_campaign import Campaign
from fault_kinds import FAULTS
from fault_processes import Place, preload
from fault_services import start

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from fake_server import write_checkpoint

from delta_wire.machine import measured

# of the second half of a soak over the first
_MOST_GROWTH = 1.5
_TREND_VERSIONS = 1000


def soak(campaign: Campaign, versions: int) -> dict[str, Any]:
    """Publish so many versions without a fault and watch what grows."""
    campaign.settle()
    samples: list[dict[str, int]] = []
    while campaign.versions < versions:
        campaign.trainer.send("train", 20)
        campaign.await_recovery("soak")
        campaign.check_journals()
        if campaign.versions >= (len(samples) + 1) * versions // 20:
            sizes = [info.size_bytes for info in campaign.store.list("")]
            memory = [_resident_bytes(child.process.pid) for child in (campaign.trainer, *campaign.servers)]
            samples.append(
                {
                    "version": campaign.versions,
                    "bucket_bytes": sum(sizes),
                    "objects": len(sizes),
                    "trainer_bytes": memory[0],
                    "server_bytes": max(memory[1:]),
                }
            )
    # without faults every process lives from the first to the last version
    half = len(samples) // 2
    early, late = samples[1:half], samples[half:]
    grown = {
        name: max(sample[name] for sample in late) / max(sample[name] for sample in early)
        for name in samples[0]
        if name != "version"
    }
    # over few versions the teeth of anchors and sweeps, which depend on the clock, are larger than any trend
    if versions >= _TREND_VERSIONS and any(factor > _MOST_GROWTH for factor in grown.values()):
        campaign.result.unrecovered += 1
        campaign.result.note(f"something grows without a bound: {grown}")
    return {"samples": samples, "growth": {name: round(factor, 3) for name, factor in grown.items()}}


def _resident_bytes(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="faults to inject, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=["file", "s3", "hf"], default="file")
    parser.add_argument("--soak", type=int, metavar="VERSIONS", help="publish so many versions without any fault")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=30.0, help="a round that takes longer has not recovered")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="delta-faults-"))
    began_s = time.monotonic()
    grown: dict[str, Any] = {}
    try:
        preload(folder / "warm")
        write_checkpoint(folder / "base")
        with start(args.store, folder) as service:
            # a hub has more ways to be slow
            grace_s = 0.5 if args.store == "file" else 2.0
            place = Place(service.url, folder, poll_s=0.01 if args.store == "file" else 0.05, grace_s=grace_s)
            campaign = Campaign(place, service, args.seed, args.servers, FAULTS, args.timeout_s)
            try:
                if args.soak:
                    grown = soak(campaign, args.soak)
                    args.count = 0
                else:
                    campaign.settle()
                while campaign.result.faults < args.count:
                    campaign.round()
            finally:
                campaign.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = campaign.result
    recovery_s = sorted(result.recovery_s)
    report = {
        "store": args.store,
        "seed": args.seed,
        "servers": args.servers,
        "faults": result.faults,
        "by_kind": dict(sorted(result.by_kind.items())),
        "restarts": result.kills,
        "anchors_needed": result.cut_off,
        "wrong_states": result.wrong_states,
        "unrecovered": result.unrecovered,
        "versions": campaign.versions,
        "states_checked": result.looks,
        "recovery_s": {
            f"p{p}": round(recovery_s[int(p / 100 * (len(recovery_s) - 1))], 3)
            for p in (50, 90, 99, 100)
            if recovery_s
        },
        "wall_s": round(time.monotonic() - began_s, 1),
        **grown,
        "problems": result.problems,
        "measured": measured(),
    }
    print(json.dumps(report, indent=None if args.json else 2))
    sys.exit(1 if result.wrong_states or result.unrecovered else 0)


if __name__ == "__main__":
    main()
