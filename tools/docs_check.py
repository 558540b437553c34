# SPDX-License-Identifier: Apache-2.0
"""Run what the documents and the headers of the examples tell people to run.

    python tools/docs_check.py          what needs neither a server nor a trainer; seconds
    python tools/docs_check.py --full   also a real `vllm serve` and a real TRL trainer, as the README says; minutes

Every fenced block of `bash` or `python` in README.md, docs/, configs/ and benchmarks/results/ is run, in the order of
its document and in a folder of its own, against a small run that is made for it, unless a comment before it differs:

    <!-- docs-check: needs a GPU -->      it is only parsed; likewise `needs an account`, `needs a model hub`
    <!-- docs-check: full -->             it is run by --full, and parsed without
    <!-- docs-check: serve -->            the same, and it goes on while the blocks after it are run

Of commands that would take long by themselves only what they name is checked: `make` targets and `pip` extras exist.

In the header of an example a command is an indented line. It is run if it is one of [`AT_ONCE`]; of the others, which
tests run in their tiny forms or which need GPUs, the example's own parser must accept every option.
The exit code is 1 if a block fails or is marked in no known way.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "README.md",
    "docs/*.md",
    "configs/README.md",
    "benchmarks/results/README.md",
    "examples/README.md",
    "examples/*.py",
    "examples/*/*.py",
)
NEEDS = ("needs a GPU", "needs an account", "needs a model hub")
MARKS = (*NEEDS, "full", "serve")
SERVER = "http://localhost:8000"
START_TIMEOUT_S = 300
BLOCK_TIMEOUT_S = 300
SETTLE_TIMEOUT_S = 120
_CPU = "__import__('trl').SFTConfig(output_dir='trainer', use_cpu=True, bf16=False, max_steps=3, report_to=[])"
_DATASET = 'load_dataset("trl-lib/Capybara", split="train")'
# commands of examples that need a second or two, and neither a server nor a trainer
AT_ONCE = re.compile(r"examples/(read_a_delta\.py|prepare_model\.py tiny|wordle_space/train_wordle\.py --show)")
# what stands for a checkpoint of the version before in the header of read_a_delta.py
_OLD = "CHECKPOINT"
# a command, and what it is said to do
_SAID = re.compile(r"(?<=\S) {2,}.*")
_PARSE = """
import argparse, json, runpy, sys
parse = argparse.ArgumentParser.parse_args

def parse_only(parser, *arguments, **options):
    parse(parser, *arguments, **options)
    raise SystemExit(0)

argparse.ArgumentParser.parse_args = parse_only
script, *calls = sys.argv[1:]
sys.path.insert(0, script.rpartition("/")[0])
for call in calls:
    sys.argv = [script, *json.loads(call)]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    else:
        raise SystemExit(f"{script} ends without having looked at its options")
