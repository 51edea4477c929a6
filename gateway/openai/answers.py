"""Outputs of the engine to the objects of the OpenAI API, whole or as chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.openai.logprobs import Json, chat_logprobs, prompt_logprobs
from gateway.openai.prompts import TokenIds
from gateway.openai.routed_experts import encode_routed_experts
from gateway.sequence import RequestOutput
from gateway.service import ServedModel


@dataclass(frozen=True)
class AnswerOptions:
    """What the client wants to see besides the text."""

    num_logprobs: int | None = None
    """None: no log probabilities; 0: without candidates."""
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    num_choices: int = 1
    """Choices for each prompt."""
    tokens_as_ids: bool = False
    """Tokens in log probabilities are spelled "token_id:N"."""
    prompt_logprobs: bool = False
    """Log probabilities of the prompt's tokens."""
    routed_experts_from: int | None = None
    """First token whose experts are returned; None: no experts."""
    skip_special_tokens: bool = True
    """Special tokens are not part of the text."""
    echo: bool = False
    """The text begins with the prompt."""
    prompt_only: bool = False
    """Nothing generated is shown."""

    @property
    def every_token(self) -> bool:
        """A chunk is sent even for tokens that add no text yet."""
        return self.num_logprobs is not None or self.return_token_ids or self.continuous_usage


class Answer(ABC):
    """The answer to one call: an object, or chunks that share its id.

    Args:
        answer_id: Id of the object.
        model: What is served.
        prompts: Token ids of each prompt. Choices are numbered prompt by prompt.
        options: What the client wants to see.
    """

    whole_object: str
    chunk_object: str

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        prompts: Sequence[TokenIds],
        options: AnswerOptions,
    ) -> None:
        self.answer_id = answer_id
        self.model = model
        self.prompts = prompts
        self.options = options
        self.num_choices = len(prompts) * options.num_choices
        self._created = int(time.time())
        self._num_generated = [0] * self.num_choices
        self._num_cached = [0] * len(prompts)
        self._started = [False] * self.num_choices

    def prompt_of(self, index: int) -> int:
        """Index of the prompt of a choice."""
        return index // self.options.num_choices

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The object, from the merged outputs of each choice."""
        outputs = [self._counted(index, output) for index, output in enumerate(outputs)]
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return {**self._head(self.whole_object), "choices": choices, "usage": self._usage()}

    def chunks(self, index: int, output: RequestOutput) -> list[Json]:
        """What a stream says about an output of a choice; may be nothing."""
        output = self._counted(index, output)
        choices = self._delta_choices(index, output, not self._started[index])
        self._started[index] |= bool(choices)
        return [self._chunk([choice]) for choice in choices]

    def usage_chunk(self) -> list[Json]:
        """The last chunk of a stream, if it was asked for."""
        if not self.options.include_usage:
            return []
        return [{**self._chunk([]), "usage": self._usage()}]

    def _counted(self, index: int, output: RequestOutput) -> RequestOutput:
        """What is shown of an output; counts it for the usage."""
        output = self._visible(output)
        self._num_generated[index] += len(output.token_ids)
        if index % self.options.num_choices == 0:  # the others find the prompt of the first
            self._num_cached[self.prompt_of(index)] = output.num_cached_tokens
        return output

    def _visible(self, output: RequestOutput) -> RequestOutput:
        """What is shown of an output."""
        return output

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput) -> Json:
        """A choice of the whole object."""

    @abstractmethod
    def _delta_choices(self, index: int, output: RequestOutput, first: bool) -> list[Json]:
        """Choices of the chunks for an output."""

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        if self.options.continuous_usage:
            chunk["usage"] = self._usage()
        elif self.options.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self, kind: str) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self._created,
            "model": self.model.name,
            "system_fingerprint": self.model.system_fingerprint,
        }

    def _usage(self) -> Json:
        num_prompt = sum(len(prompt) for prompt in self.prompts)
        num_generated = sum(self._num_generated)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def _extras(self, output: RequestOutput) -> Json:
        """What a choice has besides the fields of the OpenAI API, if it was asked for."""
        return {**self._token_ids(output), **self._ending(output)}

    def _token_ids(self, output: RequestOutput) -> Json:
        return {"token_ids": list(output.token_ids)} if self.options.return_token_ids else {}

    def _ending(self, output: RequestOutput) -> Json:
        """What it has only with its end: experts if asked for, and that some were left out."""
        is_told = output.is_degraded and output.finish_reason is not None
        return {**self._routed_experts(output), **({"degraded": True} if is_told else {})}

    def _routed_experts(self, output: RequestOutput) -> Json:
        """With the end of the choice."""
        skip, experts = self.options.routed_experts_from, output.routed_experts
        if skip is None or output.finish_reason is None:
            return {}
        if experts is None:
            return {"routed_experts": None}
        return {"routed_experts": encode_routed_experts(experts, self.model.config, skip=skip)}


class ChatAnswer(Answer):
    """Answer of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """As for every answer, with ids and log probabilities of the prompt if asked for."""
        answer = {**super().whole(outputs), **self._prompt_token_ids()}
        if self.options.prompt_logprobs:
            tokens = outputs[0].prompt_logprobs or ()
            answer["prompt_logprobs"] = prompt_logprobs(self.model.tokenizer, tokens)
        return answer

    def _choice(self, index: int, output: RequestOutput) -> Json:
        message: Json = {
            "role": "assistant",
            "content": output.text,
            "refusal": None,
            "annotations": [],
        }
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(index, output),
            "stop_reason": output.stop_reason,
            **self._extras(output),
        }

    def _delta_choices(self, index: int, output: RequestOutput, first: bool) -> list[Json]:
        deltas = self._deltas(index, output)
        if not deltas and output.token_ids and self.options.every_token:
            deltas = [{"content": ""}]
        choices = [_delta_choice(index, delta) for delta in deltas]
        if choices:  # the log probabilities are those of the tokens, not of what they say
            choices[0] |= {"logprobs": self._logprobs(output), **self._token_ids(output)}
        if first:
            choices.insert(0, _delta_choice(index, {"role": "assistant", "content": ""}))
        if output.finish_reason is not None:
            last = _delta_choice(index, {})
            last["finish_reason"] = self._finish_reason(index, output)
            choices.append({**last, "stop_reason": output.stop_reason, **self._ending(output)})
        return choices

    def _deltas(self, index: int, output: RequestOutput) -> list[Json]:
        """What an output adds to the message of a choice."""
        return [{"content": output.text}] if output.text else []

    def _finish_reason(self, index: int, output: RequestOutput) -> str | None:
        """Why a choice ended; None if it goes on."""
        return output.finish_reason

    def chunks(self, index: int, output: RequestOutput) -> list[Json]:
        """As for every answer; the first chunk also has the token ids of the prompt."""
        first = not self._started[index]
        chunks = super().chunks(index, output)
        if first:
            chunks[0].update(self._prompt_token_ids())
        return chunks

    def _prompt_token_ids(self) -> Json:
        return {"prompt_token_ids": list(self.prompts[0])} if self.options.return_token_ids else {}

    def _logprobs(self, output: RequestOutput) -> Json | None:
        if self.options.num_logprobs is None:
            return None
        as_ids = self.options.tokens_as_ids
        return chat_logprobs(self.model.tokenizer, output.logprobs, as_ids=as_ids)


def _delta_choice(index: int, delta: Json) -> Json:
    """A choice of a chunk."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
