"""Answers in typed events, for the APIs that name their events, whole or streamed.

The whole answer is what the events of a stream add up to, as both come from the same steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Protocol

import orjson
from aiohttp import web

from gateway.openai.answers import AnswerOptions, ChatAnswer
from gateway.openai.chat_call import ChatCall
from gateway.openai.errors import ApiError
from gateway.openai.event_stream import EventStream
from gateway.openai.handlers import (
    CONNECTED_S,
    REQUEST_ID,
    collect_outputs,
    engine_prompts,
    stream_answer,
)
from gateway.openai.logprobs import Json
from gateway.sequence import RequestOutput
from gateway.service import GenerationFrontend


class TypedAnswer(Protocol):
    """Makes the events of one answer; each has a "type", which is the name of the event."""

    def push(self, output: RequestOutput) -> list[Json]:
        """What a step of the engine adds; the first call begins the answer, the output with a
        finish reason ends it."""

    def whole(self) -> Json:
        """The answer, once it has ended."""

    def keep_alive(self) -> list[Json]:
        """What is sent if there is nothing to say; empty for a comment."""

    def fail(self, error: ApiError) -> list[Json]:
        """The end of a stream that failed."""


def encode_json(value: Json) -> bytes:
    """JSON text of an answer that may repeat what a client sent, also integers of any size."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class TypedEventStream(EventStream):
    """Server-sent events with names, of an answer that says itself how it fails."""

    def __init__(self, request: web.Request, write_timeout_s: float, answer: TypedAnswer) -> None:
        super().__init__(request, write_timeout_s)
        self._answer = answer

    async def keep_alive(self) -> None:
        """Sends what the answer says to that, or a comment."""
        sent = self._answer.keep_alive()
        await (self.send(sent) if sent else super().keep_alive())

    async def fail(self, error: ApiError) -> None:
        """Sends the events of a failure."""
        await self.send(self._answer.fail(error))

    async def send(self, events: Iterable[Json]) -> None:
        """Sends events in one write. Raises as for every stream."""
        pieces = [
            b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), encode_json(event))
            for event in events
        ]
        if pieces:
            await self._write(b"".join(pieces))

    async def finish(self) -> None:
        """Ends the stream; the last event says so itself."""
        await self.response.write_eof()


async def give_answer(
    request: web.Request,
    frontend: GenerationFrontend,
    call: ChatCall,
    answer_id: str,
    answer: TypedAnswer,
) -> web.StreamResponse:
    """Generates and answers, as a stream if the request wants one.

    Args:
        request: The HTTP request.
        frontend: Where outputs come from.
        call: The chat request.
        answer_id: Id of the answer, and of its request in the engine.
        answer: Makes the answer.

    Raises:
        Exception: What goes wrong before the first event.
    """
    prompts = engine_prompts(
        call.body,
        ChatAnswer(answer_id, call.model, [call.prompt], AnswerOptions()),
        call.limit,
        request[REQUEST_ID],
        call.grammar,
    )
    with frontend.open(prompts, connected_s=request[CONNECTED_S]) as stream:
        if call.body.stream:
            limits = frontend.limits
            events = TypedEventStream(request, limits.write_timeout_s, answer)
            return await stream_answer(
                request, stream, events, limits.keep_alive_s, lambda _, output: answer.push(output)
            )
        (output,) = await collect_outputs(stream, 1)
        answer.push(output)
        body = encode_json(answer.whole())
        return web.Response(body=body, content_type="application/json")
