# SPDX-License-Identifier: Apache-2.0
"""The reward of grpo.yaml and async_grpo.yaml: the share of digits, which a tiny model learns at once."""


def digits(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in texts]
