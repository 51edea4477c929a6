"""Any parameters together, many requests at once: each gets what it gets alone.

The server that is asked in a crowd has drafts, a prefix cache, and so few KV blocks that requests
are preempted; the one that is asked one by one has none of that, and its experts elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.api import Api, Json
from tests.support.mesh import Server, serve
from tests.support.random_requests import random_request

NUM_DEFAULT = 24
NUM_MANY = 250


@pytest.fixture(scope="module")
def crowded(text_model: Path) -> Iterator[Server]:
    """Short of everything, and guessing."""
    with serve(
        text_model,
        "--num-speculative-tokens", "5",
        "--prompt-lookup-min", "1",
        "--kv-cache-tokens", "288",
        "--max-num-batched-tokens", "48",
        "--max-model-len", "192",
        expert_workers=0,
    ) as server:  # fmt: skip
        yield server


def _answer(api: Api, number: int, cache_salt: str) -> Json:
    """Choices with texts, tokens, log probabilities and experts; or the error."""
    answer = api.post("/v1/completions", {**random_request(number), "cache_salt": cache_salt})
    assert answer.status == 200, (number, answer.body[:500])
    return answer.json["choices"]


@pytest.mark.parametrize(
    "numbers",
    [range(NUM_DEFAULT), pytest.param(range(1000, 1000 + NUM_MANY), marks=pytest.mark.slow)],
    ids=["some", "many"],
)
def test_a_crowd_changes_no_answer(text_server: Server, crowded: Server, numbers: range) -> None:
    """Bit by bit, whatever is combined; nothing is refused, nothing is left behind."""
    expected = {number: _answer(text_server.api, number, f"alone {number}") for number in numbers}
    with ThreadPoolExecutor(24) as pool:
        found = dict(
            zip(
                numbers,
                pool.map(lambda number: _answer(crowded.api, number, "shared"), numbers),
                strict=True,
            )
        )
    for number in numbers:
        assert found[number] == expected[number], random_request(number)
    metrics = crowded.api.metrics()
    assert metrics["moe_num_requests_running"] == metrics["moe_num_requests_waiting"] == 0
    assert metrics["moe_kv_cache_usage_perc"] == 0
    assert metrics["moe_spec_decode_num_accepted_tokens_total"] > 0
