"""The endpoints under /v1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson
from aiohttp import web

from gateway.generation_options import OutputLimit, check_options, sampling_params
from gateway.openai.answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from gateway.openai.body import read_json
from gateway.openai.errors import AbortedError, api_error
from gateway.openai.event_stream import EventStream
from gateway.openai.logprobs import Json
from gateway.openai.prompts import encode_chat, encode_prompts
from gateway.openai.schema import CommonRequest, check_model, parse_chat, parse_completion
from gateway.sequence import FinishReason, RequestOutput
from gateway.service import (
    GenerationFrontend,
    GenerationStream,
    Prompt,
    ServedModel,
    merge,
    new_id,
)
from gateway.structured.constraint import parse_constraint
from gateway.structured.grammar import compile_constraint

REQUEST_ID = web.RequestKey("request_id", str)
"""Id of the HTTP request: for the log and the X-Request-Id header."""

_DEFAULT_COMPLETION_TOKENS = 16


class OpenAiHandlers:
    """Handlers over one frontend."""

    def __init__(self, frontend: GenerationFrontend) -> None:
        self._frontend = frontend
        self._model = frontend.model

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Puts the endpoints under /v1."""
        router.add_get("/v1/models", self.list_models)
        router.add_get("/v1/models/{model:.+}", self.get_model)
        router.add_post("/v1/chat/completions", self.chat)
        router.add_post("/v1/completions", self.complete)

    async def list_models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [model_card(self._model)]})

    async def get_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        check_model(request.match_info["model"], self._model)
        return json_response(model_card(self._model))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        fields = await read_json(request, self._frontend)
        body = parse_chat(fields, self._model)
        check_options(body, self._model.bounds)
        prompt = await encode_chat(self._frontend, body.messages)
        replaced = body.max_completion_tokens is not None
        limit = OutputLimit(
            requested=body.max_completion_tokens if replaced else body.max_tokens,
            default=None,
            param="max_completion_tokens" if replaced else "max_tokens",
            prompt_param="messages",
        )
        options = answer_options(body, (body.top_logprobs or 0) if body.logprobs else None)
        answer = ChatAnswer(new_id("chatcmpl-"), self._model, [prompt], options)
        grammar = await compile_constraint(self._frontend, parse_constraint(fields))
        return await self._generate(request, body, answer, limit, grammar)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        fields = await read_json(request, self._frontend)
        body = parse_completion(fields, self._model)
        check_options(body, self._model.bounds)
        prompts = await encode_prompts(self._frontend, body.prompt)
        limit = OutputLimit(body.max_tokens, _DEFAULT_COMPLETION_TOKENS, "max_tokens", "prompt")
        options = answer_options(body, body.logprobs)
        answer = CompletionAnswer(new_id("cmpl-"), self._model, prompts, options)
        grammar = await compile_constraint(self._frontend, parse_constraint(fields))
        return await self._generate(request, body, answer, limit, grammar)

    async def _generate(
        self,
        request: web.Request,
        body: CommonRequest,
        answer: Answer,
        limit: OutputLimit,
        grammar: str,
    ) -> web.StreamResponse:
        prompts = _engine_prompts(body, answer, limit, grammar)
        with self._frontend.open(prompts) as stream:
            if body.stream:
                return await self._stream(request, answer, stream)
            return json_response(answer.whole(await _collect(stream, len(prompts))))

    async def _stream(
        self, request: web.Request, answer: Answer, stream: GenerationStream
    ) -> web.StreamResponse:
        limits = self._frontend.limits
        events = EventStream(request, limits.write_timeout_s)
        try:
            while not stream.done:
                outputs = await stream.next(limits.keep_alive_s)
                if outputs is None:
                    await events.keep_alive()
                else:
                    await events.send(_chunks(answer, outputs))
            await events.send(answer.usage_chunk())
        except ConnectionError:
            raise  # the client is gone; there is nobody to tell
        except Exception as error:
            if not events.started:
                raise
            await events.fail(api_error(error, request[REQUEST_ID]))
        await events.finish()
        return events.response


def _engine_prompts(
    body: CommonRequest, answer: Answer, limit: OutputLimit, grammar: str
) -> list[Prompt]:
    """The prompts of a call for the engine; all are checked before any is submitted."""
    max_model_len = answer.model.max_model_len
    return [
        Prompt(
            request_id=f"{answer.answer_id}-{index}",
            token_ids=token_ids,
            params=replace(
                sampling_params(
                    body,
                    max_tokens=limit.resolve(len(token_ids), max_model_len),
                    num_logprobs=answer.options.num_logprobs,
                ),
                grammar=grammar,
            ),
        )
        for index, token_ids in enumerate(answer.prompts)
    ]


async def _collect(stream: GenerationStream, num_prompts: int) -> list[RequestOutput]:
    """Merged outputs of each prompt."""
    parts: list[list[RequestOutput]] = [[] for _ in range(num_prompts)]
    while not stream.done:
        for index, output in await stream.next() or ():
            _check_not_aborted(output)
            parts[index].append(output)
    return [merge(outputs) for outputs in parts]


def _chunks(answer: Answer, outputs: Sequence[tuple[int, RequestOutput]]) -> list[Json]:
    chunks: list[Json] = []
    for index, output in outputs:
        _check_not_aborted(output)
        chunks += answer.chunks(index, output)
    return chunks


def _check_not_aborted(output: RequestOutput) -> None:
    """An aborted answer must not pass for a whole one: the API has no word for it."""
    if output.finish_reason is FinishReason.ABORT:
        raise AbortedError


def answer_options(body: CommonRequest, num_logprobs: int | None) -> AnswerOptions:
    """What the client wants to see."""
    wanted = body.stream_options
    return AnswerOptions(
        num_logprobs=num_logprobs,
        return_token_ids=bool(body.return_token_ids),
        include_usage=bool(wanted and wanted.include_usage),
        continuous_usage=bool(wanted and wanted.continuous_usage_stats),
    )


def model_card(model: ServedModel) -> Json:
    """The model in /v1/models."""
    config = model.config
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "expertmesh",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [],
        "moe": {
            "num_layers": config.num_layers,
            "num_moe_layers": len(config.moe_layers),
            "num_experts": config.num_experts,
            "top_k": config.top_k,
            "dtype": model.dtype,
        },
    }


def json_response(value: Json, *, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
