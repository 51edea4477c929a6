"""/tokenize, /detokenize, /tokenizer_info over a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.support.openai_calls import CHAT, HELLO, post
from tests.support.scripted_engine import CHATML, CONTEXT, VOCAB_SIZE, Gateway, scripted_gateway

MESSAGES = HELLO["messages"]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine."""
    async with scripted_gateway() as gateway:
        yield gateway


async def test_texts(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """Ids and their number, for a text of any length; spelled as in the vocabulary on demand."""
    _, answer = await post(session, gateway, "/tokenize", {"prompt": "é a"})
    assert (answer["count"], answer["max_model_len"], answer["token_strs"]) == (4, CONTEXT, None)
    body = {"prompt": "é a", "return_token_strs": True}
    _, spelled = await post(session, gateway, "/tokenize", body)
    assert spelled["tokens"] == answer["tokens"]
    assert spelled["token_strs"] == ["Ã", "©", "Ġ", "a"]
    for text in ("", "a" * 10_000):
        _, answer = await post(session, gateway, "/tokenize", {"prompt": text})
        assert answer["count"] == len(text)


async def test_conversations(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """The ids that the engine gets for the same conversation, whatever the options."""
    for options in (
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"x": "<|im_end|>"}},
    ):
        _, counted = await post(session, gateway, "/tokenize", {**HELLO, **options})
        status, _ = await post(session, gateway, CHAT, {**HELLO, **options})
        assert status == 200
        assert tuple(counted["tokens"]) == gateway.engine.requests[-1].prompt_token_ids


async def test_round_trip(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """Special tokens are spelled; no tokens are no text."""
    text = "<|im_start|>é<|im_end|>"
    _, ids = await post(session, gateway, "/tokenize", {"prompt": text})
    assert ids["count"] == 4
    _, answer = await post(session, gateway, "/detokenize", {"tokens": ids["tokens"]})
    assert answer == {"prompt": text}
    _, answer = await post(session, gateway, "/detokenize", {"tokens": []})
    assert answer == {"prompt": ""}


async def test_info(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """What lm-eval needs of a remote tokenizer: special tokens as texts, and the template."""
    async with session.get(f"{gateway.url}/tokenizer_info") as response:
        info = await response.json()
    assert (info["eos_token"], info["chat_template"]) == ("<|im_end|>", CHATML)
    assert info["tokenizer_class"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "king", "content": ""}]}, "messages.0.role"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "x"}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens.0"),
    ],
    ids=str,
)
async def test_refused(
    gateway: Gateway, session: aiohttp.ClientSession, path: str, body: dict[str, object], param: str
) -> None:
    """What is wrong is named."""
    status, answer = await post(session, gateway, path, body)
    assert status in (400, 404)
    assert answer["error"]["param"] == param


async def test_without_a_tokenizer(session: aiohttp.ClientSession) -> None:
    """All of it is refused with the reason."""
    async with scripted_gateway(tokenizer=False) as gateway:
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            ("/tokenize", HELLO),
            ("/detokenize", {"tokens": [1]}),
        ):
            status, answer = await post(session, gateway, path, body)
            assert (status, answer["error"]["code"]) == (400, "unsupported_by_model")
        async with session.get(f"{gateway.url}/tokenizer_info") as response:
            assert response.status == 400
