"""The endpoints under /v1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import orjson
from aiohttp import web

from gateway.generation_options import OutputLimit, choice_params, sampling_params
from gateway.openai.answers import Answer, AnswerOptions, ChatAnswer
from gateway.openai.body import read_json
from gateway.openai.chat_call import ChatCall, prepare_chat
from gateway.openai.completion_answer import CompletionAnswer
from gateway.openai.errors import AbortedError, api_error
from gateway.openai.event_stream import EventStream
from gateway.openai.logprobs import Json
from gateway.openai.prompts import (
    PromptOptions,
    encode_prompts,
    truncation_of,
)
from gateway.openai.schema import (
    CommonRequest,
    CompletionRequest,
    check_model,
    parse_completion,
)
from gateway.openai.tool_answer import ToolChatAnswer
from gateway.option_checks import bad_word_ids, check_min_tokens, check_options, check_prompt_start
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
CONNECTED_S = web.RequestKey("connected_s", float)
"""When the client made the connection of the request, on the monotonic clock."""

_DEFAULT_COMPLETION_TOKENS = 16
_IN_THREAD_FROM = 200
"""Tokens with log probabilities from which an answer is made outside the event loop."""


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
        call = await prepare_chat(self._frontend, await read_json(request, self._frontend))
        body = call.body
        options = answer_options(body, (body.top_logprobs or 0) if body.logprobs else None)
        answer = _chat_answer(_answer_id("chatcmpl-", body), call, options)
        return await self._generate(request, body, answer, call.limit, call.grammar)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        fields = await read_json(request, self._frontend)
        body = parse_completion(fields, self._model)
        check_options(body, self._model.bounds)
        # With max_tokens 0 a token is generated all the same, and not shown.
        requested = None if body.max_tokens is None else max(body.max_tokens, 1)
        limit = OutputLimit(requested, _DEFAULT_COMPLETION_TOKENS, "max_tokens", "prompt")
        options = replace(
            answer_options(body, body.logprobs),
            skip_special_tokens=body.skip_special_tokens is not False,
            echo=bool(body.echo),
            prompt_only=body.max_tokens == 0,
        )
        prompts = await encode_prompts(self._frontend, body.prompt, self._prompt_options(body))
        answer = CompletionAnswer(_answer_id("cmpl-", body), self._model, prompts, options)
        grammar = await compile_constraint(self._frontend, parse_constraint(fields))
        return await self._generate(request, body, answer, limit, grammar)

    def _prompt_options(self, body: CompletionRequest) -> PromptOptions:
        return PromptOptions(
            num_choices=body.n or 1,
            add_special_tokens=body.add_special_tokens is not False,
            echo=bool(body.echo),
            truncation=truncation_of(body, self._model, body.max_tokens),
        )

    async def _generate(
        self,
        request: web.Request,
        body: CommonRequest,
        answer: Answer,
        limit: OutputLimit,
        grammar: str,
    ) -> web.StreamResponse:
        prompts = engine_prompts(body, answer, limit, request[REQUEST_ID], grammar)
        with self._frontend.open(prompts, connected_s=request[CONNECTED_S]) as stream:
            if body.stream:
                return await self._stream(request, answer, stream)
            return await self._whole(answer, await collect_outputs(stream, len(prompts)))

    async def _whole(self, answer: Answer, outputs: Sequence[RequestOutput]) -> web.Response:
        """An answer that is not a stream; a large one is made outside the event loop."""
        num_records = sum(
            len(output.logprobs) + len(output.prompt_logprobs or ()) for output in outputs
        )
        if num_records < _IN_THREAD_FROM:
            return json_response(answer.whole(outputs))
        return await self._frontend.run_in_thread(lambda: json_response(answer.whole(outputs)))

    async def _stream(
        self, request: web.Request, answer: Answer, stream: GenerationStream
    ) -> web.StreamResponse:
        limits = self._frontend.limits
        events = EventStream(request, limits.write_timeout_s)
        return await stream_answer(
            request, stream, events, limits.keep_alive_s, answer.chunks, answer.usage_chunk
        )


def _chat_answer(answer_id: str, call: ChatCall, options: AnswerOptions) -> ChatAnswer:
    if call.tools.offered:
        return ToolChatAnswer(answer_id, call.model, [call.prompt], options, call.reader)
    return ChatAnswer(answer_id, call.model, [call.prompt], options)


def _answer_id(prefix: str, body: CommonRequest) -> str:
    return new_id(prefix) if body.request_id is None else f"{prefix}{body.request_id}"


def engine_prompts(
    body: CommonRequest, answer: Answer, limit: OutputLimit, call_id: str, grammar: str = ""
) -> list[Prompt]:
    """A prompt for the engine for each choice; all are checked before any is submitted.

    Args:
        body: The request.
        answer: Its prompts, and what it shows.
        limit: How many tokens may be generated.
        call_id: Id of the HTTP request.
        grammar: What the output must match.

    Raises:
        RequestError: A prompt leaves no room, or a parameter does not fit it.
    """
    options, bounds = answer.options, answer.model.bounds
    echoed = options.num_logprobs if options.echo else None
    answer.model.sampling_defaults.fill(body)
    params = sampling_params(
        body,
        max_tokens=1,
        num_logprobs=options.num_logprobs,
        num_prompt_logprobs=echoed if body.prompt_logprobs is None else body.prompt_logprobs,
        return_routed_experts=options.routed_experts_from is not None,
        bad_words=bad_word_ids(body, bounds),
        grammar=grammar,
    )
    prompts: list[Prompt] = []
    for token_ids in answer.prompts:
        check_prompt_start(body.routed_experts_prompt_start or 0, len(token_ids))
        max_tokens = limit.resolve(len(token_ids), bounds.max_model_len)
        check_min_tokens(body, max_tokens)
        for choice in range(options.num_choices):
            prompt = Prompt(
                request_id=f"{answer.answer_id}-{len(prompts)}",
                token_ids=token_ids,
                params=choice_params(replace(params, max_tokens=max_tokens), choice),
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                timeout_s=body.timeout_s,
                call_id=call_id,
            )
            prompts.append(prompt)
    return prompts


async def collect_outputs(stream: GenerationStream, num_choices: int) -> list[RequestOutput]:
    """Merged outputs of each choice."""
    parts: list[list[RequestOutput]] = [[] for _ in range(num_choices)]
    while not stream.done:
        for index, output in await stream.next() or ():
            _check_not_aborted(output)
            parts[index].append(output)
    return [merge(outputs) for outputs in parts]


async def stream_answer(
    request: web.Request,
    stream: GenerationStream,
    events: EventStream,
    keep_alive_s: float,
    chunks: Callable[[int, RequestOutput], list[Json]],
    last: Callable[[], list[Json]] = list,
) -> web.StreamResponse:
    """Streams outputs as they come.

    Args:
        request: The HTTP request.
        stream: Where the outputs come from.
        events: Where they go.
        keep_alive_s: Longest silence.
        chunks: What is said about an output of a choice.
        last: What is said after all outputs.

    Raises:
        ConnectionError: The client is gone; there is nobody to tell.
        Exception: What goes wrong before the first event.
    """
    try:
        while not stream.done:
            outputs = await stream.next(keep_alive_s)
            if outputs is None:
                await events.keep_alive()
            for _, output in outputs or ():
                _check_not_aborted(output)
            await events.send(
                [chunk for index, output in outputs or () for chunk in chunks(index, output)]
            )
        await events.send(last())
    except ConnectionError:
        raise
    except Exception as error:
        if not events.started:
            raise
        await events.fail(api_error(error, request[REQUEST_ID]))
    await events.finish()
    return events.response


def _check_not_aborted(output: RequestOutput) -> None:
    """An aborted answer must not pass for a whole one: the API has no word for it."""
    if output.finish_reason is FinishReason.ABORT:
        raise AbortedError


def answer_options(body: CommonRequest, num_logprobs: int | None) -> AnswerOptions:
    """What the client wants to see."""
    wanted, start = body.stream_options, body.routed_experts_prompt_start or 0
    return AnswerOptions(
        num_logprobs=num_logprobs,
        return_token_ids=bool(body.return_token_ids),
        include_usage=bool(wanted and wanted.include_usage),
        continuous_usage=bool(wanted and wanted.continuous_usage_stats),
        num_choices=body.n or 1,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
        routed_experts_from=start if body.return_routed_experts else None,
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
