"""One Generate call: from the request to a prompt for the engine, and from outputs to responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypedDict, assert_never

from expertmesh.errors import RequestError
from expertmesh.v1 import generation_service_pb2 as pb
from gateway.generation_options import (
    GenerationOptions,
    NumLogprobs,
    OutputLimit,
    check_token_ids,
    convert,
    sampling_params,
)
from gateway.mesh.mesh_status import MeshStatus
from gateway.openai.prompts import (
    PromptOptions,
    TokenIds,
    Truncation,
    encode_chat,
    encode_text,
    make_truncation,
)
from gateway.openai.schema import ChatMessage, check_cache_salt, check_model
from gateway.option_checks import (
    bad_word_ids,
    check_min_tokens,
    check_options,
    check_prompt_start,
    check_routed_experts,
)
from gateway.sequence import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from gateway.service import GenerationFrontend, Prompt
from gateway.structured.constraint import Constraint, constraint_of
from gateway.structured.grammar import compile_constraint

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


_GROUPS = ("sampling", "stopping", "response")
_KINDS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""Field of StructuredOutput to what it is called in the HTTP API."""


class _Options(GenerationOptions, kw_only=True):
    """The options of both APIs, and what to return."""

    num_logprobs: NumLogprobs | None = None
    num_prompt_logprobs: NumLogprobs | None = None
    return_routed_experts: bool = False
    routed_experts_prompt_start: int = 0


