"""Speculative decoding through gateway, scheduler and attention worker: faster, and the same.

The reference has no drafts and its experts on two expert workers; the other one has drafts and its
experts inside, and so few KV blocks that requests are preempted. Prompts come again, so the prefix
cache hands out blocks that held rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.api import Api, Generated, Json
from tests.support.mesh import Server, serve
from tests.support.random_requests import random_request

PROMPT = [7, 8, 9, 10, 11] * 9
LENGTH = 48
NUM_RANDOM, NUM_MANY_RANDOM = 24, 250
REQUESTS: dict[str, Json] = {
    "greedy": {"allowed_token_ids": [7, 8, 9]},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 5, "allowed_token_ids": [7, 8, 9, 10]},
    "penalties": {
        "temperature": 0.5,
        "seed": 6,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {"7": 20, "8": 20, "9": 20},
    },
    "grammar": {
        "temperature": 1,
        "seed": 7,
        "structured_outputs": {"regex": "((abc|abd), ){6}end"},
        "ignore_eos": False,
    },
    "more than the grammar": {
        "temperature": 1,
        "seed": 9,
        "structured_outputs": {"regex": "ab"},
        "logit_bias": {"54": 100},
        "ignore_eos": True,
    },
    "min_tokens after a grammar": {
        "temperature": 1,
        "seed": 10,
        "structured_outputs": {"choice": ["ab", "ba"]},
        "min_tokens": LENGTH,
        "ignore_eos": False,
    },
    "stop token": {"allowed_token_ids": [7, 8, 9], "stop_token_ids": [9], "min_tokens": 20},
    "stop string": {"allowed_token_ids": [67, 68, 69], "temperature": 1, "seed": 8, "stop": "cab"},
}


@pytest.fixture(scope="module")
def speculating(text_model: Path) -> Iterator[Server]:
    """The same model with drafts, and so few KV blocks that requests are preempted."""
    with serve(
        text_model,
        "--num-speculative-tokens", "6",
        "--prompt-lookup-min", "1",
        "--kv-cache-tokens", "288",
        "--max-num-batched-tokens", "48",
        "--max-model-len", "192",
        expert_workers=0,
    ) as server:  # fmt: skip
        yield server


def _ask(api: Api, name: str, length: int) -> Generated:
    return api.complete(PROMPT[:length], LENGTH, **REQUESTS[name])


def _all(api: Api) -> dict[tuple[str, int], Generated]:
    """Every request with two prompts, all at once."""
    cases = [(name, length) for length in (45, 38) for name in REQUESTS]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = pool.map(lambda case: _ask(api, *case), cases)
        return dict(zip(cases, answers, strict=True))


def test_answers_are_those_without_drafts(text_server: Server, speculating: Server) -> None:
    """Tokens, log probabilities, text and reason to end; alone, in company, and from the cache."""
    expected = {
        (name, length): _ask(text_server.api, name, length)
        for length in (45, 38)
        for name in REQUESTS
    }
    for case, answer in expected.items():
        assert _ask(speculating.api, *case) == answer, case
    assert _all(speculating.api) == expected
    assert _all(speculating.api) == expected
    ends = {name: answer.finish_reason for (name, _), answer in expected.items()}
    assert ends["greedy"] == "length"
    assert {ends[name] for name in ("grammar", "stop token", "stop string")} == {"stop"}


def test_the_work_is_counted(speculating: Server) -> None:
    """Drafts that were verified and accepted, prompt tokens found in the cache, preemptions."""
    _all(speculating.api)
    _all(speculating.api)
    metrics = speculating.api.metrics()
    verified = metrics["moe_spec_decode_num_draft_tokens_total"]
    accepted = metrics["moe_spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted < verified
    assert metrics["moe_prefix_cache_hits_total"] > 0
    assert metrics["moe_num_preemptions_total"] > 0


@pytest.mark.parametrize(
    "numbers",
    [
        range(NUM_RANDOM),
        pytest.param(range(1000, 1000 + NUM_MANY_RANDOM), marks=pytest.mark.slow),
    ],
    ids=["some", "many"],
)
def test_a_crowd_changes_no_answer(
    text_server: Server, speculating: Server, numbers: range
) -> None:
    """Any parameters together, many requests at once: each gets what it gets alone, bit by bit;
    nothing is refused, nothing is left behind."""
    expected = {number: _choices(text_server.api, number, f"alone {number}") for number in numbers}
    with ThreadPoolExecutor(24) as pool:
        answers = pool.map(lambda number: _choices(speculating.api, number, "shared"), numbers)
        found = dict(zip(numbers, answers, strict=True))
    for number in numbers:
        assert found[number] == expected[number], random_request(number)
    metrics = speculating.api.metrics()
    assert metrics["moe_num_requests_running"] == metrics["moe_num_requests_waiting"] == 0
    assert metrics["moe_kv_cache_usage_perc"] == 0
    assert metrics["moe_spec_decode_num_accepted_tokens_total"] > 0


def _choices(api: Api, number: int, cache_salt: str) -> Json:
    """Of a random request: texts, tokens, log probabilities and experts."""
    answer = api.post("/v1/completions", {**random_request(number), "cache_salt": cache_salt})
    assert answer.status == 200, (number, answer.body[:500])
    return answer.json["choices"]
