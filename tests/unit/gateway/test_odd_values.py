"""Whatever a parameter holds, the answer is one or a named error, never an internal one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.support.openai_calls import CHAT, HELLO, TEXT, post
from tests.support.parameter_tables import STRUCTS, docstrings
from tests.support.scripted_engine import Gateway, scripted_gateway

VALUES = [
    True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e-300, 1e300, 2**31, 2**63, 2**64, -(2**70), "", "a",
    "1", "\0", "é" * 2000, [], [0], [1, 2], [-1], [None], ["a"], [[1]], [{}], [True], {}, {"a": 1},
    {"0": 0}, {"1": None}, {"type": "text"}, {"include_usage": True}, [[]], ["", ""], [1.5],
]  # fmt: skip
ELSEWHERE = ["response_format", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls"]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine."""
    async with scripted_gateway() as running:
        yield running


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_no_value_is_an_internal_error(gateway: Gateway, path: str) -> None:
    """Each parameter with each value: 200, or 4xx that names the parameter or one it needs."""
    known = docstrings(STRUCTS["chat" if path == CHAT else "completion"])
    plain: dict[str, object] = HELLO if path == CHAT else {"prompt": "hello"}
    odd = []
    async with aiohttp.ClientSession() as session:
        for name in [*known, *ELSEWHERE]:
            for value in VALUES:
                if name == "stream" and value is True:
                    continue  # another kind of answer
                status, answer = await post(session, gateway, path, {**plain, name: value})
                named = status == 200 or bool(answer["error"]["param"])
                if status not in (200, 400, 404) or not named:
                    odd.append((name, value, status, answer))
    assert odd == []


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_nor_for_the_tokenizer(gateway: Gateway, path: str) -> None:
    """The same for what is not a completion."""
    odd = []
    names = ("prompt", "messages", "tokens", "model", "add_special_tokens", "return_token_strs")
    chat = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
    async with aiohttp.ClientSession() as session:
        for name in (*names, *chat):
            for value in VALUES:
                for plain in ({}, {"prompt": "a"}, HELLO, {"tokens": [1]}):
                    status, answer = await post(session, gateway, path, {**plain, name: value})
                    if status not in (200, 400, 404):
                        odd.append((plain, name, value, status, answer))
    assert odd == []
