"""The endpoint /v1/responses."""

from __future__ import annotations

from aiohttp import web

from gateway.openai.body import read_json
from gateway.openai.chat_call import prepare_chat
from gateway.openai.renames import renamed
from gateway.openai.typed_answer import give_answer
from gateway.responses.answer import ResponseAnswer
from gateway.responses.request import chat_fields, parse_response_request
from gateway.service import GenerationFrontend, new_id


class ResponseHandlers:
    """Handlers over one frontend."""

    def __init__(self, frontend: GenerationFrontend) -> None:
        self._frontend = frontend

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Puts the endpoint under /v1."""
        router.add_post("/v1/responses", self.respond)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        body = await read_json(request, self._frontend)
        parsed = parse_response_request(body)
        chat = chat_fields(parsed, body)
        with renamed(chat.renames):
            call = await prepare_chat(self._frontend, chat.fields)
            response_id = new_id("resp_")
            answer = ResponseAnswer(response_id, parsed, call)
            return await give_answer(request, self._frontend, call, response_id, answer)