"""
_BLOCK = re.compile(
    r"(?:^<!-- docs-check: (?P<mark>.*?) -->\n)?^```(?P<kind>bash|python)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, slots=True)
class Block:
    """A snippet of a document.

    Args:
        place (`str`): file and line.
        kind (`str`): `"bash"` or `"python"`, or `"header"` of an example.
        mark (`str`, *optional*): what the comment before it says.
        text (`str`): the snippet.
    """

    place: str
    kind: str
    mark: str | None
    text: str


def blocks_of(path: Path) -> list[Block]:
    """All blocks of a document, in order; of an example the commands in its header, as one."""
    text = path.read_text(encoding="utf-8")
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    if path.suffix == ".py":
        header = ast.get_docstring(ast.parse(text), clean=False) or ""
        lines = [_SAID.sub("", line[4:]) for line in header.splitlines() if line.startswith("    ")]
        return [Block(f"{shown}:2", "header", None, "\n".join(lines))] if lines else []
    return [
        Block(f"{shown}:{text.count(chr(10), 0, match.start('text'))}", match["kind"], match["mark"], match["text"])
        for match in _BLOCK.finditer(text)
    ]


class Stage:
    """Where blocks run: a folder with a small run, whatever the documents call it.

    Args:
        folder (`Path`): of the stage.
        full (`bool`): with a model that transformers and vLLM open, and without a run, which is made by the blocks.
    """

    def __init__(self, folder: Path, full: bool):
        self.folder = folder
        # where the reader is, who has followed every `cd`
        self.cwd = folder
        self.full = full
        self.servers: list[subprocess.Popen[str]] = []
        model = folder / "model"
        # what the documents name, and what stands for it here
        self.names = {
            "/mnt/shared/run-1": str(folder / "shared" / "run-1"),
            "HuggingFaceTB/SmolLM2-135M-Instruct": str(model),
            "SFTTrainer(\n": f"SFTTrainer(\n    args={_CPU},\n",
            _DATASET: f"load_dataset('json', data_files={str(folder / 'data.json')!r}, split='train')",
        }
        for name in ("shared", "runs/demo"):
            (folder / name).mkdir(parents=True)
        shutil.copytree(ROOT / "configs", folder / "configs", ignore=shutil.ignore_patterns("runs", "model"))
        (folder / "examples").symlink_to(ROOT / "examples")
        sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]
        if full:
            from prepare_model import prepare

            prepare("tiny", model)
            (folder / "shared" / "run-1").mkdir()
        else:
            _write_model(model)
            _publish(model, folder / "shared" / "run-1")
        _publish(model, folder / "runs" / "demo" / "bucket")
        rows = [{"text": f"{a} plus {b} is {a + b}"} for a in range(4) for b in range(4)]
        (folder / "data.json").write_text(json.dumps(rows))
        log = {"step": 1, "reward": 0.5, "delta/publish_s": 0.1}
        (folder / "runs" / "demo" / "log.jsonl").write_text(json.dumps(log) + "\n")
        (folder / "runs" / "demo" / "fleet.jsonl").write_text(json.dumps({"unix_s": 1.0, "servers": []}) + "\n")

    def environment(self) -> dict[str, str]:
        own = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            # gigabytes for keys and values of a server on the CPU
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return {name: value for name, value in os.environ.items() if not name.startswith("DELTA_SYNC_")} | own

    def run(self, block: Block) -> str | None:
        """Why a block fails; `None` if it does not."""
        text = block.text
        for name, here in self.names.items():
            text = text.replace(name, here)
        if block.mark in NEEDS or (block.mark in ("full", "serve") and not self.full):
            return parse(block.kind, text)
        if block.kind == "python":
            return self._call([sys.executable, "-c", text]) or self._settle()
        if block.kind == "header":
            return self._header(text)
        if block.mark == "serve":
            return self._serve(text)
        for line in commands(text):
            if line.startswith("cd "):
                problem = self._enter(line)
            else:
                problem = self._check(line) if is_long(line) else self._call(["bash", "-euo", "pipefail", "-c", line])
            if problem:
                return problem
        return None

    def _enter(self, line: str) -> str | None:
        """Every document begins in a checkout, and so does every `cd`."""
        self.cwd = self.folder / shlex.split(line)[1]
        return None if self.cwd.is_dir() else f"{line}: there is no such folder"

    def _header(self, text: str) -> str | None:
        """The commands of an example's header."""
        calls: dict[str, list[str]] = {}
        for line in commands(text):
            problem = parse("bash", line)
            words = [] if problem else shlex.split(line)
            if words[:1] != ["python"]:
                # no command at all, or vLLM's own on another machine
                pass
            elif not (script := ROOT / words[1]).is_file():
                problem = f"there is no {words[1]}"
            elif AT_ONCE.match(words[1] + " " + " ".join(words[2:])):
                problem = self._run_example(script, words[2:])
            else:
                calls.setdefault(str(script), []).append(json.dumps(words[2:]))
            if problem:
                return problem
        # importing what an example imports takes longer than all else
        problems = (self._call([sys.executable, "-c", _PARSE, script, *of]) for script, of in calls.items())
        return next(filter(None, problems), None)

    def _run_example(self, script: Path, words: list[str]) -> str | None:
        if _OLD in words:
            version = int(words[words.index("--version") + 1])
            delta_wire = [sys.executable, "-m", "delta_wire", "checkout", f"{words[0]}@{version - 1}", _OLD]
            problem = self._call(delta_wire)
            if problem:
                return problem
        return self._call([sys.executable, str(script), *words])

    def _call(self, command: list[str]) -> str | None:
        try:
            done = subprocess.run(
                command,
                cwd=self.cwd,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=BLOCK_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"it has not ended after {BLOCK_TIMEOUT_S} s"
        return f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}" if done.returncode else None

    def _settle(self) -> str | None:
        """Wait until a server serves what has been published, as a reader of the document would."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        status = {}
        while self.servers and status.get("state") != "serving":
            if time.monotonic() > deadline_s:
                return f"the server does not follow: {status}"
            with urllib.request.urlopen(f"{SERVER}/delta/status", timeout=30) as answer:
                status = json.load(answer)
            if status.get("lag_versions") != 0:
                status["state"] = "behind"
            time.sleep(0.5)
        return None

    def _check(self, line: str) -> str | None:
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True)
            return done.stderr if done.returncode else None
        extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
        asked = {extra for word in words for extra in re.findall(r"\[(.*?)\]", word)}
        unknown = {extra for names in asked for extra in names.split(",")} - extras
        return f"there is no extra {', '.join(sorted(unknown))}" if unknown else None

    def _serve(self, text: str) -> str | None:
        log = self.folder / "server.log"
        with log.open("w") as file:
            server = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=self.cwd,
                env=self.environment(),
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        self.servers.append(server)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and server.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{SERVER}/health", timeout=5).close()
                return None
            time.sleep(0.5)
        return f"the server does not answer\n{log.read_text()[-4000:]}"

    def close(self) -> None:
        """End what still runs."""
        for server in self.servers:
            for sign, wait_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(wait_s)


def commands(text: str) -> Iterator[str]:
    """Commands of a shell block: lines, where a backslash joins the next one."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def is_long(line: str) -> bool:
    """Whether a command takes minutes and changes the machine."""
    return line.split()[0] == "make" or bool(re.search(r"\bpip install\b", line))


