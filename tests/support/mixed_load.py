"""Requests of every kind, many at once, some of which the client abandons.

Request number `i` is the same in every run, so what was answered under load can be compared with
what is answered to one at a time.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Json = Any

SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["wheel", "door"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "big": {"type": "boolean"},
    },
    "required": ["kind", "count", "big"],
    "additionalProperties": False,
}
_WAYS: tuple[dict[str, Json], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 12},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.7, "stop": ["e", "th"]},
    {"temperature": 0.7, "logit_bias": {"40": 3.0, "41": -100}},
    {"temperature": 0.9, "n": 2},
    {"temperature": 0.6, "structured_outputs": {"json": SCHEMA}},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "min_tokens": 5, "bad_words": ["a"]},
)
_STEMS = tuple(" ".join(f"{word}{number}" for number in range(12)) for word in ("ab", "of", "the"))


@dataclass(frozen=True)
class MixedRequest:
    """A request to /v1/completions and what its client does."""

    body: dict[str, Json]
    stream: bool = False
    leaves_after: int | None = None
    """Events of the stream after which the client goes away."""


@dataclass
class Outcome:
    """What came back."""

    status: int = 0
    choices: dict[int, tuple[tuple[int, ...], str, str | None]] = field(default_factory=dict)
    """Index to token ids, text and finish reason."""
    cached_tokens: int = 0
    error: str = ""
    """Of an answer that is not 200, or of the stream."""


def mixed_request(number: int, *, max_prompt: int = 60, max_tokens: int = 40) -> MixedRequest:
    """The request with this number.

    Args:
        number: Which one.
        max_prompt: Longest prompt, in random words beyond what it may share with others.
        max_tokens: Most tokens to generate.
    """
    chance = random.Random(number)
    words = [str(chance.randrange(1000)) for _ in range(chance.randint(1, max_prompt // 3))]
    stem = chance.choice((*_STEMS, ""))
    body = {
        "prompt": f"{stem} {' '.join(words)}",
        "max_tokens": chance.randint(5, max_tokens),
        "seed": number,
        "return_token_ids": True,
        **_WAYS[number % len(_WAYS)],
    }
    stream = chance.random() < 0.6
    leaves = stream and chance.random() < 0.25
    return MixedRequest(body, stream, chance.randint(0, 12) if leaves else None)


@asynccontextmanager
async def client(port: int, *, timeout_s: float = 300.0) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without a bound on connections."""
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}",
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    ) as session:
        yield session


async def ask(session: aiohttp.ClientSession, request: MixedRequest) -> Outcome:
    """Sends a request and reads what its client wants to read."""
    body = {**request.body, "stream": request.stream}
    async with session.post("/v1/completions", json=body) as response:
        outcome = Outcome(response.status)
        if response.status != 200:
            outcome.error = (await response.read()).decode(errors="replace")
        elif request.stream:
            await _read_stream(response, request, outcome)
        else:
            _take(outcome, await response.json())
        return outcome


async def ask_all(
    session: aiohttp.ClientSession, requests: Iterable[MixedRequest]
) -> list[Outcome]:
    """Sends all at once."""
    return list(await asyncio.gather(*(ask(session, request) for request in requests)))


async def ask_one_by_one(
    session: aiohttp.ClientSession, requests: Sequence[MixedRequest]
) -> list[Outcome]:
    """Each alone, to its end, and with keys and values of its own: what the others must equal."""
    outcomes = []
    for number, request in enumerate(requests):
        alone = MixedRequest({**request.body, "cache_salt": f"alone {number}"})
        outcomes.append(await ask(session, alone))
    return outcomes


def check_equal(outcome: Outcome, alone: Outcome, request: MixedRequest) -> None:
    """Fails unless both have the same tokens, text and finish reasons, as far as they were read."""
    assert (outcome.status, outcome.error) == (200, ""), f"{request}: {outcome}"
    assert (alone.status, alone.error) == (200, ""), f"{request}: {alone}"
    if request.leaves_after is None:
        assert outcome.choices == alone.choices, request
    for index, (token_ids, text, _) in outcome.choices.items():
        whole_ids, whole_text, _ = alone.choices[index]
        assert token_ids == whole_ids[: len(token_ids)], request
        assert whole_text.startswith(text), request


async def _read_stream(
    response: aiohttp.ClientResponse, request: MixedRequest, outcome: Outcome
) -> None:
    num_events = 0
    async for line in response.content:
        if request.leaves_after is not None and num_events >= request.leaves_after:
            response.close()
            return
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        num_events += 1
        if "error" in event:
            outcome.error = json.dumps(event["error"])
            return
        _take(outcome, event)


def _take(outcome: Outcome, answer: Json) -> None:
    for choice in answer["choices"]:
        token_ids, text, reason = outcome.choices.get(choice["index"], ((), "", None))
        outcome.choices[choice["index"]] = (
            (*token_ids, *(choice.get("token_ids") or ())),
            text + choice["text"],
            choice["finish_reason"] or reason,
        )
    if details := (answer.get("usage") or {}).get("prompt_tokens_details"):
        outcome.cached_tokens = details["cached_tokens"]
