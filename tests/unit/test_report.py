# SPDX-License-Identifier: Apache-2.0
"""The report: one file that needs nothing else, with the pictures for which there are values."""

import base64
import html.parser
import json
import sys

import numpy as np
import pytest

from delta_wire.entropy import floor_bytes, histogram, on_line, position_bits, steps_of
from delta_wire.manifest import Ack
from delta_wire.report.collect import group_of
from delta_wire.state import TensorDelta, TensorSpec, TensorTable


class Page(html.parser.HTMLParser):
    """What a page refers to, and its pictures."""

    def __init__(self, text: str):
        super().__init__()
        self.images: dict[str, bytes] = {}
        self.others: list[str] = []
        self.figure = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag == "img":
            kind, _, data = values["src"].partition(",")
            assert kind == "data:image/png;base64"
            # said to whoever cannot see the picture
            assert len(values["alt"].split()) > 8
            self.images[self.figure] = base64.b64decode(data)
        elif tag == "figure":
            self.figure = values["id"]
        self.others += [values[name] for name in ("href", "src") if name in values and tag != "img"]


@pytest.fixture
def logs(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"step": step, "reward": step / 10, "delta/publish_s": 0.1, "loss": 1.0} for step in range(1, 4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def fleet(run, tmp_path):
    path = tmp_path / "fleet.jsonl"
    server = {"state": "serving", "version": "v", "reason": None, "latency_s": 0.5, "pause_ms": 3.0}
    records = [
        {
            "unix_s": 100.0 + seq,
            "servers": [server | {"server": name, "seq": seq, "lag_versions": 3 - seq} for name in ("a", "b")],
        }
        for seq in range(4)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_page_holds_every_picture_and_needs_nothing(command, bucket, logs, fleet, tmp_path):
    result = command("report", bucket, "-o", tmp_path / "out", "--logs", logs, "--fleet", fleet, "--json")
    assert result.code == 0, result.err
    names = {"density", "groups", "payload", "latency", "lag", "reward"}
    assert set(result.json["pictures"]) == names
    text = (tmp_path / "out" / "index.html").read_text()
    page = Page(text)
    assert set(page.images) == names and page.others == [] and "<script" not in text and "url(" not in text
    for name, image in page.images.items():
        assert image == (tmp_path / "out" / f"{name}.png").read_bytes() and image.startswith(b"\x89PNG")
    data = result.json["data"]
    assert [version["seq"] for version in data["versions"]] == [1, 2, 3]
    assert data["versions"][0]["groups"] == {"norms": 3 / 8, "embeddings": 3 / 128, "others": 3 / 192}
    assert data["log"][0] == {"step": 1, "reward": 0.1, "publish_s": 0.1}


def test_from_the_bucket_alone(command, bucket, run, tmp_path):
    result = command("report", bucket, "-o", tmp_path / "out", "--json")
    assert set(result.json["pictures"]) == {"density", "groups", "payload"}
    assert "no server has acknowledged a version" in (tmp_path / "out" / "index.html").read_text()
    run.reader().write_ack(Ack("a", run.writer.version, run.writer.digest, "degraded", "<b>full</b>", 2.0, 1.0))
    result = command("report", bucket, "-o", tmp_path / "out", "--json")
    assert set(result.json["pictures"]) == {"density", "groups", "payload", "latency", "lag"}
    assert "&lt;b&gt;full" in (tmp_path / "out" / "index.html").read_text()
    assert len(command("report", bucket, "-o", tmp_path / "out", "--limit", 1, "--json").json["data"]["versions"]) == 1
    assert command("report", bucket, "-o", tmp_path / "out", "--limit", 10**30).code == 0


def test_a_run_without_versions(command, run, tmp_path):
    result = command("report", run.store.root, "-o", tmp_path / "out", "--json")
    assert result.code == 0 and result.json["pictures"] == {}
    assert "nothing has changed yet" in (tmp_path / "out" / "index.html").read_text()


def test_the_floor_without_the_base_is_left_out(command, bucket, run, tmp_path):
    import shutil

    with_base = command("report", bucket, "-o", tmp_path / "out", "--json").json["data"]["versions"]
    assert all(version["floor_bytes"] > 0 for version in with_base)
    copy = shutil.copytree(run.base, tmp_path / "copy")
    shutil.rmtree(run.base)
    without = command("report", bucket, "-o", tmp_path / "out", "--json").json["data"]["versions"]
    assert all(version["floor_bytes"] is None for version in without)
    again = command("report", bucket, "-o", tmp_path / "out", "--base", copy, "--json").json["data"]["versions"]
    assert [v["floor_bytes"] for v in again] == [v["floor_bytes"] for v in with_base]


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--logs", "not json\n", "log.jsonl:1: expected a JSON object"),
        ("--logs", '{"step": 1, "loss": 2}', "no row has a step and one of reward"),
        ("--logs", '{"log_history": 3}', "expected trainer_state.json"),
        ("--fleet", '{"step": 1}', "expected the lines of `delta-wire watch --json`"),
        ("--fleet", "[]\n", "log.jsonl:1: expected a JSON object"),
    ],
)
def test_what_is_no_log_is_refused(command, bucket, tmp_path, option, text, message):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    result = command("report", bucket, "-o", tmp_path / "out", option, path, "--json")
    assert result.code == 1 and message in result.json["error"]["message"]


