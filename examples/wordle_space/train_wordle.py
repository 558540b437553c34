# SPDX-License-Identifier: Apache-2.0
"""Teach a model Wordle on this machine while a container somewhere else generates the guesses.

    python examples/wordle_space/train_wordle.py --bucket hf://buckets/me/wordle/run-1 --server https://SPACE
    python examples/wordle_space/train_wordle.py --show 3

Shows: a trainer and a server that share nothing but a bucket and an HTTP address: the server runs in the container of
`Dockerfile` beside this file. The task is one guess of a game under way; the reward asks for a word of five letters
that agrees with the hints, and for the right one.
Needs: a GPU here, a GPU and Docker there, an account where the bucket is. `--show` needs nothing: it prints some games
with the reward of a good and of a bad guess.
Takes: hours; `--show` no time.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_form

WORDS = (Path(__file__).parent / "words.txt").read_text().split()
LETTERS = 5


def hint(guess: str, word: str) -> str:
    """`G` for a letter in its place, `Y` for one that is elsewhere, `-` for one that is not there (any more)."""
    marks = ["G" if a == b else "-" for a, b in zip(guess, word, strict=True)]
    left = [b for a, b in zip(guess, word, strict=True) if a != b]
    for i, letter in enumerate(guess):
        if marks[i] == "-" and letter in left:
            marks[i] = "Y"
            left.remove(letter)
    return "".join(marks)


def make_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Games with one to three guesses made, each with the word that is looked for."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        word, *guesses = rng.sample(WORDS, 1 + rng.randint(1, 3))
        hints = [hint(guess, word) for guess in guesses]
        played = "\n".join(f"{guess} {marks}" for guess, marks in zip(guesses, hints, strict=True))
        text = (
            "We play Wordle. G: right letter, right place. Y: right letter, wrong place. -: not in the word.\n"
            f"{played}\nAnswer with your next guess, one word of five letters, and nothing else."
        )
        rows.append({"prompt": [{"role": "user", "content": text}], "word": word, "guesses": guesses, "hints": hints})
    return rows


def score(text: str, word: str, guesses: list[str], hints: list[str]) -> float:
    """0 to 2: 0.1 for five letters, up to 0.9 for agreeing with the hints, 1 for the word itself.

    Anything else gets up to 0.05 for its letters, so that the guesses of a group differ before any has the form.
    """
    guess = text.strip().lower().rstrip(".")
    if not re.fullmatch(r"[a-z]{5}", guess):
        return 0.05 * len(re.findall(r"[a-z]", guess)) / max(1, len(guess))
    agreeing = sum(hint(before, guess) == marks for before, marks in zip(guesses, hints, strict=True))
    return 0.1 + 0.9 * agreeing / len(hints) + (guess == word)


def reward(
    completions: list[list[dict[str, Any]]],
    word: list[str],
    guesses: list[list[str]],
    hints: list[list[str]],
    **kwargs: Any,
) -> list[float]:
    """The reward function of TRL's trainers."""
    games = zip(completions, word, guesses, hints, strict=True)
    return [score(completion[-1]["content"] or "", *game) for completion, *game in games]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket", help="the address that the container was given, too")
    parser.add_argument("--server", help="of the container, http://host:7860")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="default: Qwen/Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps; default: 300")
    parser.add_argument("--show", type=int, metavar="N", help="only print so many games and their rewards")
    tiny_form.add_option(parser)
    arguments = parser.parse_args()
    if arguments.show:
        for row in make_rows(arguments.show):
            game = row["word"], row["guesses"], row["hints"]
            print(row["prompt"][0]["content"])
            print(f"  {row['word']!r}: {score(row['word'], *game):.2f}, {WORDS[0]!r}: {score(WORDS[0], *game):.2f}\n")
        return
    if not arguments.bucket or not arguments.server:
        parser.error("--bucket and --server are needed for training")

    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from trl_delta import attach
    from trl_delta.cpu import cpu_training

    settings: dict[str, Any] = {
        "output_dir": "runs/wordle",
        "max_steps": arguments.steps,
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_completion_length": 512,
        "vllm_server_base_url": arguments.server,
        "logging_steps": 1,
    }
    with cpu_training() if arguments.tiny else nullcontext():
        trainer = AsyncGRPOTrainer(
            model=arguments.model,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(make_rows(4096)),
            args=AsyncGRPOConfig(**settings | (tiny_form.SETTINGS if arguments.tiny else {})),
        )
    attach(trainer, bucket=arguments.bucket)
    trainer.train()


if __name__ == "__main__":
    main()