def parse(kind: str, text: str) -> str | None:
    """Why a block is no program; `None` if it is one."""
    if kind == "bash":
        done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
        return done.stderr if done.returncode else None
    try:
        ast.parse(text)
    except SyntaxError as error:
        return str(error)
    return None


def _write_model(folder: Path) -> None:
    """A checkpoint of random weights; enough for everything but a model."""
    import numpy as np

    from delta_wire.container import write_tensors

    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (64, 32), "model.layers.0.mlp.up_proj.weight": (128, 32)}
    tensors = {
        name: ("BF16", shape, random.integers(0x3C00, 0x3F00, shape).astype(np.uint16))
        for name, shape in shapes.items()
    }
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))


def _publish(model: Path, bucket: Path) -> None:
    """A run of eight versions, with a server that has acknowledged the last."""
    from training import Training

    from delta_wire.bucket import BucketReader
    from delta_wire.manifest import Ack

    training = Training(model, bucket)
    writer = training.start()
    for _ in range(8):
        training.publish(writer, encoding="packed")
    ack = Ack("server-1", writer.version, writer.digest, "serving", None, 8.0, time.time())
    BucketReader(writer.store).write_ack(ack)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also start servers and trainers")
    parser.add_argument("documents", nargs="*", type=Path, help="default: all of them")
    arguments = parser.parse_args()
    documents = arguments.documents or [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]
    failed = counted = 0
    for document in documents:
        blocks = blocks_of(document.resolve())
        if not blocks:
            continue
        with tempfile.TemporaryDirectory(prefix="docs-check-") as folder:
            # a document that starts no server finds a run that is there already
            full = arguments.full and any(block.mark in ("full", "serve") for block in blocks)
            stage = Stage(Path(folder) / "stage", full)
            try:
                for block in blocks:
                    began_s = time.monotonic()
                    known = block.mark is None or block.mark in MARKS
                    problem = stage.run(block) if known else f"the mark {block.mark!r} is none of {', '.join(MARKS)}"
                    counted += 1
                    failed += problem is not None
                    took = f"{time.monotonic() - began_s:.1f} s" + (f", {block.mark}" if block.mark else "")
                    print(f"{'FAILED' if problem else 'ok    '} {block.place} ({block.kind}, {took})", flush=True)
                    if problem:
                        print("       " + problem.replace("\n", "\n       "), flush=True)
            finally:
                stage.close()
    print(f"{counted - failed} of {counted} blocks hold")
    return 1 if failed or not counted else 0


if __name__ == "__main__":
    sys.exit(main())