def test_a_trainers_state_is_a_log(command, bucket, tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [{"step": 1, "reward": 0.5}, {"train_loss": 1.0}]}))
    result = command("report", bucket, "-o", tmp_path / "out", "--logs", path, "--json")
    assert result.json["data"]["log"] == [{"step": 1, "reward": 0.5}]


def test_without_matplotlib_it_says_what_to_install(command, bucket, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = command("report", bucket, "-o", tmp_path / "out", "--json")
    assert result.code == 1 and "pip install '.[report]'" in result.json["error"]["message"]


def test_files_that_cannot_be_written_or_read(command, bucket, tmp_path):
    (tmp_path / "file").write_text("")
    result = command("report", bucket, "-o", tmp_path / "file" / "out", "--json")
    assert result.code == 1 and "cannot write the picture" in result.json["error"]["message"]
    # a file whose first byte nobody can read
    result = command("report", bucket, "-o", tmp_path / "out", "--logs", "/proc/self/mem", "--json")
    assert result.code == 1 and "/proc/self/mem: cannot read" in result.json["error"]["message"]
    (tmp_path / "taken" / "index.html").mkdir(parents=True)
    result = command("report", bucket, "-o", tmp_path / "taken", "--json")
    assert result.code == 1 and "index.html: cannot write the page" in result.json["error"]["message"]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.layers.0.self_attn.q_norm.weight", "norms"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "experts"),
        ("model.layers.0.mlp.gate_proj.weight", "MLP"),
        ("lm_head.weight", "output head"),
        ("model.rotary.scale", "others"),
    ],
)
def test_groups(name, group):
    assert group_of(name) == group


def test_steps_and_their_floor():
    old = np.array([0x3F80, 0x3F80, 0x0000, 0xBF80], dtype=np.uint16)
    # one up, two down, across zero to the smallest negative, one towards zero
    new = np.array([0x3F81, 0x3F7E, 0x8001, 0xBF7F], dtype=np.uint16)
    part = TensorDelta("t", np.arange(4, dtype=np.int32), new, old)
    steps = steps_of(part)
    assert steps is not None and steps.tolist() == [1, -2, -2, 1]
    assert np.array_equal(on_line(on_line(old)), old)
    assert histogram(steps)["1"] == 2 and histogram(steps)["2"] == 2
    table = TensorTable([TensorSpec("t", (8,))])
    # 8 positions of which half: one bit each; two values, equally often: one bit each
    assert floor_bytes({"t": part}, table) == (8 + 4) / 8
    assert position_bits(np.array([8, 8]), np.array([0, 8])) == 0
    assert floor_bytes({"t": TensorDelta("t", part.indices, new)}, table) is None


def texts_of(figure):
    """Everything that is written in a picture, by its extent in pixels."""
    figure.canvas.draw()
    found = []
    for legend in figure.legends:
        found += [(text.get_text(), text.get_window_extent()) for text in legend.get_texts()]
    for axes in figure.axes:
        legend = axes.get_legend()
        for text in [
            axes._left_title,
            axes.xaxis.label,
            axes.yaxis.label,
            *axes.texts,
            *(legend.get_texts() if legend else ()),
            *(label for axis in (axes.xaxis, axes.yaxis) for label in shown_labels(axis)),
        ]:
            if text.get_visible() and text.get_text():
                found.append((text.get_text(), text.get_window_extent()))
    return found


def shown_labels(axis):
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]


@pytest.mark.parametrize(("num_servers", "num_records"), [(1, 1), (12, 1), (12, 30)])
def test_nothing_in_a_picture_overlaps_or_is_cut(num_servers, num_records):
    from delta_wire.report import plots

    names = [f"rollout-host-{i}.cluster.example-4711" for i in range(num_servers)]
    version = {"delta_bytes": 3_000_000, "full_bytes": 16_000_000_000, "floor_bytes": 2_900_000, "changed_frac": 0.002}
    groups = {"norms": 1, "embeddings": 1, "output head": 1, "experts": 1, "attention": 1, "MLP": 1, "others": 1}
    data = {
        "versions": [
            version | {"seq": i, "step": 100 * i, "groups": dict.fromkeys(groups, 0.001 * (1 + i % 7))}
            for i in range(1, 41)
        ],
        "groups": groups,
        "fleet": [
            {
                "unix_s": 60.0 * at,
                "servers": [
                    {
                        "server": name,
                        "seq": at,
                        "lag_versions": (at + i) % 4,
                        "latency_s": 0.3 * i,
                        "pause_ms": 8.5 + i,
                    }
                    for i, name in enumerate(names)
                ],
            }
            for at in range(num_records)
        ],
        "log": [{"step": step, "reward": 0.01 * step, "publish_s": 0.07} for step in range(1, 41)],
    }
    for name, draw in plots.PICTURES.items():
        figure = draw(data)
        assert figure is not None
        texts = texts_of(figure)
        if name in ("latency", "lag") and num_servers > 1:
            # each server has its own place, in the legend or beside its bar
            assert len({text for text, _ in texts if text.endswith("-4711")}) == num_servers
        labels = [axes.get_xlabel() and axes.get_ylabel() and axes.get_title(loc="left") for axes in figure.axes]
        assert all(labels), name
        width, height = figure.get_size_inches() * figure.dpi
        for i, (text, box) in enumerate(texts):
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside, f"{name}: {text!r} is cut"
            for other, other_box in texts[i + 1 :]:
                overlap_x = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
                overlap_y = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
                assert overlap_x <= 1 or overlap_y <= 1, f"{name}: {text!r} and {other!r} overlap"
