"""Clients for benchmarks: a closed loop of streamed completions, and what they saw.

Prompts are random token ids that depend on the seed alone, so two servers are asked the same.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Workload:
    """A closed loop: so many requests at a time until all are answered."""

    concurrency: int
    num_requests: int
    prompt_len: int
    num_tokens: int
    vocab_size: int
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """One for each request; no two begin alike."""
        chance = random.Random(f"{self.seed}/{self.concurrency}/{self.prompt_len}")
        return [
            [chance.randrange(self.vocab_size) for _ in range(self.prompt_len)]
            for _ in range(self.num_requests)
        ]


@dataclass
class Seen:
    """What the clients saw."""

    wall_s: float = 0.0
    num_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    """From sending a request to its first token."""
    next_s: list[float] = field(default_factory=list)
    """Between events of a stream."""

    def summary(self) -> dict[str, float]:
        """Tokens per second; medians and 99th percentiles in ms."""
        return {
            "tok_s": self.num_tokens / self.wall_s,
            "ttft_ms": statistics.median(self.first_s) * 1e3,
            "itl_ms": statistics.median(self.next_s) * 1e3,
            "itl_p99_ms": percentile(self.next_s, 0.99) * 1e3,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run_load(port: int, workload: Workload) -> Seen:
    """Asks all requests and waits for all answers.

    Raises:
        RuntimeError: A request was not answered in full.
    """
    return asyncio.run(_run_load(port, workload))


async def _run_load(port: int, workload: Workload) -> Seen:
    seen, waiting = Seen(), iter(workload.prompts())
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def client() -> None:
            for prompt in waiting:
                await _one_stream(session, prompt, workload.num_tokens, seen)

        started_s = time.monotonic()
        await asyncio.gather(*(client() for _ in range(workload.concurrency)))
        seen.wall_s = time.monotonic() - started_s
    return seen


async def _one_stream(
    session: aiohttp.ClientSession, prompt: list[int], num_tokens: int, seen: Seen
) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    moments, usage = [time.monotonic()], 0
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if event.get("usage"):
                usage = event["usage"]["completion_tokens"]
            elif event["choices"][0]["finish_reason"] is None:
                moments.append(time.monotonic())
    if usage != num_tokens or len(moments) < 2:
        raise RuntimeError(f"{usage} tokens in {len(moments) - 1} events, expected {num_tokens}")
    seen.num_tokens += usage
    seen.first_s.append(moments[1] - moments[0])
    seen.next_s += [later - sooner for sooner, later in itertools.pairwise(moments[1:])]


Samples = dict[tuple[str, str], float]
"""Of /metrics: (name, value of a label), summed over all other labels."""


def read_metrics(text: str, label: str) -> Samples:
    """Samples by name and the value of one label; empty text for samples without it."""
    totals: Samples = {}
    for line in text.splitlines():
        if found := _SAMPLE.fullmatch(line):
            labels = dict(_LABEL.findall(found["labels"] or ""))
            key = (found["name"], labels.get(label, ""))
            totals[key] = totals.get(key, 0.0) + float(found["value"])
    return totals
