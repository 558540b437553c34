# SPDX-License-Identifier: Apache-2.0
"""`delta-wire bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from delta_wire.commands.common import EXIT_REFUSED, json_option, print_json, print_table, progress, say
from delta_wire.errors import SetupError


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A script of the folder `benchmarks`.

    Args:
        about (`str`): what it measures, and how long that takes.
        full, quick (`tuple[str, ...]`): arguments beside `--json`.
        shown: paths into its JSON and what the table calls them.
    """

    about: str
    full: tuple[str, ...]
    quick: tuple[str, ...]
    shown: tuple[tuple[str, str], ...]


_TRACE = ("--trace", "{dir}/data/smollm2-layer14-up.safetensors")
BENCHMARKS = {
    "payload": Benchmark(
        "bytes of a delta against its entropy, about a minute",
        (*_TRACE, "--sweep"),
        (*_TRACE, "--repeats", "1"),
        (
            ("traces.0.encodings.packed.bytes_per_changed", "packed, bytes per changed element"),
            ("traces.0.encodings.context.bytes_per_changed", "context, bytes per changed element"),
            ("traces.0.others.blog_int32_bf16.bytes_per_changed", "int32 index and bf16 value, the same"),
        ),
    ),
    "extract": Benchmark(
        "finding what has changed, a minute and 12 GB",
        (),
        ("--sizes", "135M", "--repeats", "3"),
        (
            ("135M.ours_s", "135M parameters, seconds"),
            ("135M.speedup_vs_blog", "times faster than compare, mask and gather"),
            ("135M.copy_s", "a plain copy, seconds"),
        ),
    ),
    "pause": Benchmark(
        "how long generation stands still, three minutes",
        (),
        ("--repeats", "1"),
        (
            ("commit_ms", "commit of 0.4 % of 135M parameters, ms"),
            ("commit_speedup_vs_sparse", "times faster than vLLM's sparse patches"),
            ("commit_speedup_vs_reload", "times faster than vLLM's reload"),
        ),
    ),
    "serving": Benchmark(
        "throughput with a version every second, five minutes",
        (),
        ("--phases", "1", "--phase-s", "10"),
        (
            ("tokens_per_s_off", "tokens per second without updates"),
            ("tokens_per_s_on", "tokens per second with a version every second"),
            ("loss_frac", "share lost"),
        ),
    ),
    "memory": Benchmark(
        "what following a bucket costs a server in memory, four minutes",
        (),
        (),
        (
            ("engine_following_mb", "engine core that follows a bucket, MB"),
            ("engine_plain_mb", "engine core that does not, MB"),
            ("engine_bytes_per_change", "at the peak of a commit, bytes in the engine core per changed element"),
            ("rank_0_bytes_per_change", "and in a rank"),
        ),
    ),
    "overhead": Benchmark(
        "what publishing costs a training step, five minutes",
        (),
        ("--pairs", "1", "--block-steps", "2"),
        (
            ("share", "share of a step spent in the training thread"),
            ("step_s_without", "seconds of a step without it"),
            ("step_s_with", "seconds of a step with it"),
        ),
    ),
    "outage": Benchmark(
        "training through ten minutes without its bucket, a quarter of an hour",
        (),
        ("--seconds", "20"),
        (
            ("steps_during_outage", "optimizer steps while the bucket was away"),
            ("longest_s_of_the_training_thread", "longest time that it held a step up, seconds"),
            ("most_pending_bytes", "bytes of gathered changes at most"),
        ),
    ),
    "faults": Benchmark(
        "trainer, servers and bucket under 1,000 faults, half an hour",
        ("--count", "1000"),
        ("--count", "20"),
        (
            ("faults", "faults injected"),
            ("wrong_states", "states that were no version"),
            ("unrecovered", "rounds without recovery"),
        ),
    ),
    "fuzz": Benchmark(
        "10,000 damaged objects, ten minutes",
        ("--count", "10000"),
        ("--count", "200"),
        (("cases", "damaged objects read"), ("refused", "refused by name"), ("failures", "failures")),
    ),
    "gpu": Benchmark("every kernel on this GPU, two minutes; needs one", (), (), ()),
}


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]…")
@click.option("--list", "only_list", is_flag=True, help="Say what there is to run.")
@click.option("--quick", is_flag=True, help="Fewer and shorter runs: numbers to look at, not to keep.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the scripts are; by default the checkout that this command is installed from.",
)
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also write DIR/NAME.json.",
)
@json_option
def bench(
    names: tuple[str, ...], only_list: bool, quick: bool, folder: Path | None, save: Path | None, as_json: bool
) -> None:
    """Run benchmarks and print one table.

    \b
    Examples: delta-wire bench --list
              delta-wire bench payload extract --quick
              delta-wire bench --save benchmarks/results
    """
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise click.UsageError(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    if only_list:
        _print_list(as_json)
        return
    folder = folder or Path(__file__).parents[2] / "benchmarks"
    if not folder.is_dir():
        raise SetupError(
            f"{folder}: there is no such folder; the benchmarks are part of a checkout, not of the installed package. "
            "Name its folder with --dir."
        )
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    # a GPU is not everywhere
    for name in names or [name for name in BENCHMARKS if name != "gpu"]:
        say(f"running {name}: {BENCHMARKS[name].about}")
        try:
            with progress(name):
                results[name] = _run(folder, name, quick)
        except SetupError as error:
            failed[name] = str(error)
            say(f"error: {error}")
            continue
        if save is not None:
            save.mkdir(parents=True, exist_ok=True)
            (save / f"{name}.json").write_text(json.dumps(results[name], indent=2) + "\n")
    if as_json:
        print_json({"results": results, "failed": failed})
    elif results:
        print_table(["benchmark", "value", "what"], [row for name in results for row in _rows(name, results[name])])
    if failed:
        raise click.exceptions.Exit(EXIT_REFUSED)


def _print_list(as_json: bool) -> None:
    if as_json:
        print_json({"benchmarks": {name: benchmark.about for name, benchmark in BENCHMARKS.items()}})
    else:
        print_table(["benchmark", "what"], [[name, benchmark.about] for name, benchmark in BENCHMARKS.items()])


def _run(folder: Path, name: str, quick: bool) -> dict[str, Any]:
    """What a script prints, which is a JSON object on its last line."""
    benchmark = BENCHMARKS[name]
    arguments = [argument.format(dir=folder) for argument in (benchmark.quick if quick else benchmark.full)]
    done = subprocess.run(
        [sys.executable, str(folder / f"{name}.py"), *arguments, "--json"], stdout=subprocess.PIPE, text=True
    )
    # a library may have written before the result
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        result = json.loads(last)
    except json.JSONDecodeError:
        result = None
    if done.returncode or not isinstance(result, dict):
        printed = "a result" if isinstance(result, dict) else f"no result but {last[:200]!r}"
        raise SetupError(f"{folder / name}.py ended with exit code {done.returncode} and printed {printed}")
    return result


def _rows(name: str, result: dict[str, Any]) -> list[list[str]]:
    return [[name, f"{_at(result, path):.4g}", what] for path, what in BENCHMARKS[name].shown]


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value
