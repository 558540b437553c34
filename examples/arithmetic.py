# SPDX-License-Identifier: Apache-2.0
"""The demo's task: add two numbers; a reward that can be verified."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset


def make_dataset(num_rows: int = 256, seed: int = 0) -> Dataset:
    """Questions as chat prompts, each with its answer."""
    from datasets import Dataset

    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        a, b = rng.randint(1, 20), rng.randint(1, 20)
        question = f"What is {a} + {b}? Answer with the number only."
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": str(a + b)})
    return Dataset.from_list(rows)


def reward(completions: list[list[dict[str, Any]]], answer: list[str], **kwargs: Any) -> list[float]:
    """1 for the right number and nothing else, 0.5 for the right number among others; a little for digits and brevity.

    The small parts let completions of a group differ, and so give a gradient, long before any of them is right.
    """
    return [
        _score(completion[-1]["content"] or "", right) for completion, right in zip(completions, answer, strict=True)
    ]


def _score(text: str, right: str) -> float:
    text = text.strip()
    exact = text.rstrip(".") == right
    correct = 1.0 if exact else 0.5 * (right in re.findall(r"\d+", text))
    digits_frac = sum(char.isdigit() for char in text) / max(1, len(text))
    return correct + 0.2 * digits_frac - 0.001 * len(text)
