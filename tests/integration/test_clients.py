"""Many clients at once, with the real `openai` package, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest
from openai import AsyncOpenAI

from tests.support.api import Api, completion_body
from tests.support.mesh import Server
from tests.support.processes import poll

NUM_CLIENTS = 16
LONG = 400
"""Tokens of an answer that nobody waits for."""

TOPICS = ("fox", "dog", "Paris", "naïve café", "日本語", "🙂 smile", "experts", "0 1 2 3 4 5")
QUESTIONS = [f"{topic}? {'Tell me more. ' * (index % 5)}" for index, topic in enumerate(TOPICS * 2)]


@asynccontextmanager
async def _client(api: Api) -> AsyncIterator[AsyncOpenAI]:
    client = AsyncOpenAI(
        base_url=f"http://127.0.0.1:{api.port}/v1", api_key="none", timeout=60, max_retries=0
    )
    async with client:
        yield client


async def _chat(client: AsyncOpenAI, model: str, index: int, max_tokens: int) -> str:
    """A streamed answer; odd clients sample with a seed, even ones are greedy."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTIONS[index]}],
        temperature=index % 2,
        seed=index,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text = ""
    usage = None
    async with stream:
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens == max_tokens
    return text


async def _leave_early(client: AsyncOpenAI, model: str, index: int) -> None:
    """Closes a streamed answer after its first pieces."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTIONS[index]}],
        temperature=0,
        max_tokens=LONG,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async with stream:
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 3:
                return


def _all_free(api: Api) -> bool:
    metrics = api.metrics()
    names = (
        "moe_kv_blocks_used",
        "moe_request_slots_used",
        "moe_num_requests_running",
        "moe_num_requests_waiting",
    )
    return all(metrics[name] == 0 for name in names)


async def test_sixteen_clients_are_independent(text_server: Server) -> None:
    """16 streaming clients at once each get the answer that they get alone."""
    async with _client(text_server.api) as client:
        model = (await client.models.list()).data[0].id
        alone = [await _chat(client, model, index, 32) for index in range(NUM_CLIENTS)]
        together = await asyncio.gather(
            *(_chat(client, model, index, 32) for index in range(NUM_CLIENTS))
        )
    assert alone == together
    assert len(set(alone)) == NUM_CLIENTS


@pytest.mark.alone
async def test_half_of_the_clients_leave(text_server: Server) -> None:
    """Clients that leave mid-stream free their KV blocks and slots; the others notice nothing."""
    async with _client(text_server.api) as client:
        model = (await client.models.list()).data[0].id
        staying = range(0, NUM_CLIENTS, 2)
        alone = [await _chat(client, model, index, 48) for index in staying]
        before = text_server.api.metrics()["moe_generation_tokens_total"]
        work: list[Awaitable[str | None]] = [
            _chat(client, model, index, 48)
            if index % 2 == 0
            else _leave_early(client, model, index)
            for index in range(NUM_CLIENTS)
        ]
        answers = await asyncio.gather(*work)
    assert alone == [answers[index] for index in staying]
    await asyncio.to_thread(
        poll, lambda: _all_free(text_server.api), timeout_s=15, what="blocks and slots are free"
    )
    metrics = text_server.api.metrics()
    assert metrics["moe_kv_blocks"] > 0
    generated = metrics["moe_generation_tokens_total"] - before
    assert generated < 8 * 48 + 8 * LONG / 2, "the requests of those who left ran on"


@pytest.mark.parametrize("stream", [False, True])
def test_closed_connection_frees_everything(text_server: Server, stream: bool) -> None:
    """A connection closed without a word frees blocks and slots before the answer is complete."""
    api = text_server.api
    body = json.dumps(completion_body("closing soon", LONG, stream=stream)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    before = api.metrics()["moe_generation_tokens_total"]
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        poll(
            lambda: (
                api.metrics()["moe_request_slots_used"] == 1
                and api.metrics()["moe_kv_blocks_used"] > 0
            ),
            timeout_s=15,
            what="the request runs",
        )
    poll(lambda: _all_free(api), timeout_s=15, what="blocks and slots are free")
    assert api.metrics()["moe_generation_tokens_total"] - before < LONG


def test_ended_requests_leave_nothing(text_server: Server) -> None:
    """After requests that ended by themselves, no block, slot or waiting request is left."""
    api = text_server.api
    before = api.metrics()
    api.complete("one two three", 20)
    poll(lambda: _all_free(api), timeout_s=15, what="blocks and slots are free")
    after = api.metrics()
    assert after["moe_generation_tokens_total"] - before["moe_generation_tokens_total"] == 20
    assert after["moe_prompt_tokens_total"] > before["moe_prompt_tokens_total"]
    assert after["moe_request_success_total"] - before["moe_request_success_total"] == 1


def test_streamed_and_whole_answers_are_equal(text_server: Server) -> None:
    """A streamed completion, put together, is the completion that is not streamed."""
    api = text_server.api
    body = completion_body("The quick brown", 40, stream_options={"include_usage": True})
    whole = api.complete("The quick brown", 40)
    events = list(api.stream("/v1/completions", body))
    chunks = [event["choices"][0] for event in events if event["choices"]]
    assert whole.text == "".join(chunk["text"] for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk.get("token_ids") or []]
    assert list(whole.token_ids) == tokens
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]
    assert events[-1]["usage"]["completion_tokens"] == 40


def test_stop_string_ends_the_answer(text_server: Server) -> None:
    """A stop string ends the answer before it, streamed or not, wherever pieces are cut."""
    api = text_server.api
    free = api.complete("Once upon", 60).text
    stop = next(free[i : i + 3] for i in range(10, 40) if "\ufffd" not in free[i : i + 3])
    expected = free[: free.index(stop)]
    stopped = api.complete("Once upon", 60, stop=[stop])
    events = list(api.stream("/v1/completions", completion_body("Once upon", 60, stop=stop)))
    assert (expected, "stop") == (stopped.text, stopped.finish_reason)
    assert expected == "".join(e["choices"][0]["text"] for e in events if e["choices"])


def test_seed_decides_the_answer(text_server: Server) -> None:
    """The same seed gives the same tokens, another seed others."""
    api = text_server.api
    first = [api.complete("seeded", 24, temperature=1, seed=seed).token_ids for seed in (1, 1, 2)]
    assert first[0] == first[1]
    assert first[0] != first[2]


def test_first_token_comes_at_once(text_server: Server) -> None:
    """A stream delivers its first piece long before the last."""
    started = time.monotonic()
    times = [
        time.monotonic() - started
        for _ in text_server.api.stream("/v1/completions", completion_body("go", 200))
    ]
    assert len(times) > 100
    assert times[0] < times[-1] / 4


def test_metric_names(text_server: Server) -> None:
    """The documented metrics are there, with their mirror in the names of vLLM."""
    text_server.api.complete("count me", 3)
    mirrored = {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
    }
    own = {
        "moe_kv_blocks_used",
        "moe_kv_blocks",
        "moe_request_slots_used",
        "moe_dispatch_bytes_total",
        "moe_dispatch_tokens_total",
        "moe_dispatch_duration_seconds_count",
        "moe_workers",
        "moe_uncovered_experts",
        "moe_placement_version",
        "moe_step_part_seconds_total",
    }
    expected = own | {f"{prefix}{name}" for prefix in ("moe_", "vllm:") for name in mirrored}
    poll(  # what expert workers did is reported twice a second
        lambda: expected <= set(text_server.api.metrics()),
        timeout_s=15,
        what="every metric is there",
    )
