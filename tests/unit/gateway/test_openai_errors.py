"""Limits, errors and clients that leave or stall, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from expertmesh.errors import (
    DeadlineError,
    EngineError,
    ExpertUnavailableError,
    OverloadedError,
    QuarantineError,
    StoppingError,
)
from gateway.sequence import FinishReason, RequestOutput
from gateway.service import ApiLimits
from tests.support.openai_calls import CHAT, HELLO, TEXT, events, post
from tests.support.scripted_engine import CONTEXT, Gateway, scripted_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine that answers "Hi there"."""
    async with scripted_gateway() as running:
        yield running


async def test_the_context_may_be_filled_exactly(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """prompt + max_tokens equal to the context works; the default is cut to what is left."""
    exact = {"prompt": [1] * (CONTEXT - 3), "max_tokens": 3}
    assert (await post(session, gateway, TEXT, exact))[0] == 200
    assert (await post(session, gateway, TEXT, {"prompt": [1] * (CONTEXT - 3)}))[0] == 200
    assert [request.params.max_tokens for request in gateway.engine.requests] == [3, 3]
    status, answer = await post(session, gateway, TEXT, {**exact, "max_tokens": 4})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    for number in (CONTEXT, CONTEXT - 3, 4):
        assert str(number) in answer["error"]["message"]


async def test_one_bad_prompt_stops_the_call(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """If one prompt of several cannot be served, none is computed."""
    body = {"prompt": [[1, 2], [1] * (CONTEXT + 1)]}
    status, _ = await post(session, gateway, TEXT, body)
    assert (status, gateway.engine.requests) == (400, [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (StoppingError(), 503, "overloaded_error", "engine_overloaded"),
        (OverloadedError("full", retry_after_s=2.5), 503, "overloaded_error", "engine_overloaded"),
        (
            ExpertUnavailableError([(3, 1)], detail="secret address"),
            503,
            "service_unavailable",
            "expert_unavailable",
        ),
        (DeadlineError("not done within 3 s"), 504, "timeout_error", "deadline_exceeded"),
        (EngineError("secret path"), 500, "server_error", "engine_error"),
        (QuarantineError(3), 500, "server_error", "request_quarantined"),
        (RuntimeError("secret path"), 500, "server_error", "internal_error"),
    ],
)
async def test_errors_before_the_first_token_are_http_errors(
    gateway: Gateway,
    session: aiohttp.ClientSession,
    error: Exception,
    status: int,
    type_: str,
    code: str,
    stream: bool,
) -> None:
    """Refused by the queue or failed early: a status that clients retry, and no details."""
    engine = gateway.engine
    engine.manual = True
    waiting = asyncio.create_task(
        post(session, gateway, CHAT, {**HELLO, "stream": stream, "max_tokens": 5})
    )
    await engine.wait_for(lambda: len(engine.requests) == 1)
    engine.emit(finish_reason=FinishReason.ERROR, error=error)
    found, answer = await waiting
    assert (found, answer["error"]["type"], answer["error"]["code"]) == (status, type_, code)
    assert "secret" not in json.dumps(answer)
    engine.refuse = error
    async with session.post(gateway.url + CHAT, json={**HELLO, "stream": stream}) as response:
        assert response.status == status
        assert ("Retry-After" in response.headers) == (status == 503)
        retry = response.headers.get("x-should-retry")
        again = code in ("deadline_exceeded", "request_quarantined")
        assert retry == ("false" if again else None), "the same work would fail again"


async def test_a_full_queue_cancels_the_other_prompts(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """If the queue takes only some prompts of a call, those are cancelled again."""
    engine = gateway.engine
    engine.manual, engine.refuse, engine.refuse_from = True, OverloadedError("full"), 2
    status, _ = await post(session, gateway, TEXT, {"prompt": ["a", "b", "c"]})
    assert status == 503
    assert sorted(engine.cancelled) == sorted(request.request_id for request in engine.requests)
    assert len(engine.cancelled) == 2


async def test_an_error_in_a_stream_is_an_event(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """After the first token an error is an event, and [DONE] follows."""
    engine = gateway.engine
    engine.manual = True
    waiting = asyncio.create_task(events(session, gateway, CHAT, HELLO))
    await engine.wait_for(lambda: len(engine.requests) == 1)
    engine.emit("Hi")
    engine.emit(
        finish_reason=FinishReason.ERROR, error=ExpertUnavailableError([(3, 1)], detail="w1 died")
    )
    found = await waiting
    assert found[1]["choices"][0]["delta"] == {"content": "Hi"}
    assert found[-1]["error"]["code"] == "expert_unavailable"
    assert "layer 3 expert 1" in found[-1]["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_does_not_pass_for_a_whole_one(
    gateway: Gateway, session: aiohttp.ClientSession, stream: bool
) -> None:
    """A request that an operator aborts ends with an error."""
    engine = gateway.engine
    engine.manual = True
    waiting = asyncio.create_task(post(session, gateway, TEXT, {"prompt": "a", "stream": stream}))
    await engine.wait_for(lambda: len(engine.requests) == 1)
    assert gateway.frontend.abort(engine.requests[0].request_id)
    status, answer = await waiting
    assert (status, answer["error"]["code"]) == (503, "request_aborted")
    assert engine.cancelled == [engine.requests[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_leaves_cancels_its_request(
    gateway: Gateway, stream: bool, started: bool
) -> None:
    """A closed connection cancels the request in the engine, before and after the first token."""
    engine = gateway.engine
    engine.manual = True
    body = json.dumps({"prompt": "a", "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    await engine.wait_for(lambda: len(engine.requests) == 1)
    if started:
        engine.emit("Hi")
        if stream:
            await reader.readuntil(b"Hi")
    writer.close()
    await engine.wait_for(lambda: engine.cancelled == [engine.requests[0].request_id])


async def test_a_waiting_stream_is_kept_alive(session: aiohttp.ClientSession) -> None:
    """While nothing comes, comments are sent; a later error goes into the stream."""
    async with scripted_gateway(limits=ApiLimits(keep_alive_s=0.05)) as gateway:
        engine = gateway.engine
        engine.manual = True
        body = {**HELLO, "stream": True}
        async with session.post(gateway.url + CHAT, json=body) as response:
            assert response.status == 200
            assert await response.content.readline() == b": keep-alive\n"
            engine.emit(finish_reason=FinishReason.ERROR, error=OverloadedError("late"))
            rest = (await response.content.read()).decode()
        frames = [line for line in rest.split("\n\n") if line.strip().startswith("data:")]
        assert json.loads(frames[0].strip()[6:])["error"]["code"] == "engine_overloaded"
        assert frames[1] == "data: [DONE]"


async def test_a_reader_that_takes_nothing_is_cut() -> None:
    """A stream whose client never reads is ended after the write timeout, its request cancelled."""
    async with scripted_gateway(limits=ApiLimits(write_timeout_s=0.2)) as gateway:
        engine = gateway.engine
        engine.manual = True
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        await engine.wait_for(lambda: len(engine.requests) == 1)
        request = engine.requests[0]
        request.sink(RequestOutput(request.request_id, token_ids=(1,), text="x" * 20_000_000))
        await engine.wait_for(lambda: bool(engine.cancelled))
        writer.close()


async def test_the_openai_package_understands_the_answers(gateway: Gateway) -> None:
    """Whole and streamed chats and completions, models, and typed errors."""
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as api:
        assert [model.id async for model in api.models.list()] == ["tiny"]
        assert (await api.models.retrieve("tiny")).owned_by == "expertmesh"
        messages: Any = HELLO["messages"]
        whole = await api.chat.completions.create(model="tiny", messages=messages, logprobs=True)
        assert whole.choices[0].message.content == "Hi there"
        stream = await api.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hi there"
        assert chunks[-1].usage is not None
        text = await api.completions.create(model="tiny", prompt=["a", "b"])
        assert [choice.text for choice in text.choices] == ["Hi there"] * 2
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="other", messages=messages)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(model="tiny", messages=messages, temperature=9)
        assert bad.value.param == "temperature"
        gateway.engine.refuse = OverloadedError("full")
        with pytest.raises(openai.InternalServerError):
            await api.completions.create(model="tiny", prompt="a")
