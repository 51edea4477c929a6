"""Tiny random Llama and Mixtral through the real mesh give what transformers gives.

Prompts are token ids and go over HTTP; tokens must be equal, log probabilities within 1e-4.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Models
from tests.support.api import Api, Generated
from tests.support.mesh import serve
from tests.support.oracle import MIN_MARGIN, Continuation, prompts
from tests.support.tiny_checkpoints import (
    LLAMA,
    MIXTRAL,
    MIXTRAL_FOUR,
    TinyShape,
)

LENGTHS = (1, 3, 16, 17, 33, 70)
"""Around the KV block of 16 tokens, and up to five prefill chunks of 16."""

NUM_TOKENS = 40
"""Crosses at least two block borders from every start."""

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A model and the mesh that serves it; 0 expert workers is the colocated mode."""

    shape: TinyShape
    expert_workers: int
    chunk: int


CASES = {
    "llama": Case(LLAMA, 0, 16),
    "mixtral-2": Case(MIXTRAL, 2, 16),
}


@dataclass(frozen=True)
class Parity:
    """A served model, prompts, and how transformers continues them."""

    api: Api
    model_dir: Path
    prompts: list[list[int]]
    expected: list[Continuation]


SLOW_CASES = {"mixtral-four-3": Case(MIXTRAL_FOUR, 3, 512)}


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW_CASES.items()),
    ],
)
def parity(request: pytest.FixtureRequest, models: Models) -> Iterator[Parity]:
    """Each case in turn."""
    case: Case = request.param
    model_dir = models.tiny(case.shape)
    oracle = models.oracle(model_dir)
    chosen = prompts(oracle.vocab_size, LENGTHS)
    expected = [oracle.greedy(prompt, NUM_TOKENS) for prompt in chosen]
    assert min(float(one.margins.min()) for one in expected) > MIN_MARGIN, "choose another seed"
    flags = ("--max-num-batched-tokens", str(case.chunk))
    with serve(model_dir, *flags, expert_workers=case.expert_workers) as server:
        yield Parity(server.api, model_dir, chosen, expected)


def _check(expected: Continuation, actual: Generated) -> None:
    assert expected.token_ids == actual.token_ids
    difference = np.abs(expected.logprobs - np.array(actual.logprobs))
    assert difference.max() <= TOLERANCE
    assert actual.finish_reason == "length"


def test_one_at_a_time(parity: Parity) -> None:
    """Each prompt alone gives the reference's tokens and log probabilities."""
    for prompt, expected in zip(parity.prompts, parity.expected, strict=True):
        _check(expected, parity.api.complete(prompt, NUM_TOKENS))


def test_unequal_lengths_at_once(parity: Parity) -> None:
    """Prompts of unequal lengths at the same time give the reference's tokens."""
    twice = [*parity.prompts, *reversed(parity.prompts)]
    with ThreadPoolExecutor(len(twice), thread_name_prefix="client") as pool:
        answers = list(pool.map(lambda prompt: parity.api.complete(prompt, NUM_TOKENS), twice))
    for expected, actual in zip(
        [*parity.expected, *reversed(parity.expected)], answers, strict=True
    ):
        _check(expected, actual)


def test_prompts_of_one_request(parity: Parity) -> None:
    """A list of prompts in one request gives one choice per prompt, in order."""
    body = {
        "prompt": parity.prompts[:3],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = parity.api.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    choices = answer.json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    expected = [list(one.token_ids[:8]) for one in parity.expected[:3]]
    assert expected == [choice["token_ids"] for choice in choices]
    assert answer.json["usage"] == {
        **answer.json["usage"],
        "prompt_tokens": sum(LENGTHS[:3]),
        "completion_tokens": 24,
        "total_tokens": sum(LENGTHS[:3]) + 24,
    }


def test_text_needs_a_tokenizer(parity: Parity) -> None:
    """A checkpoint without a tokenizer serves token ids, and says so when it gets text."""
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    for path, body in (("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", chat)):
        answer = parity.api.post(path, body)
        assert answer.status == 400, answer.body
        assert "token ids" in answer.error["message"]


def test_whole_context(parity: Parity) -> None:
    """A sequence may fill the context to its last token."""
    oracle_prompt = parity.prompts[-1]
    room = 512 - len(oracle_prompt)
    answer = parity.api.complete(oracle_prompt, room)
    assert len(answer.token_ids) == room
    assert parity.expected[-1].token_ids == answer.token_ids[:NUM_TOKENS]


def test_end_token_ends_the_answer(models: Models) -> None:
    """The model's end token ends the answer, unless the request ignores it."""
    oracle = models.oracle(models.tiny(MIXTRAL))
    prompt = prompts(oracle.vocab_size, [12], seed=7)[0]
    free = oracle.greedy(prompt, NUM_TOKENS).token_ids
    end = next(token for token in free[5:] if token not in free[:5])
    until_end = free[: free.index(end)]
    with serve(models.tiny(replace(MIXTRAL, eos_token_id=end)), expert_workers=0) as server:
        ended = server.api.complete(prompt, NUM_TOKENS, ignore_eos=False)
        ignored = server.api.complete(prompt, NUM_TOKENS)
    assert ended.finish_reason == "stop"
    assert until_end == tuple(token for token in ended.token_ids if token != end)
    assert (free, "length") == (ignored.token_ids, ignored.finish_reason)
