# SPDX-License-Identifier: Apache-2.0
"""What the documents say holds: commands run, links lead somewhere, names and numbers are those of the code."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
EXAMPLES = sorted(
    path
    for path in (ROOT / "examples").rglob("*.py")
    if "__main__" in path.read_text() and "parser" in path.read_text()
)


def source() -> str:
    folders = ("delta_wire", "trl_delta", "vllm_delta", "triton_kernels", "tools", "examples")
    return "".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


def check(*arguments, cwd=ROOT):
    command = [sys.executable, str(ROOT / "tools" / "docs_check.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


def test_every_command_of_the_documents_runs():
    """But for those that start servers and trainers, which `make docs-check` runs, too."""
    pytest.importorskip("matplotlib")
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "README.md" in done.stdout


BROKEN = [
    ("```bash\ndelta-wire log nowhere\n```\n", "no such folder"),
    ("```bash\ndelta-wire lug /mnt/shared/run-1\n```\n", "No such command"),
    ("```bash\nmake no-such-target\n```\n", "no-such-target"),
    ("```bash\npip install '.[gpus]'\n```\n", "there is no extra gpus"),
    ("```python\nimport delta_wire\ndelta_wire.nothing\n```\n", "AttributeError"),
    ("<!-- docs-check: needs a GPU -->\n```python\nf(a=1, 2)\n```\n", "positional argument follows"),
    ("<!-- docs-check: needs a miracle -->\n```bash\ntrue\n```\n", "is none of"),
    ("<!-- docs-check: full -->\n```bash\nif\n```\n", "syntax error"),
]


def test_what_does_not_run_is_found(tmp_path):
    path = tmp_path / "document.md"
    path.write_text("```bash\ntrue\n```\n" + "".join(text for text, _ in BROKEN))
    done = check(path)
    assert done.returncode == 1 and f"1 of {len(BROKEN) + 1} blocks hold" in done.stdout, done.stdout + done.stderr
    first, *findings = done.stdout.split("FAILED ")
    assert first.startswith("ok") and len(findings) == len(BROKEN)
    for finding, (_, problem) in zip(findings, BROKEN, strict=True):
        assert problem in finding


HEADERS = [
    ("python examples/multi_replica.py --no-such-option 3", "unrecognized arguments: --no-such-option 3"),
    ("python examples/no_such_example.py", "there is no examples/no_such_example.py"),
    ("python examples/read_a_delta.py runs/demo/no-bucket", "no-bucket"),
    ("python examples/demo_server.py", "without having looked at its options"),
    ("vllm serve 'MODEL", "unexpected EOF"),
]


def test_commands_of_examples_that_do_not_run_are_found(tmp_path):
    paths = [tmp_path / f"example_{i}.py" for i in range(len(HEADERS))]
    for path, (line, _) in zip(paths, HEADERS, strict=True):
        path.write_text(f'"""Something.\n\n    {line}   what it does\n\nMore.\n"""\n')
    done = check(*paths)
    assert done.returncode == 1 and f"0 of {len(HEADERS)} blocks hold" in done.stdout, done.stdout + done.stderr
    _, *findings = done.stdout.split("FAILED ")
    for finding, (_, problem) in zip(findings, HEADERS, strict=True):
        assert problem in finding


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_command_hides_in_a_block_of_another_kind(path):
    blocks = re.findall(r"^```(.*?)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} <= {"", "bash", "python", "json", "yaml"}
    command = re.compile(r"^(\$ )?(delta-wire|trl-delta|vllm|make|pip|python|accelerate|torchrun) ", re.MULTILINE)
    assert not [text for kind, text in blocks if kind != "bash" and command.search(text)]


def test_a_document_without_a_block_checks_nothing(tmp_path):
    (tmp_path / "document.md").write_text("no block at all\n")
    assert check(tmp_path / "document.md").returncode == 1


def test_numbers_and_pictures_are_those_of_the_results():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "figures.py"), "--check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_every_result_says_how_it_was_made(path):
    measured = json.loads(path.read_text())["measured"]
    made = measured["command"].split()
    assert made[0] == "make" or (made[0] == "python" and (ROOT / made[1]).is_file())
    assert measured["unix_s"] > 1.7e9 and measured["machine"]["cores"] >= 1 and measured["machine"]["processor"]
    assert {"python", "delta-weight-sync", "numpy", "torch"} <= measured["versions"].keys()
    # somebody else shall be able to type it
    assert str(ROOT) not in measured["command"] and "/tmp" not in measured["command"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    missing = [target for target in targets if "://" not in target and not (path.parent / target).resolve().exists()]
    assert not missing
    for target, section in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", path.read_text()):
        if "://" not in target:
            headings = re.findall(r"^#+ (.*)$", (path.parent / target if target else path).read_text(), re.MULTILINE)
            # as they are named in addresses
            assert section in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_those_of_the_code(path):
    text, code = path.read_text(), source()
    names = set(re.findall(r"\bDELTA_(?:SYNC|STORE)_[A-Z_]*[A-Z]\b|\bdelta_sync_[a-z_]*[a-z]\b", text))
    assert not {name for name in names if name not in code}
    for owner, member in re.findall(r"`([A-Z][A-Za-z]+)\.([a-z_]+)", text):
        found = re.search(rf"^class {owner}\b.*?(?=^class |\Z)", code, re.MULTILINE | re.DOTALL)
        assert found and re.search(rf"^    (def )?{member}\b", found[0], re.MULTILINE), f"{owner}.{member}"
    # a counter's sample is called as its family with _total
    metrics = {name.removesuffix("_total") for name in re.findall(r"vllm_delta:(\w+)", text)}
    known = set(re.findall(r"vllm_delta:(\w+)", code)) | {"served_seq", "target_seq", "lag_versions"}
    assert metrics <= known


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_say_what_they_are(path):
    """What it shows, what it needs, how long it takes, and by which command: docs_check looks at that."""
    text = path.read_text()
    header = text.split('"""')[1]
    for word in ("Shows:", "Needs:", "Takes:"):
        assert word in header, f"{path}: the header does not say {word}"
    assert f"    python {path.relative_to(ROOT)}" in header and "description=__doc__" in text


