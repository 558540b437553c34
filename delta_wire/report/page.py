# SPDX-License-Identifier: Apache-2.0
"""The page itself: one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import statistics
import time
from html import escape
from pathlib import Path
from typing import Any

from delta_wire import __version__
from delta_wire.describe import format_age, format_bytes
from delta_wire.errors import SetupError

# what a picture shows, for somebody who sees such a run for the first time
CAPTIONS = {
    "density": "Training moves every weight a little, but at this learning rate most moves are too small to change "
    "the 16-bit number that is served. Only weights whose bits changed are sent.",
    "groups": "The same, for each part of the model on its own. Small weights have finer neighbours, so parts with "
    "small weights change more often.",
    "payload": "Bytes of one version on a logarithmic scale: everything, what was really sent, and the entropy floor, "
    "which no coder of independent positions and steps can go below.",
    "latency": "How long a version takes: from the trainer's step to the bucket, from the bucket to being served, and "
    "how long token generation stood still for it. Clocks of different machines may differ.",
    "lag": "Versions that a server is behind the newest in the bucket. Zero is best; a line that climbs is a server "
    "that does not follow any more.",
    "reward": "What the trainer logged. Weight synchronisation does not change it: servers are equal, bit for bit, "
    "to the trainer.",
}
_MISSING = {
    "latency": "Latency: no server has acknowledged a version. Let servers write acknowledgements (DELTA_SYNC_ACK=1), "
    "or pass what <code>delta-wire watch --json</code> recorded with <code>--fleet</code>.",
    "lag": "Lag: no server has acknowledged a version.",
    "reward": "Reward: pass the trainer's log with <code>--logs</code> (trainer_state.json, or JSON lines).",
    "density": "Density and payload: the run has no version after its first yet.",
}
_ROWS = 30
# the pictures stay on white paper where the page is dark
_STYLE = """
:root{color-scheme:light dark;--ink:#1f2933;--soft:#52606d;--line:#d9dee4;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e4e7eb;--soft:#a3afbb;--line:#3e4c59;--paper:#1b2127}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2rem auto;max-width:48rem;
padding:0 1rem}
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2rem 0 .4rem}
.lead{font-size:1.05rem}.cards{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0}
.card{flex:1 1 7.5rem;border:1px solid var(--line);border-radius:.5rem;padding:.6rem .9rem}
.card b{display:block;font-size:1.35rem}.card span{color:var(--soft);font-size:.85rem}
figure{margin:1.6rem 0}
figure img{width:100%;height:auto;background:#fff;border:1px solid var(--line);border-radius:.3rem}
figcaption,.note,footer{color:var(--soft);font-size:.9rem;max-width:48rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;width:100%}
th,td{text-align:left;padding:.25rem .7rem .25rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
td.wrap{white-space:normal}dt{font-weight:600;margin-top:.5rem}dd{margin:0 0 0 1rem}code{font-size:.9em}
footer{margin-top:2.5rem}
"""


def write_page(data: dict[str, Any], pictures: dict[str, Path], path: Path) -> None:
    """Write the page.

    Args:
        data (`dict`): as [`~delta_wire.report.collect.collect`] returns it.
        pictures (`dict`): PNG files by name; they are copied into the page.
        path (`Path`): the HTML file.
    """
    body = [
        f"<h1>Weight synchronisation of run {escape(data['run'])}</h1>",
        f"<p class=lead>{_lead(data)}</p>",
        _cards(data),
        *(_figure(name, pictures[name]) for name in CAPTIONS if name in pictures),
        *(f"<p class=note>{note}</p>" for name, note in _MISSING.items() if name not in pictures),
        "<h2>Servers</h2>",
        _servers(data),
        "<h2>Versions</h2>",
        _versions(data),
        "<h2>Words</h2>",
        _words(),
        (
            f"<footer>Made by delta-wire {__version__} from {escape(data['bucket'])} on "
            f"{_when(data['made_unix_s'])}. Every figure comes from the bucket"
            f"{' and the log that was passed' if data['log'] else ''}.</footer>"
        ),
    ]
    text = (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>Weight synchronisation of run {escape(data['run'])}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{path}: cannot write the page: {error.strerror}; choose another folder") from error


def _lead(data: dict[str, Any]) -> str:
    versions, model = data["versions"], data["model"]
    size = f"{model['num_params']:,} weights ({format_bytes(model['full_bytes'])})"
    if not versions:
        return f"A trainer has begun to publish a model of {size}, and nothing has changed yet."
    share = statistics.mean(version["changed_frac"] for version in versions)
    sent = statistics.mean(version["delta_bytes"] for version in versions)
    lasted_s = versions[-1]["created_unix_s"] - versions[0]["created_unix_s"]
    return (
        f"While a model of {size} is trained, its weights are sent to the servers that generate text with it. "
        f"In {format_age(max(0.0, lasted_s))} its trainer published {len(versions)} new versions. On average "
        f"{share:.3%} of the weights had changed, so {format_bytes(round(sent))} were sent in place of "
        f"{format_bytes(model['full_bytes'])}: one part in {model['full_bytes'] / sent:.0f}."
    )


def _cards(data: dict[str, Any]) -> str:
    versions = data["versions"]
    cards = []
    if versions:
        sent = sum(version["delta_bytes"] for version in versions)
        full = sum(version["full_bytes"] for version in versions)
        floors = [v for v in versions if v.get("floor_bytes")]
        cards += [
            (f"{statistics.mean(version['changed_frac'] for version in versions):.3%}", "of the weights change"),
            (format_bytes(round(sent / len(versions))), "sent per version"),
            (f"1/{full / sent:.0f}", "of the whole model"),
        ]
        if floors:
            ratio = sum(v["delta_bytes"] for v in floors) / sum(v["floor_bytes"] for v in floors)
            cards.append((f"{ratio:.2f}×", "the entropy floor"))
    servers = _last_of_servers(data)
    if servers:
        well = sum(server["state"] == "serving" for server in servers)
        cards.append((f"{well} of {len(servers)}", "servers are well"))
    pauses = [server["pause_ms"] for server in servers if server["pause_ms"] is not None]
    if pauses:
        cards.append((f"{max(pauses):.1f} ms", "longest of their last pauses"))
    inner = "".join(
        f"<div class=card><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in cards
    )
    return f"<div class=cards>{inner}</div>"


def _figure(name: str, picture: Path) -> str:
    image = base64.b64encode(picture.read_bytes()).decode()
    return (
        f"<figure id='{escape(name)}'><img alt='{escape(CAPTIONS[name])}' src='data:image/png;base64,{image}'>"
        f"<figcaption>{escape(CAPTIONS[name])}</figcaption></figure>"
    )


def _last_of_servers(data: dict[str, Any]) -> list[dict[str, Any]]:
    last = {server["server"]: server for record in data["fleet"] for server in record["servers"]}
    return list(last.values())


def _servers(data: dict[str, Any]) -> str:
    servers = _last_of_servers(data)
    if not servers:
        return "<p class=note>No server has said anything.</p>"
    return _table(
        ["server", "state", "version", "behind", "last pause", "reason"],
        [
            [
                server["server"],
                server["state"],
                server["version"] or "–",
                "–" if server["lag_versions"] is None else str(server["lag_versions"]),
                "–" if server["pause_ms"] is None else f"{server['pause_ms']:.1f} ms",
                server["reason"] or "",
            ]
            for server in servers
        ],
    )


def _versions(data: dict[str, Any]) -> str:
    versions = data["versions"][::-1]
    table = _table(
        ["version", "step", "made", "changed", "sent", "of full", "encoding"],
        [
            [
                version["version"],
                "–" if version["step"] is None else str(version["step"]),
                _when(version["created_unix_s"]),
                f"{version['changed_frac']:.4%}",
                format_bytes(version["delta_bytes"]),
                f"1/{version['full_bytes'] / version['delta_bytes']:.0f}",
                version["encoding"],
            ]
            for version in versions[:_ROWS]
        ],
    )
    left = len(versions) - _ROWS
    return table + (f"<p class=note>And {left} older ones.</p>" if left > 0 else "")


def _words() -> str:
    words = {
        "version": "one state of the model's weights, named run-epoch-number and known by a digest of all its bits",
        "delta": "the list of weights that changed since the version before, with their new values",
        "bucket": "the folder or object store through which trainer and servers exchange versions",
        "entropy floor": "what the delta would take with a perfect coder that knows only how many weights of each "
        "tensor changed and how often each size of step occurs",
        "step": "of the optimizer: one update of the weights; of a weight: how many neighbouring 16-bit numbers it "
        "moved",
        "pause": "the time in which a server generates nothing because it swaps weights in",
        "behind": "how many versions newer than its own a server could serve",
    }
    return "<dl>" + "".join(f"<dt>{word}</dt><dd>{escape(text)}</dd>" for word, text in words.items()) + "</dl>"


def _table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))
