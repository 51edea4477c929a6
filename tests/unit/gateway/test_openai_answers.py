"""Whole and streamed answers of the completion endpoints, over a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from gateway.openai.logprobs import Json
from gateway.sequence import FinishReason
from tests.support.openai_calls import CHAT, HELLO, TEXT, events, post
from tests.support.scripted_engine import CONTEXT, Gateway, scripted_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine that answers "Hi there"."""
    async with scripted_gateway() as running:
        yield running


async def test_a_chat_answer_has_every_required_key(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """All keys of the OpenAI specification are there, null where they do not apply."""
    status, answer = await post(session, gateway, CHAT, HELLO)
    (choice,) = answer["choices"]
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    assert answer["system_fingerprint"].startswith("expertmesh-")
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "Hi there",
            "refusal": None,
            "annotations": [],
        },
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    prompt_len = len(gateway.engine.requests[0].prompt_token_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt_len,
        "completion_tokens": 8,
        "total_tokens": prompt_len + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_defaults_of_the_two_endpoints(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """A chat may fill the context, a completion has 16 tokens; both sample at temperature 1."""
    await post(session, gateway, CHAT, HELLO)
    await post(session, gateway, TEXT, {"prompt": "a"})
    chat, text = gateway.engine.requests
    assert chat.params.max_tokens == CONTEXT - len(chat.prompt_token_ids)
    assert (text.params.max_tokens, text.params.temperature, text.params.top_p) == (16, 1.0, 1.0)
    assert (text.params.top_k, text.params.stop, text.params.num_logprobs) == (0, (), None)
    assert chat.params.seed != text.params.seed


async def test_parameters_reach_the_engine(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Every supported parameter is passed on, in the engine's own terms."""
    body = {
        **HELLO,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "seed": -1,
        "stop": ["x", "y", "x"],
        "max_tokens": 9,
        "max_completion_tokens": 5,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 1,
        "tools": None,
        "presence_penalty": 0,
        "response_format": {"type": "text"},
        "user": "someone",
        "unknown": {"a": 1},
    }
    status, answer = await post(session, gateway, CHAT, body)
    params = gateway.engine.requests[0].params
    assert status == 200, answer
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)
    assert (params.seed, params.stop, params.max_tokens) == (2**64 - 1, ("x", "y"), 5)
    assert (params.ignore_eos, params.num_logprobs) == (True, 2)
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_prompt_forms(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """A text, texts, token ids, and lists of token ids; choices come in the order of prompts."""
    for prompt, expected in (
        ("ab", [[64, 65]]),
        (["ab", "c"], [[64, 65], [66]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ):
        gateway.engine.requests.clear()
        status, answer = await post(session, gateway, TEXT, {"prompt": prompt})
        assert status == 200, answer
        found = [list(request.prompt_token_ids) for request in gateway.engine.requests]
        assert found == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert answer["usage"]["completion_tokens"] == 8 * len(expected)


async def test_content_parts_and_roles(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """Text parts are joined by line ends, and "developer" means "system"."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    await post(session, gateway, CHAT, {"messages": messages})
    tokenizer = gateway.frontend.model.tokenizer
    assert tokenizer is not None
    ids = gateway.engine.requests[0].prompt_token_ids
    assert tokenizer.decode(ids) == "system\nbe kind\nuser\na\nb\nassistant\n"


async def test_a_stream_has_a_role_then_text_then_a_reason(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Chunks: the role, the text in pieces, an empty delta with the reason; then [DONE]."""
    chunks = await events(session, gateway, CHAT, HELLO)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "Hi there"
    assert deltas[-1] == {}
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_in_a_stream(
    gateway: Gateway, session: aiohttp.ClientSession, path: str
) -> None:
    """include_usage adds a last chunk without choices; the others say usage: null."""
    body = {"prompt": "hello"} if path == TEXT else HELLO
    chunks = await events(
        session, gateway, path, {**body, "stream_options": {"include_usage": True}}
    )
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


async def test_continuous_usage(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """continuous_usage_stats puts the usage so far into every chunk."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(session, gateway, TEXT, {"prompt": "ab", "stream_options": options})
    totals = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert totals == sorted(totals)
    assert totals[-2:] == [8, 8]


async def test_several_prompts_in_one_stream(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Chunks of several prompts are told apart by their index."""
    chunks = await events(session, gateway, TEXT, {"prompt": ["a", "b", "c"]})
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "Hi there"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]


async def test_chat_logprobs(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """A record per token with its bytes, also where a token is a part of a character."""
    gateway.engine.answer = "é"
    body = {**HELLO, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    _, answer = await post(session, gateway, CHAT, body)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert [record["bytes"] for record in content] == [[0xC3], [0xA9]]
    assert [record["token"] for record in content] == ["\ufffd", "\ufffd"]
    assert content[0]["logprob"] == -0.25
    assert content[0]["top_logprobs"][0]["bytes"] == [0xC3]
    assert choice["token_ids"] == list(gateway.engine.tokenizer.encode("é"))  # type: ignore[union-attr]
    assert answer["prompt_token_ids"] == list(gateway.engine.requests[0].prompt_token_ids)
    streamed = await events(session, gateway, CHAT, body)
    parts = [c["choices"][0]["logprobs"] for c in streamed if c["choices"][0]["logprobs"]]
    assert [record for part in parts for record in part["content"]] == content


async def test_completion_logprobs(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """Parallel arrays with offsets; the pieces of a stream add up to the whole."""
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 3}
    _, answer = await post(session, gateway, TEXT, body)
    whole = answer["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["H", "i", " "],
        "token_logprobs": [-0.25] * 3,
        "top_logprobs": [{"H": -0.25}, {"i": -0.25}, {" ": -0.25}],
        "text_offset": [0, 1, 2],
    }
    chunks = await events(session, gateway, TEXT, body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for key, values in whole.items():
        assert [value for part in parts for value in part[key]] == values


async def test_a_stop_string_is_named(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """The text ends before the stop string, which is the stop_reason."""
    _, answer = await post(session, gateway, TEXT, {"prompt": "x", "stop": "the"})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "Hi ",
        "stop",
        "the",
    )


async def test_without_a_tokenizer(session: aiohttp.ClientSession) -> None:
    """Token ids go in and come out; texts and chats are refused with the reason."""
    async with scripted_gateway(tokenizer=False) as gateway:
        body = {"prompt": [1, 2], "return_token_ids": True, "logprobs": 0}
        status, answer = await post(session, gateway, TEXT, body)
        (choice,) = answer["choices"]
        assert status == 200
        assert (choice["text"], choice["token_ids"]) == ("", [5, 6, 7])
        assert choice["prompt_token_ids"] == [1, 2]
        assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:7"]
        chunks = await events(session, gateway, TEXT, body)
        assert [c["choices"][0]["token_ids"] for c in chunks] == [[5], [6], [7]]
        for path, bad in (
            (CHAT, HELLO),
            (TEXT, {"prompt": "a"}),
            (TEXT, {"prompt": [1], "stop": "a"}),
        ):
            status, answer = await post(session, gateway, path, bad)
            assert status == 400
            assert "tokenizer" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (TEXT, {"prompt": "a"})])
async def test_what_is_degraded_says_so(
    gateway: Gateway, session: aiohttp.ClientSession, path: str, body: Json, stream: bool
) -> None:
    """A choice, at its end, of which something was computed without an expert that nobody had."""
    engine = gateway.engine
    engine.manual = True
    for is_degraded in (False, True):
        ask = events if stream else post
        waiting = asyncio.create_task(ask(session, gateway, path, body))
        await engine.wait_for(lambda count=is_degraded + 1: len(engine.requests) == count)
        engine.emit("Hi", is_degraded=is_degraded)
        engine.emit(finish_reason=FinishReason.STOP, is_degraded=is_degraded)
        answer = await waiting
        answers = answer if stream else [answer[1]]
        told = [choice.get("degraded") for each in answers for choice in each["choices"]]
        assert told == [*[None] * (len(told) - 1), is_degraded or None]
