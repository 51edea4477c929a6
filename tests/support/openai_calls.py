"""Calls of the completion endpoints of an in-process server."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from tests.support.scripted_engine import Gateway

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def post(
    session: aiohttp.ClientSession, gateway: Gateway, path: str, body: object
) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    async with session.post(gateway.url + path, json=body) as response:
        return response.status, await response.json()


async def events(
    session: aiohttp.ClientSession, gateway: Gateway, path: str, body: dict[str, object]
) -> list[Any]:
    """Events of a stream; "[DONE]" is the last."""
    async with session.post(gateway.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        text = (await response.read()).decode()
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert found.pop() == "[DONE]"
    return [json.loads(event) for event in found]