def test_the_games_of_wordle(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "wordle_space"))
    import train_wordle as game

    assert game.hint("geese", "eagle") == "YY--G"
    assert game.hint("eagle", "geese") == "Y-Y-G"
    assert game.hint("apple", "apple") == "GGGGG"
    assert len(set(game.WORDS)) == len(game.WORDS) and all(len(word) == game.LETTERS for word in game.WORDS)
    for row in game.make_rows(20):
        right, wrong = game.reward(
            [[{"content": row["word"].upper() + "."}], [{"content": "a word of five letters"}]],
            *([row[key]] * 2 for key in ("word", "guesses", "hints")),
        )
        assert (
            right == 2.0
            and 0.0 < wrong <= 0.05
            and game.score("1 2", row["word"], row["guesses"], row["hints"]) == 0.0
        )
        # a guess that was made already does not agree with its own hint
        assert game.score(row["guesses"][0], row["word"], row["guesses"], row["hints"]) < 1


def test_the_container_starts_a_server_that_doctor_approves(tmp_path):
    """The start script with the two programs it calls replaced by ones that print their arguments."""
    folder = ROOT / "examples" / "wordle_space"
    for name in ("vllm", "delta-wire"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL": "some/model", "DELTA_SYNC_BUCKET": "s3://bucket/run"}
    start = ["bash", str(folder / "start.sh"), "--max-model-len", "512", "--chat-template", "two words"]
    checked, served = subprocess.run(start, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    before, _, command = checked.partition(" --serve ")
    assert before == "delta-wire doctor s3://bucket/run --read-only"
    assert " ".join(shlex.split(command)) == served and shlex.split(command)[-1] == "two words"
    assert served.startswith("vllm serve some/model --host 0.0.0.0 --port 7860")
    assert "--max-model-len 512" in served and "vllm_delta.DeltaWorkerExtension" in served
    del env["DELTA_SYNC_BUCKET"]
    failed = subprocess.run(start, env=env, capture_output=True, text=True)
    assert failed.returncode != 0 and "DELTA_SYNC_BUCKET" in failed.stderr
    copied = re.findall(r"^COPY (\S+) ", (folder / "Dockerfile").read_text(), re.MULTILINE)
    assert copied and all((ROOT / path).exists() for path in copied)
    extras = set(re.findall(r"\[(.*?)\]'", (folder / "Dockerfile").read_text())[0].split(","))
    assert extras <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