class GenerateCall:
    """A call to Generate.

    Args:
        request: What the client sent.
        frontend: For the model and the encoding.
        request_id: Id of the call.
    """

    def __init__(
        self, request: pb.GenerateRequest, frontend: GenerationFrontend, request_id: str
    ) -> None:
        self._request = request
        self._frontend = frontend
        self._model = frontend.model
        self.request_id = request_id
        self._prompt: TokenIds = ()
        self._num_generated = 0

    async def prepare(self, remaining_s: float | None = None) -> Prompt:
        """The prompt for the engine.

        Args:
            remaining_s: Seconds until the client's deadline; None without one.

        Raises:
            RequestError: Names the field that is wrong.
        """
        request = self._request
        check_model(request.model or None, self._model)
        check_cache_salt(request.cache_salt)
        with self._fields_named():
            options = convert(self._fields(), _Options)
            check_options(options, self._model.bounds)
        token_ids, param = await self._encode()
        self._prompt = token_ids
        limit = OutputLimit(options.max_tokens, None, "stopping.max_tokens", param)
        max_tokens = limit.resolve(len(token_ids), self._model.max_model_len)
        with self._fields_named():
            check_min_tokens(options, max_tokens)
            params = self._params(options, max_tokens)
        params = replace(
            params, grammar=await compile_constraint(self._frontend, self._constraint())
        )
        return Prompt(
            *(self.request_id, token_ids, params, request.priority, request.cache_salt),
            *(remaining_s, self.request_id),
        )

    def _fields(self) -> dict[str, object]:
        """The options that are present."""
        fields: dict[str, object] = {}
        for group in _GROUPS:
            for descriptor, value in getattr(self._request, group).ListFields():
                fields[descriptor.name] = _plain(value)
        return fields

    @contextmanager
    def _fields_named(self) -> Iterator[None]:
        """Paths in errors become those of the message."""
        try:
            yield
        except RequestError as error:
            name = (error.param or "").partition(".")[0]
            groups = (
                g for g in _GROUPS if name in getattr(self._request, g).DESCRIPTOR.fields_by_name
            )
            error.param = f"{next(groups, '')}.{error.param}".lstrip(".")
            raise

    def _params(self, options: _Options, max_tokens: int) -> SamplingParams:
        check_routed_experts(options.return_routed_experts, self._model.config)
        check_prompt_start(options.routed_experts_prompt_start, len(self._prompt))
        self._model.sampling_defaults.fill(options)
        return sampling_params(
            options,
            max_tokens=max_tokens,
            num_logprobs=options.num_logprobs,
            num_prompt_logprobs=options.num_prompt_logprobs,
            return_routed_experts=options.return_routed_experts,
            bad_words=bad_word_ids(options, self._model.bounds),
        )

    def _constraint(self) -> Constraint | None:
        structured = self._request.structured_output
        kind = structured.WhichOneof("constraint")
        if kind is None:
            return None
        value = list(structured.choice.values) if kind == "choice" else getattr(structured, kind)
        return constraint_of(_KINDS[kind], value, f"structured_output.{kind}")

    async def _encode(self) -> tuple[TokenIds, str]:
        """Token ids of the prompt, and the field that it came from."""
        request = self._request
        kind, truncation = request.WhichOneof("input"), self._truncation()
        match kind:
            case "prompt":
                options = PromptOptions(
                    add_special_tokens=request.add_special_tokens
                    or not request.HasField("add_special_tokens"),
                    truncation=truncation,
                )
                ids = await encode_text(self._frontend, request.prompt, kind, options=options)
                return truncation.cut(ids), kind
            case "prompt_token_ids":
                vocab_size = self._model.config.vocab_size
                ids = check_token_ids(request.prompt_token_ids.ids, vocab_size, kind)
                return truncation.cut(ids), kind
            case "conversation":
                return await self._encode_conversation(truncation), kind
            case None:
                raise RequestError(
                    "input is missing; expected one of prompt, prompt_token_ids, conversation",
                    param="input",
                )
            case _:
                assert_never(kind)

    def _truncation(self) -> Truncation:
        request = self._request
        wanted = request.truncate_prompt_tokens
        if not request.HasField("truncate_prompt_tokens"):
            return Truncation()
        return make_truncation(wanted, self._model, request.stopping.max_tokens)

    async def _encode_conversation(self, truncation: Truncation) -> TokenIds:
        param = "conversation.messages"
        messages = [
            ChatMessage(role=message.role, content=message.content)
            for message in self._request.conversation.messages
        ]
        if not messages:
            raise RequestError(f"{param} is empty", param=param, code="empty_prompt")
        return await encode_chat(self._frontend, messages, param, truncation=truncation)

    def response(self, output: RequestOutput) -> pb.GenerateResponse | None:
        """The message for an output; None if it says nothing."""
        self._num_generated += len(output.token_ids)
        response = pb.GenerateResponse(
            request_id=self.request_id,
            text=output.text,
            tokens=self._tokens(output),
            prompt_tokens=self._prompt_tokens(output),
            **_stop_reason(output.stop_reason),
        )
        if output.finish_reason is not None:
            response.finish_reason = _FINISH_REASONS[output.finish_reason]
            response.usage.prompt_tokens = len(self._prompt)
            response.usage.completion_tokens = self._num_generated
            response.usage.cached_tokens = output.num_cached_tokens
            response.degraded = output.is_degraded
            self._add_experts(response, output)
        elif not (output.text or response.tokens or response.prompt_tokens):
            return None
        return response

    def _add_experts(self, response: pb.GenerateResponse, output: RequestOutput) -> None:
        if output.routed_experts is not None:
            skip = self._request.response.routed_experts_prompt_start
            experts_TLK = output.routed_experts[skip:].astype("<u2")
            response.routed_experts.experts = experts_TLK.tobytes()
            response.routed_experts.shape[:] = experts_TLK.shape

    def _prompt_tokens(self, output: RequestOutput) -> list[pb.PromptToken]:
        if output.prompt_logprobs is None:
            return []
        return [
            pb.PromptToken(
                token_id=token_id,
                token=self._spell(token_id),
                logprob=None if found is None else found.logprob,
                top_logprobs=[] if found is None else self._candidates(found),
            )
            for token_id, found in zip(self._prompt, output.prompt_logprobs, strict=True)
        ]

    def _tokens(self, output: RequestOutput) -> list[pb.GeneratedToken]:
        wanted = self._request.response
        if wanted.HasField("num_logprobs"):
            return [self._token(token) for token in output.logprobs]
        if wanted.return_token_ids:
            return [pb.GeneratedToken(token_id=token_id) for token_id in output.token_ids]
        return []

    def _token(self, token: TokenLogprobs) -> pb.GeneratedToken:
        return pb.GeneratedToken(
            token_id=token.token_id,
            token=self._spell(token.token_id),
            logprob=token.logprob,
            top_logprobs=self._candidates(token),
        )

    def _candidates(self, token: TokenLogprobs) -> list[pb.TokenCandidate]:
        return [
            pb.TokenCandidate(token_id=token_id, token=self._spell(token_id), logprob=logprob)
            for token_id, logprob in token.top
        ]

    def _spell(self, token_id: int) -> str:
        tokenizer = self._model.tokenizer
        return "" if tokenizer is None else tokenizer.token_text(token_id)


def _plain(value: object) -> object:
    """A field's value as JSON would have it."""
    if isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value


class _StopReason(TypedDict, total=False):
    stop_reason: str
    stop_token_id: int


def _stop_reason(reason: str | int | None) -> _StopReason:
    """A stop string and a stop token have fields of their own."""
    if reason is None:
        return {}
    return {"stop_reason": reason} if isinstance(reason, str) else {"stop_token_id": reason}


def expert_snapshot(mesh: MeshStatus) -> pb.WatchExpertsResponse:
    """The expert workers as a message."""
    return pb.WatchExpertsResponse(
        epoch=mesh.epoch,
        workers=[
            pb.ExpertWorkerInfo(
                worker_id=worker.worker_id,
                address=worker.address,
                state=str(worker.state),
                message=worker.message,
                num_experts=worker.num_experts,
            )
            for worker in mesh.workers
        ],
        uncovered=[
            pb.UncoveredExperts(layer=layer, experts=experts)
            for layer, experts in sorted(mesh.uncovered.items())
        ],
    )
