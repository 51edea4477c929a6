"""The endpoints /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from aiohttp import web

from gateway.messages.answer import MessagesAnswer
from gateway.messages.request import chat_fields, parse_count_request, parse_messages_request
from gateway.openai.body import read_json
from gateway.openai.chat_call import prepare_chat
from gateway.openai.handlers import json_response
from gateway.openai.renames import renamed
from gateway.openai.typed_answer import give_answer
from gateway.service import GenerationFrontend, new_id


class MessagesHandlers:
    """Handlers over one frontend."""

    def __init__(self, frontend: GenerationFrontend) -> None:
        self._frontend = frontend

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Puts the endpoints under /v1."""
        router.add_post("/v1/messages", self.answer)
        router.add_post("/v1/messages/count_tokens", self.count_tokens)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        body = await read_json(request, self._frontend)
        chat = chat_fields(parse_messages_request(body), body)
        with renamed(chat.renames):
            call = await prepare_chat(self._frontend, chat.fields)
            message_id = new_id("msg_")
            answer = MessagesAnswer(message_id, call)
            return await give_answer(request, self._frontend, call, message_id, answer)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens."""
        body = await read_json(request, self._frontend)
        chat = chat_fields(parse_count_request(body), body)
        with renamed(chat.renames):
            call = await prepare_chat(self._frontend, chat.fields)
        return json_response({"input_tokens": len(call.prompt)})
