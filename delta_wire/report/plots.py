# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report, drawn with matplotlib (the extra `report`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_wire.describe import format_bytes
from delta_wire.entropy import LABELS
from delta_wire.errors import SetupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, GRID = "#1f2933", "#d9dee4"
# told apart by people who do not see all colours, too
COLOURS = ("#0b6e99", "#d9730d", "#4d8b31", "#9b3d8f", "#5f5fc4", "#6c757d", "#c0392b")
_DPI = 140
# narrow, with large letters: legible on a phone and at half the width of a page
WIDTH_IN = 7.0
# a legend of more would hide the picture
_MAX_SERVERS = 12
_NAME_CHARS = 26
# columns of a legend: of servers, and of names that this project gives
_SERVER_COLUMNS, _WORD_COLUMNS = 2, 4
# around each panel
_PAD_IN = 0.1
# an axis with fewer powers of ten on it gets numbers between them
_FEW_TICKS = 3


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty picture in the style of all others."""
    try:
        from matplotlib import rcParams
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise SetupError(
            "drawing needs matplotlib, which is not installed: pip install '.[report]' in a checkout of "
            "delta-weight-sync"
        ) from error
    rcParams.update(
        {
            "font.size": 12,
            "axes.titlesize": 13,
            "axes.titlelocation": "left",
            "axes.titlepad": 9,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.grid": True,
            "grid.color": GRID,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
        }
    )
    layout = ConstrainedLayoutEngine(w_pad=_PAD_IN, h_pad=_PAD_IN)
    figure = Figure(figsize=(width_in, height_in), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=_DPI)
    except (OSError, ValueError) as error:
        # matplotlib names the formats that it knows
        raise SetupError(f"{path}: cannot write the picture: {error}") from error


def draw_report(
    data: dict[str, Any], folder: Path, each: Callable[[int], None] = lambda total: None
) -> dict[str, Path]:
    """Draw what there are values for; returns the files by the names in [`PICTURES`]. `each` as in `collect`."""
    drawn = {}
    for name, draw in PICTURES.items():
        figure = draw(data)
        if figure is not None:
            drawn[name] = folder / f"{name}.png"
            save(figure, drawn[name])
        each(len(PICTURES))
    return drawn


def _density(data: dict[str, Any]) -> Figure | None:
    if not data["versions"]:
        return None
    figure = new_figure(WIDTH_IN, 3.6)
    axes = figure.add_subplot()
    x, label = _axis(data)
    axes.plot(x, [100 * version["changed_frac"] for version in data["versions"]], "o-", color=COLOURS[0], ms=4)
    _finish(axes, "How much of the model changes from version to version", label, "changed weights (%)")
    axes.set_ylim(bottom=0)
    return figure


def _groups(data: dict[str, Any]) -> Figure | None:
    versions = [version for version in data["versions"] if version.get("groups")]
    if not versions:
        return None
    figure = new_figure(WIDTH_IN, 4.2)
    axes = figure.add_subplot()
    x, label = _axis(data, versions)
    for number, group in enumerate(data["groups"]):
        shares = [100 * version["groups"][group] for version in versions]
        # zero has no place on this axis
        points = [(at, share) for at, share in zip(x, shares, strict=True) if share > 0]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[number % len(COLOURS)], ms=3, label=group)
    axes.set_yscale("log")
    _plain_log(axes)
    _finish(axes, "Which parts of the model change", label, "changed weights of the part (%, log)")
    _legend_under(figure, axes, _WORD_COLUMNS)
    return figure


def _payload(data: dict[str, Any]) -> Figure | None:
    if not data["versions"]:
        return None
    figure = new_figure(WIDTH_IN, 4.2)
    axes = figure.add_subplot()
    x, label = _axis(data)
    axes.plot(x, [v["full_bytes"] for v in data["versions"]], "-", color=COLOURS[1], lw=2, label="all weights (bf16)")
    axes.plot(x, [v["delta_bytes"] for v in data["versions"]], "o-", color=COLOURS[0], ms=4, label="what was sent")
    floors = [
        (at, version["floor_bytes"]) for at, version in zip(x, data["versions"], strict=True)
        if version.get("floor_bytes")
    ]  # fmt: skip
    if floors:
        axes.plot(*zip(*floors, strict=True), "--", color=COLOURS[2], label="entropy floor")
    axes.set_yscale("log")
    _plain_log(axes, lambda value: format_bytes(round(value)))
    _finish(axes, "What travels", label, "bytes per version (log)")
    _legend_under(figure, axes, _WORD_COLUMNS)
    return figure


def _latency(data: dict[str, Any]) -> Figure | None:
    published = [(row["step"], row["publish_s"]) for row in data["log"] if "publish_s" in row]
    by_server = [
        (_by_server(data, "latency_s"), "Publication to being served", "seconds"),
        (_by_server(data, "pause_ms"), "Pause of generation", "milliseconds"),
    ]
    shown = [entry for entry in by_server if entry[0]]
    num_panels = bool(published) + len(shown)
    if not num_panels:
        return None
    num_servers = max((len(values) for values, _, _ in shown), default=0)
    # where only one version is known of each server, names stand beside bars and need the width
    as_bars = all(len(points) == 1 for values, _, _ in shown for points in values.values())
    height_in = 1.0 + 0.3 * max(num_servers, 3) if as_bars else 2.6
    below_in = 0.0 if as_bars else _legend_in(num_servers)
    figure = new_figure(WIDTH_IN, 2.6 * bool(published) + len(shown) * height_in + below_in)
    panels = [figure.add_subplot(num_panels, 1, i + 1) for i in range(num_panels)]
    if published:
        axes = panels.pop(0)
        axes.plot(*zip(*published, strict=True), "o-", color=COLOURS[0], ms=4)
        _finish(axes, "Trainer to bucket", "optimizer step", "seconds")
        axes.set_ylim(bottom=0)
    for axes, (values, title, unit) in zip(panels, shown, strict=True):
        if as_bars:
            _bars(axes, {server: points[0][1] for server, points in values.items()})
            _finish(axes, title, unit, "server")
        else:
            _lines(axes, values, marker="o", ms=3)
            _finish(axes, title, "version", unit)
            axes.set_ylim(bottom=0)
    if not as_bars:
        _legend_under(figure, panels[-1])
    return figure


def _lines(axes: Axes, values: dict[str, list[tuple[float, float]]], **style: Any) -> None:
    """One line a server; when the colours are used up the lines are broken."""
    for number, (server, points) in enumerate(values.items()):
        row, column = divmod(number, len(COLOURS))
        dashes = ("-", "--")[row % 2]
        axes.plot(*zip(*points, strict=True), ls=dashes, color=COLOURS[column], label=server, **style)


def _bars(axes: Axes, values: dict[str, float]) -> None:
    """A horizontal bar with its number for each server, the first on top."""
    bars = axes.barh(list(values), list(values.values()), color=COLOURS[0], height=0.5)
    axes.bar_label(bars, fmt="%.3g", padding=3)
    # one bar alone shall not fill the picture
    axes.set_ylim(max(len(values), 3) - 0.4, -0.6)
    axes.set_xlim(0, 1.15 * max(values.values()) or 1)


def _lag(data: dict[str, Any]) -> Figure | None:
    records = [record for record in data["fleet"] if record["servers"]]
    if not records:
        return None
    began_s = records[0]["unix_s"]
    lines: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for server in record["servers"]:
            if server["lag_versions"] is not None:
                at = (record["unix_s"] - began_s, server["lag_versions"])
                lines.setdefault(server["server"], []).append(at)
    short = _short(lines)
    shown = {short[server]: points for server, points in list(lines.items())[:_MAX_SERVERS]}
    if not shown:
        return None
    if len(records) == 1:
        figure = new_figure(WIDTH_IN, 1.5 + 0.3 * max(len(shown), 3))
        axes = figure.add_subplot()
        _bars(axes, {server: points[0][1] for server, points in shown.items()})
        _finish(axes, "How far servers are behind now", "versions behind the newest", "server")
        _whole_numbers(axes.xaxis)
        return figure
    figure = new_figure(WIDTH_IN, 3.6 + _legend_in(len(shown)))
    axes = figure.add_subplot()
    _lines(axes, shown, lw=1.5, drawstyle="steps-post")
    _finish(axes, "How far servers are behind", "seconds since the first record", "versions behind the newest")
    # zero is what is hoped for, and shall be seen above the axis
    axes.set_ylim(bottom=-0.05 * max(1.0, axes.get_ylim()[1]))
    _whole_numbers(axes.yaxis)
    _legend_under(figure, axes)
    return figure


def _reward(data: dict[str, Any]) -> Figure | None:
    points = [(row["step"], row["reward"]) for row in data["log"] if "reward" in row]
    if not points:
        return None
    figure = new_figure(WIDTH_IN, 3.4)
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[3], ms=4)
    _finish(axes, "Reward", "optimizer step", "mean reward")
    return figure


# each takes a report's data and returns nothing where there is nothing to draw
PICTURES: dict[str, Callable[[dict[str, Any]], Figure | None]] = {
    "density": _density,
    "groups": _groups,
    "payload": _payload,
    "latency": _latency,
    "lag": _lag,
    "reward": _reward,
}


def draw_version(version: dict[str, Any], path: Path) -> None:
    """The tensors of one version and the sizes of their steps.

    Args:
        version (`dict`): as `delta-wire inspect --json` prints it.
        path (`Path`): the PNG.
    """
    tensors: list[dict[str, Any]] = version["tensors"]
    if not tensors:
        raise SetupError(f"version {version['version']} has no delta, so there is nothing to draw")
    figure = new_figure(11, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    shares = sorted((100 * tensor["listed"] / max(1, tensor["elements"]) for tensor in tensors), reverse=True)
    left.bar(range(1, len(shares) + 1), shares, color=COLOURS[0], width=1.0)
    left.set_yscale("log")
    _plain_log(left)
    _finish(
        left,
        f"Version {version['seq']}: tensors by changed share",
        "tensor, most changed first",
        "changed weights (%, log)",
    )
    known: list[dict[str, int]] = [tensor["steps"] for tensor in tensors if tensor["steps"]]
    total = sum(sum(steps.values()) for steps in known)
    counts = [100 * sum(steps[label] for steps in known) / max(1, total) for label in LABELS]
    right.bar(LABELS, counts, color=COLOURS[1])
    _finish(right, "Sizes of the steps", "neighbouring bf16 values", "changed weights (%)")
    save(figure, path)


def _axis(data: dict[str, Any], versions: list[dict[str, Any]] | None = None) -> tuple[list[int], str]:
    """Optimizer steps if all versions have one, else their numbers."""
    shown: list[dict[str, Any]] = data["versions"] if versions is None else versions
    if all(version["step"] is not None for version in shown):
        return [version["step"] for version in shown], "optimizer step"
    return [version["seq"] for version in shown], "version"


def _by_server(data: dict[str, Any], field: str) -> dict[str, list[tuple[float, float]]]:
    """A field of every server by version, as first seen with it."""
    found: dict[str, dict[float, float]] = {}
    for record in data["fleet"]:
        for server in record["servers"]:
            if server["seq"] is not None and server.get(field) is not None:
                found.setdefault(server["server"], {}).setdefault(server["seq"], server[field])
    short = _short(found)
    return {short[server]: sorted(points.items()) for server, points in list(found.items())[:_MAX_SERVERS]}


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if x_label in ("optimizer step", "version"):
        _whole_numbers(axes.xaxis)


def _whole_numbers(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def _plain_log(axes: Axes, text: Callable[[float], str] = "{:g}".format) -> None:
    """Plain numbers on a logarithmic axis; between powers of ten, too, where there are few of these."""
    low, high = axes.get_ylim()
    powers = math.floor(math.log10(high)) - math.ceil(math.log10(max(low, 1e-300))) + 1
    near = powers < _FEW_TICKS

    def minor(value: float, _: object) -> str:
        return text(value) if near and f"{value:e}"[0] in "25" else ""

    axes.yaxis.set_major_formatter(lambda value, _: text(value))
    axes.yaxis.set_minor_formatter(minor)


def _legend_under(figure: Figure, axes: Axes, columns: int = _SERVER_COLUMNS) -> None:
    """One legend for all panels, where there is more than one line."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=10)


def _legend_in(num_servers: int) -> float:
    """Inches that such a legend takes."""
    return 0.22 * -(-num_servers // _SERVER_COLUMNS) if num_servers > 1 else 0.0


def _short(servers: Iterable[str]) -> dict[str, str]:
    """Names that leave room for the picture: their ends, unless these are not enough to tell them apart."""
    short = {name: name if len(name) <= _NAME_CHARS else f"…{name[1 - _NAME_CHARS :]}" for name in servers}
    return short if len(set(short.values())) == len(short) else {name: name for name in short}
