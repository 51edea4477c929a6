"""One Generate call: from the request to a prompt for the engine, and from outputs to responses."""

from __future__ import annotations

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
from gateway.mesh_status import MeshStatus
from gateway.openai.prompts import TokenIds, encode_chat, encode_text
from gateway.openai.schema import ChatMessage, check_model
from gateway.option_checks import check_options
from gateway.sequence import FinishReason, RequestOutput, TokenLogprobs
from gateway.service import GenerationFrontend, Prompt

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


class _Options(GenerationOptions, kw_only=True):
    """The options of both APIs, and the log probabilities."""

    num_logprobs: NumLogprobs | None = None


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
        self._num_prompt_tokens = 0
        self._num_generated = 0

    async def prepare(self) -> Prompt:
        """The prompt for the engine.

        Raises:
            RequestError: Names the field that is wrong.
        """
        check_model(self._request.model or None, self._model)
        options = self._options()
        token_ids, param = await self._encode()
        self._num_prompt_tokens = len(token_ids)
        limit = OutputLimit(options.max_tokens, None, "stopping.max_tokens", param)
        max_tokens = limit.resolve(len(token_ids), self._model.max_model_len)
        params = sampling_params(options, max_tokens=max_tokens, num_logprobs=options.num_logprobs)
        return Prompt(self.request_id, token_ids, params)

    def _options(self) -> _Options:
        """The options that are present; paths in errors are those of the message."""
        groups = ("sampling", "stopping", "response")
        group_of_field: dict[str, str] = {}
        fields: dict[str, object] = {}
        for group in groups:
            for descriptor, value in getattr(self._request, group).ListFields():
                group_of_field[descriptor.name] = group
                fields[descriptor.name] = list(value) if descriptor.name == "stop" else value
        try:
            options = convert(fields, _Options)
            check_options(options, self._model.bounds)
        except RequestError as error:
            name = (error.param or "").partition(".")[0]
            error.param = f"{group_of_field.get(name, '')}.{error.param}".lstrip(".")
            raise
        return options

    async def _encode(self) -> tuple[TokenIds, str]:
        """Token ids of the prompt, and the field that it came from."""
        request = self._request
        kind = request.WhichOneof("input")
        match kind:
            case "prompt":
                return await encode_text(self._frontend, request.prompt, kind), kind
            case "prompt_token_ids":
                vocab_size = self._model.config.vocab_size
                return check_token_ids(request.prompt_token_ids.ids, vocab_size, kind), kind
            case "conversation":
                return await self._encode_conversation(), kind
            case None:
                raise RequestError(
                    "input is missing; expected one of prompt, prompt_token_ids, conversation",
                    param="input",
                )
            case _:
                assert_never(kind)

    async def _encode_conversation(self) -> TokenIds:
        param = "conversation.messages"
        messages = [
            ChatMessage(role=message.role, content=message.content)
            for message in self._request.conversation.messages
        ]
        if not messages:
            raise RequestError(f"{param} is empty", param=param, code="empty_prompt")
        return await encode_chat(self._frontend, messages, param)

    def response(self, output: RequestOutput) -> pb.GenerateResponse | None:
        """The message for an output; None if it says nothing."""
        self._num_generated += len(output.token_ids)
        tokens = self._tokens(output)
        if output.finish_reason is None and not output.text and not tokens:
            return None
        response = pb.GenerateResponse(
            request_id=self.request_id,
            text=output.text,
            tokens=tokens,
            **_stop_reason(output.stop_reason),
        )
        if output.finish_reason is not None:
            response.finish_reason = _FINISH_REASONS[output.finish_reason]
            response.usage.prompt_tokens = self._num_prompt_tokens
            response.usage.completion_tokens = self._num_generated
        return response

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
            top_logprobs=[
                pb.TokenCandidate(token_id=token_id, token=self._spell(token_id), logprob=logprob)
                for token_id, logprob in token.top
            ],
        )

    def _spell(self, token_id: int) -> str:
        tokenizer = self._model.tokenizer
        return "" if tokenizer is None else tokenizer.token_text(token_id)


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
