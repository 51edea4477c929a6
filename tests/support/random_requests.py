"""Requests to /v1/completions with parameters at random: each number is the same request always."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Json = Any

VOCAB_SIZE = 320
"""Of the tiny model with text."""
_STEMS = ("ab of the", "The quick brown fox jumps over the lazy dog", "日本語 🙂 Größe")
_FORMATS: tuple[Json, ...] = (
    {"regex": "((abc|abd), ){2,6}end"},
    {"regex": "[a-c]{5,30}"},
    {"regex": ".*"},
    {"choice": ["wheel", "door", "日本"]},
    {"grammar": 'start: "a" start | "b"'},
    {"json_object": True},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    },
)
_SOMETIMES: dict[str, tuple[float, Callable[[random.Random], Json]]] = {
    "temperature": (0.8, lambda r: r.choice([0, 0, 1e-6, 0.3, 1, 1.7, 2])),
    "top_p": (0.2, lambda r: r.choice([1e-9, 0.1, 0.9, 1])),
    "top_k": (0.2, lambda r: r.choice([-1, 0, 1, 5, VOCAB_SIZE])),
    "min_p": (0.2, lambda r: r.choice([0, 0.05, 0.5, 1])),
    "repetition_penalty": (0.2, lambda r: r.choice([0.01, 0.5, 1.2, 100])),
    "presence_penalty": (0.2, lambda r: r.choice([-2, -0.1, 2])),
    "frequency_penalty": (0.2, lambda r: r.choice([-2, 0.1, 2])),
    "logit_bias": (
        0.25,
        lambda r: {str(r.randrange(VOCAB_SIZE)): r.choice([-100, -1, 5, 100]) for _ in range(6)},
    ),
    "bad_words": (0.15, lambda r: r.sample(["a", "e", " the", "ab", "日"], 2)),
    "stop": (0.3, lambda r: r.sample(["a", "ab", "cab", "7", " t", "語", "x"], 3)),
    "stop_token_ids": (0.25, lambda r: r.sample(range(VOCAB_SIZE), 4)),
    "include_stop_str_in_output": (0.3, lambda r: True),
    "ignore_eos": (0.5, lambda r: True),
    "skip_special_tokens": (0.3, lambda r: False),
    "logprobs": (0.4, lambda r: r.choice([0, 1, 5, 20])),
    "prompt_logprobs": (0.25, lambda r: r.choice([0, 1, 5])),
    "n": (0.2, lambda r: r.randint(1, 3)),
    "echo": (0.2, lambda r: True),
    "return_routed_experts": (0.25, lambda r: True),
    "return_tokens_as_token_ids": (0.2, lambda r: True),
    "priority": (0.1, lambda r: r.choice([-1_000_000, -1, 1, 1_000_000])),
    "truncate_prompt_tokens": (0.1, lambda r: r.randint(1, 40)),
    "structured_outputs": (0.35, lambda r: r.choice(_FORMATS)),
}


def random_request(number: int) -> Json:
    """Body of the request with this number; its prompt may begin as that of others does."""
    chance = random.Random(number)
    max_tokens = chance.randint(1, 40)
    body: dict[str, Json] = {
        "prompt": _prompt(chance),
        "max_tokens": max_tokens,
        "seed": chance.randint(-(2**63), 2**63 - 1),
        "return_token_ids": True,
    }
    for name, (share, value) in _SOMETIMES.items():
        if chance.random() < share:
            body[name] = value(chance)
    if chance.random() < 0.3:
        body["min_tokens"] = chance.randint(0, max_tokens)
    if "structured_outputs" not in body and chance.random() < 0.2:
        body["allowed_token_ids"] = chance.sample([7, 8, 9, 10, 67, 68, 69, 2], 3)
    return body


def _prompt(chance: random.Random) -> Json:
    """A text or token ids, often with repetitions."""
    if chance.random() < 0.5:
        return f"{chance.choice(_STEMS)} " * chance.randint(1, 3) + str(chance.randrange(99))
    if chance.random() < 0.4:
        return ([7, 8, 9, 10, 11] * 12)[: chance.randint(1, 60)]
    return [chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 60))]
