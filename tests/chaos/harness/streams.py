"""The requests of a load, and what a client reads of one stream.

Request number `i` is the same in every run, so that what came while something failed can be
compared, bit by bit, with what comes when nothing does. Half of the requests are greedy, the others
draw with their own seed.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

Json = Any


@dataclass
class Streamed:
    """What a client read of one stream. Times are on the monotonic clock of the machine."""

    number: int
    """Of the request."""
    started_s: float
    times_s: list[float] = field(default_factory=list)
    """When each token arrived."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    keep_alives_s: list[float] = field(default_factory=list)
    """When comments came, while there was nothing to tell."""
    status: int = 0
    error: str = ""
    """Why it failed; empty if it did not."""
    ended_s: float = 0.0

    @property
    def answer(self) -> tuple[list[int], list[float], str | None]:
        """What must be the same whatever fails: tokens, log probabilities, finish reason."""
        return self.tokens, self.logprobs, self.finish_reason


@dataclass(frozen=True)
class Workload:
    """Requests, and their sizes in tokens."""

    vocab_size: int
    num_requests: int = 24
    """Different ones; a load goes through them again and again."""
    max_prompt: int = 40
    min_tokens: int = 60
    max_tokens: int = 160
    first_token: int = 0
    """Answers have no token below; prompts have none below 3."""

    def body(self, number: int) -> Json:
        """The request with this number, to /v1/completions."""
        chance = random.Random(number)
        num_prompt = chance.randint(1, self.max_prompt)
        allowed = list(range(self.first_token, self.vocab_size))
        way = {"temperature": 0} if number % 2 else {"temperature": 0.8, "top_p": 0.95}
        return {
            "prompt": [chance.randrange(3, self.vocab_size) for _ in range(num_prompt)],
            "max_tokens": chance.randint(self.min_tokens, self.max_tokens),
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 0,
            "stream": True,
            **way,
            **({"allowed_token_ids": allowed} if self.first_token else {}),
        }


async def read_stream(
    session: aiohttp.ClientSession, port: int, body: Json, stream: Streamed
) -> None:
    """Sends a request and reads its stream to the end; what goes wrong is in `stream.error`."""
    try:
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
            stream.status = response.status
            if response.status != 200:
                stream.error = f"{response.status}: {(await response.text())[:300]}"
            elif not await _read_events(response, stream):
                stream.error = stream.error or "the stream ended without [DONE]"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    stream.ended_s = time.monotonic()


async def _read_events(response: aiohttp.ClientResponse, stream: Streamed) -> bool:
    """True once all has come."""
    async for line in response.content:
        now_s = time.monotonic()
        if line.startswith(b":"):
            stream.keep_alives_s.append(now_s)
        elif line.startswith(b"data: [DONE]"):
            return True
        elif line.startswith(b"data: "):
            event = orjson.loads(line.removeprefix(b"data: "))
            if "error" in event:
                stream.error = orjson.dumps(event["error"]).decode()
                return False
            _take(stream, event, now_s)
    return False


def _take(stream: Streamed, event: Json, now_s: float) -> None:
    for choice in event["choices"]:
        tokens = choice.get("token_ids") or []
        stream.tokens += tokens
        stream.times_s += [now_s] * len(tokens)
        stream.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        stream.finish_reason = choice["finish_reason"] or stream.finish_reason


def answers_alone(port: int, workload: Workload) -> dict[int, Streamed]:
    """Every request by itself and with keys and values of its own: what all others must equal."""
    return asyncio.run(_answers_alone(port, workload))


async def _answers_alone(port: int, workload: Workload) -> dict[int, Streamed]:
    answers = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as session:
        for number in range(workload.num_requests):
            stream = answers[number] = Streamed(number, time.monotonic())
            body = {**workload.body(number), "cache_salt": f"alone {number}"}
            await read_stream(session, port, body, stream)
            assert not stream.error, stream.error
    return answers
