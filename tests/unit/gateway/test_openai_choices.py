"""Several choices, echoed prompts, log probabilities of prompts, experts of tokens."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest

from gateway.sequence import FinishReason
from tests.support.openai_calls import CHAT, HELLO, TEXT, events, post
from tests.support.scripted_engine import CONTEXT, Gateway, byte_tokenizer, scripted_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine."""
    async with scripted_gateway() as gateway:
        yield gateway


async def test_choices_are_numbered_prompt_by_prompt(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Choice j of prompt i has the index i*n+j; the usage counts each prompt once."""
    body = {"prompt": ["a", "bc"], "n": 3, "return_token_ids": True}
    _, answer = await post(session, gateway, TEXT, body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    lengths = [len(choice["prompt_token_ids"]) for choice in answer["choices"]]
    assert lengths == [1, 1, 1, 2, 2, 2]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 6 * 8


async def test_the_first_choice_is_that_of_a_single_one(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Choice 0 has the seed of n=1; the others have seeds of their own, the same every time."""
    seeds = []
    for n in (1, 4, 4):
        await post(session, gateway, CHAT, {**HELLO, "n": n, "seed": 7})
        seeds.append([request.params.seed for request in gateway.engine.requests])
        gateway.engine.requests.clear()
    assert seeds[0] == [7]
    assert seeds[1][0] == 7
    assert seeds[1] == seeds[2]
    assert len(set(seeds[1])) == 4


async def test_a_stream_of_several_choices(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Every choice of a chat has its role chunk, its text and its end."""
    options = {"include_usage": True}
    chunks = await events(session, gateway, CHAT, {**HELLO, "n": 3, "stream_options": options})
    for index in range(3):
        mine = [
            c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index
        ]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hi there"
        assert mine[-1]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert chunks[-1]["usage"]["prompt_tokens"] == len(gateway.engine.requests[0].prompt_token_ids)


async def test_cached_tokens_are_counted_once_per_prompt(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """cached_tokens sums over the prompts, not over their choices."""
    gateway.engine.num_cached = 2
    _, answer = await post(session, gateway, TEXT, {"prompt": ["abc", "def"], "n": 2})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    options = {"include_usage": True}
    chunks = await events(session, gateway, TEXT, {"prompt": "abc", "stream_options": options})
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_echo_puts_the_prompt_first(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """Text and log probabilities begin with the prompt, whose first token has none."""
    body = {"prompt": "xyz", "echo": True, "logprobs": 1, "max_tokens": 2}
    _, answer = await post(session, gateway, TEXT, body)
    (choice,) = answer["choices"]
    assert choice["text"] == "xyzHi"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["x", "y", "z", "H", "i"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert logprobs["top_logprobs"] == [None, *({t: -0.25} for t in "yzHi")]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    chunks = await events(session, gateway, TEXT, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "xyzHi"
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for key, values in logprobs.items():
        assert [value for part in parts for value in part[key]] == values


async def test_echo_without_generation(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """With max_tokens 0 only the prompt comes back, and nothing counts as generated."""
    ids = byte_tokenizer().encode("xyz")
    for prompt in ("xyz", ids):
        body = {
            "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0,
            "return_token_ids": True, "return_routed_experts": True,
        }  # fmt: skip
        _, answer = await post(session, gateway, TEXT, body)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (
            "xyz",
            "length",
            [],
        )
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
        assert choice["logprobs"]["top_logprobs"] == [None, {"y": -0.25}, {"z": -0.25}]
        assert answer["usage"]["completion_tokens"] == 0
        assert experts_of(choice).shape == (2, 1, 2)
        chunks = await events(session, gateway, TEXT, body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "xyz"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {request.params.max_tokens for request in gateway.engine.requests} == {1}


async def test_prompt_logprobs(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """An object per token of the prompt, its own token first; in chats beside the choices."""
    _, answer = await post(session, gateway, TEXT, {"prompt": "xy", "prompt_logprobs": 2})
    first, second = answer["choices"][0]["prompt_logprobs"]
    (y,) = byte_tokenizer().encode("y")
    assert first is None
    assert second == {
        str(y): {"logprob": -0.25, "rank": 1, "decoded_token": "y"},
        str(y + 1): {"logprob": -0.5, "rank": 2, "decoded_token": "z"},
    }
    _, chat = await post(session, gateway, CHAT, {**HELLO, "prompt_logprobs": 0})
    assert len(chat["prompt_logprobs"]) == len(gateway.engine.requests[-1].prompt_token_ids)


async def test_tokens_as_ids(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """Spelled "token_id:N" in both formats; offsets stay those of the text."""
    wanted = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 2}
    _, text = await post(session, gateway, TEXT, {"prompt": "x", "logprobs": 1, **wanted})
    (choice,) = text["choices"]
    spelled = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == spelled
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[s] for s in spelled]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    _, chat = await post(session, gateway, CHAT, {**HELLO, "logprobs": True, **wanted})
    content = chat["choices"][0]["logprobs"]["content"]
    assert [record["token"] for record in content] == spelled
    assert content[0]["bytes"] == [ord("H")]


def experts_of(choice: dict[str, object]) -> np.ndarray:
    """`routed_experts` of a choice, as a client reads them."""
    found: np.ndarray = np.load(io.BytesIO(base64.b64decode(str(choice["routed_experts"]))))
    return found


async def test_routed_experts(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """Every token but the last, in a byte each, without the tokens that are left out."""
    body = {"prompt": "xyz", "max_tokens": 2, "return_routed_experts": True}
    _, answer = await post(session, gateway, TEXT, body)
    found = experts_of(answer["choices"][0])
    assert (found.shape, found.dtype) == ((4, 1, 2), np.uint8)
    assert found[:, 0, 0].tolist() == [0, 1, 2, 3]
    _, answer = await post(session, gateway, TEXT, {**body, "routed_experts_prompt_start": 3})
    assert experts_of(answer["choices"][0])[:, 0, 0].tolist() == [3]
    for path, streamed in ((TEXT, body), (CHAT, {**HELLO, **body})):
        chunks = await events(session, gateway, path, streamed)
        assert "routed_experts" not in chunks[0]["choices"][0]
        assert experts_of(chunks[-1]["choices"][0])[-1].shape == (1, 2)
    _, plain = await post(session, gateway, TEXT, {"prompt": "xyz"})
    assert "routed_experts" not in plain["choices"][0]


async def test_prompts_are_truncated(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """The end or the start is kept; the echo is what was kept."""
    for extra, kept in (
        ({"truncate_prompt_tokens": 3}, "hij"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 300}, "abcdefghij"),
        ({"truncate_prompt_tokens": -1}, "abcdefghij"),
    ):
        body = {"prompt": "abcdefghij", "echo": True, "max_tokens": 1, **extra}
        _, answer = await post(session, gateway, TEXT, body)
        assert answer["choices"][0]["text"] == kept + "H"
        assert answer["usage"]["prompt_tokens"] == len(kept)
    for path, body in (
        (TEXT, {"prompt": [5] * 2000}),
        (TEXT, {"prompt": "word " * 5000}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}),
    ):
        wanted = {**body, "truncate_prompt_tokens": -1, "max_tokens": 12}
        status, _ = await post(session, gateway, path, wanted)
        assert status == 200
        assert len(gateway.engine.requests[-1].prompt_token_ids) == CONTEXT - 12


async def test_ids_of_requests(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """A request id becomes a part of the answer's; a second one at a time is refused."""
    _, answer = await post(session, gateway, CHAT, {**HELLO, "request_id": "mine", "n": 2})
    assert answer["id"] == "chatcmpl-mine"
    ids = [request.request_id for request in gateway.engine.requests]
    assert ids == ["chatcmpl-mine-0", "chatcmpl-mine-1"]
    gateway.engine.manual = True
    body = {**HELLO, "request_id": "mine"}
    running = asyncio.create_task(post(session, gateway, CHAT, body))
    await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 3)
    status, refused = await post(session, gateway, CHAT, body)
    assert (status, refused["error"]["code"]) == (400, "request_id_in_use")
    gateway.engine.emit("x", finish_reason=FinishReason.STOP)
    assert (await running)[0] == 200
