"""Requests that nobody sends by mistake: no text, header or id of a client is a failure of ours."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.openai.errors import ApiError
from gateway.service import ApiLimits
from tests.support.scripted_engine import Gateway, scripted_gateway

HALF = "\\ud83d"
"""Half of a surrogate pair, as it is spelled in JSON."""
NAMES = ("prompt", "model", "stop", "seed", "temperature", "max_tokens", "echo", HALF, "\\u0000")
VALUES = (
    *("1", "-1", "1.5", "1e999", "9" * 50, "null", "true", "{}", "[]", '"a"', '""', '"\\u0000"'),
    *(f'"{HALF}"', f'["{HALF}"]', f'{{"{HALF}": 1}}', f'{{"{HALF}": 1e999}}', "[1e999]", "[[]]"),
    *(f'{{"{HALF}": 1, "{HALF}": 2}}', "[null]", '[["a"]]', '[{"a": []}]', '"\\u202e\\ufffe"'),
)
ODD_HEADS = (
    "Expect: banana",
    "Expect: 100-continue, banana",
    "X-Request-Id: \xe9\xff",
    "Content-Type: application/json; charset=bogus",
    "Upgrade: websocket\r\nConnection: Upgrade",
    *(f"Accept: {value}" for value in ("\xff;q=zz", "*/*;version=;escaping=", ",;=,")),
    *(
        f"Accept: {media}; version={version}; escaping={escaping}"
        for media in ("application/openmetrics-text", "text/plain")
        for version in ("abc", "1", "1.0.0", "999999999999.x", "\xff")
        for escaping in ("bogus", "", "allow-utf-8")
    ),
)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine."""
    async with scripted_gateway() as running:
        yield running


async def _exchange(port: int, request: bytes) -> tuple[int, bytes]:
    """Sends a request on a connection of its own; status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(5):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return int(head.split(b" ", 2)[1]), body


async def _post(port: int, body: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}"
    return await _exchange(port, head.encode() + b"\r\n\r\n" + body)


def _failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.ERROR]


def _odd_body(draw: random.Random) -> bytes:
    """An object of odd keys and values, some of them twice."""
    names = draw.choices(NAMES, k=draw.randrange(1, 5))
    fields = ", ".join(f'"{name}": {draw.choice(VALUES)}' for name in names)
    return f"{{{fields}}}".encode()


async def test_no_body_is_a_failure_of_the_server(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    """Odd keys, values and characters anywhere get 200 or a 400 envelope, and no log of a failure:
    what cannot be encoded in an answer included.
    """
    draw = random.Random(1)
    for body in [_odd_body(draw) for _ in range(400)]:
        status, answer = await _post(gateway.port, body)
        assert status in (200, 400, 404), (body, answer)
        assert status == 200 or sorted(json.loads(answer)) == ["error"], body
    assert _failures(caplog) == []


def test_every_error_text_can_be_sent() -> None:
    """Halves of surrogate pairs in message and parameter are replaced."""
    error = json.loads(ApiError(400, "t", "a\ud800", param="\udfff.b").envelope())["error"]
    assert (error["message"], error["param"]) == ("a?", "?.b")


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/v1/completions"])
async def test_no_header_is_a_failure_of_the_server(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """Expectations, encodings and upgrades that nobody knows are refused or ignored."""
    body = b'{"prompt": "a", "max_tokens": 1}' if path == "/v1/completions" else b""
    method = "POST" if body else "GET"
    for odd in ODD_HEADS:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{odd}\r\n"
        request = head.encode("latin-1") + b"Connection: close\r\n\r\n" + body
        status, _ = await _exchange(gateway.port, request)
        assert status in (200, 400, 417), odd
    assert _failures(caplog) == []


async def test_a_call_that_the_queue_never_takes_is_no_overload() -> None:
    """Too many prompts, or too many tokens in several, are a 400, which clients do not repeat."""
    async with scripted_gateway(limits=ApiLimits(max_prompts=4, max_prompt_tokens=10)) as gateway:
        for prompt in (["a"] * 5, ["a" * 6, "b" * 5], [[1] * 6, [2] * 5]):
            status, body = await _post(gateway.port, json.dumps({"prompt": prompt}).encode())
            assert (status, json.loads(body)["error"]["param"]) == (400, "prompt"), prompt
        assert gateway.engine.requests == []
        for prompt in (["a" * 11], ["a" * 5, "b" * 5]):
            status, _ = await _post(gateway.port, json.dumps({"prompt": prompt}).encode())
            assert status == 200, prompt


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a\u0439"}),
        ("/v1/completions", {"prompt": ["b", "a\u0439"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_a_token_that_the_model_lacks_is_refused(
    gateway: Gateway, path: str, fields: dict[str, object]
) -> None:
    """A tokenizer with more tokens than the model has embeddings cannot put one into a step."""
    model = gateway.frontend.model
    gateway.frontend.model = replace(model, config=replace(model.config, vocab_size=100))
    status, body = await _post(gateway.port, json.dumps(fields).encode(), path)
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_token_id"), body
    assert gateway.engine.requests == []
    status, body = await _post(gateway.port, b'{"prompt": "ab"}')
    assert status == 200, body
