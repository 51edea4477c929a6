"""Reuse of prefixes as clients see it: in the usage, and not at all in what is answered."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.api import Answer, completion_body
from tests.support.mesh import Server
from tests.support.oracle import prompts

BLOCK = 16
_seeds = itertools.count(900)


@pytest.fixture
def prompt() -> list[int]:
    """70 tokens that nobody has sent before: four full blocks, and some tokens."""
    return prompts(300, [70], seed=next(_seeds))[0]


def ask(server: Server, prompt: list[int], **extra: Any) -> Answer:
    """A greedy completion with log probabilities."""
    answer = server.api.post("/v1/completions", completion_body(prompt, 12, **extra))
    assert answer.status == 200, answer.body
    return answer


def cached(answer: Answer) -> int:
    """Tokens of the prompt that were found."""
    found: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def choice(answer: Answer) -> Any:
    """Tokens, text, log probabilities and reason."""
    return answer.json["choices"][0]


def test_usage_counts_what_was_found(text_server: Server, prompt: list[int]) -> None:
    """Nothing the first time, all full blocks the second time; with a longer prompt too. Text and
    log probabilities are the same to the last bit."""
    before = text_server.api.metrics()
    first, again = ask(text_server, prompt), ask(text_server, prompt)
    assert [cached(first), cached(again)] == [0, 4 * BLOCK]
    assert choice(first) == choice(again)
    assert cached(ask(text_server, [*prompt[:-1], 9])) == 4 * BLOCK
    assert cached(ask(text_server, [*prompt[: 2 * BLOCK], 9, 9])) == 2 * BLOCK
    after = text_server.api.metrics()
    hits = after["moe_prefix_cache_hits_total"] - before["moe_prefix_cache_hits_total"]
    queries = after["moe_prefix_cache_queries_total"] - before["moe_prefix_cache_queries_total"]
    assert (hits, queries) == (10 * BLOCK, 3 * 70 + 2 * BLOCK + 2)


def test_a_prompt_is_never_found_whole(text_server: Server, prompt: list[int]) -> None:
    """At least its last token is computed: of four full blocks three are used."""
    whole = prompt[: 4 * BLOCK]
    first, again = ask(text_server, whole), ask(text_server, whole)
    assert cached(again) == 3 * BLOCK
    assert choice(first) == choice(again)


def test_what_was_generated_is_found_too(text_server: Server, prompt: list[int]) -> None:
    """The next turn of a conversation begins with the answer: 70 + 12 tokens are five blocks."""
    generated = choice(ask(text_server, prompt))["token_ids"]
    assert cached(ask(text_server, [*prompt, *generated, 7, 8])) == 5 * BLOCK


def test_streams_count_too(text_server: Server, prompt: list[int]) -> None:
    """The last event of a stream has the same usage."""
    ask(text_server, prompt)
    body = completion_body(prompt, 3, stream_options={"include_usage": True})
    *_, last = text_server.api.stream("/v1/completions", body)
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK


def test_salts_are_apart(text_server: Server, prompt: list[int]) -> None:
    """What was computed under one salt is found under the same one only."""
    ask(text_server, prompt)
    assert cached(ask(text_server, prompt, cache_salt="a")) == 0
    assert cached(ask(text_server, prompt, cache_salt="b")) == 0
    assert cached(ask(text_server, prompt, cache_salt="a")) == 4 * BLOCK
    assert cached(ask(text_server, prompt)) == 4 * BLOCK


@pytest.mark.parametrize("wish", [{"prompt_logprobs": 1}, {"return_routed_experts": True}])
def test_who_asks_for_each_prompt_token_computes_it(
    text_server: Server, prompt: list[int], wish: dict[str, Any]
) -> None:
    """Nothing is found for such a request, and what it reports is whole; others find what it
    computed."""
    curious = ask(text_server, prompt, **wish)
    assert cached(curious) == 0
    plain = ask(text_server, prompt)
    assert cached(plain) == 4 * BLOCK
    assert choice(plain)["token_ids"] == choice(curious)["token_ids"]
    again = ask(text_server, prompt, **wish)
    assert cached(again) == 0
    assert choice(again) == choice(curious)


def test_a_time_limit_is_kept(text_server: Server, prompt: list[int]) -> None:
    """A request that is not done in time is answered 504, and frees what it held."""
    body = completion_body(prompt, 400, timeout_s=0.05)
    answer = text_server.api.post("/v1/completions", body)
    assert answer.status == 504
    assert answer.error["code"] == "deadline_exceeded"
