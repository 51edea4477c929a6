"""Outputs of the engine to the objects of the OpenAI API, whole or as chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.openai.logprobs import Json, chat_logprobs, completion_logprobs
from gateway.openai.prompts import TokenIds
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

    @property
    def every_token(self) -> bool:
        """A chunk is sent even for tokens that add no text yet."""
        return self.num_logprobs is not None or self.return_token_ids or self.continuous_usage


class Answer(ABC):
    """The answer to one call: an object, or chunks that share its id.

    Args:
        answer_id: Id of the object.
        model: What is served.
        prompts: Token ids of each prompt; one choice each.
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
        self._created = int(time.time())
        self._num_generated = [0] * len(prompts)
        self._started = [False] * len(prompts)

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The object, from the merged outputs of each prompt."""
        for index, output in enumerate(outputs):
            self._num_generated[index] = len(output.token_ids)
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return {**self._head(self.whole_object), "choices": choices, "usage": self._usage()}

    def chunks(self, index: int, output: RequestOutput) -> list[Json]:
        """What a stream says about an output of a prompt; may be nothing."""
        self._num_generated[index] += len(output.token_ids)
        choices = self._delta_choices(index, output, not self._started[index])
        self._started[index] |= bool(choices)
        return [self._chunk([choice]) for choice in choices]

    def usage_chunk(self) -> list[Json]:
        """The last chunk of a stream, if it was asked for."""
        if not self.options.include_usage:
            return []
        return [{**self._chunk([]), "usage": self._usage()}]

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
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def _token_ids(self, output: RequestOutput) -> Json:
        return {"token_ids": list(output.token_ids)} if self.options.return_token_ids else {}


class ChatAnswer(Answer):
    """Answer of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """As for every answer, with the token ids of the prompt if asked for."""
        return {**super().whole(outputs), **self._prompt_token_ids()}

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
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **self._token_ids(output),
        }

    def _delta_choices(self, index: int, output: RequestOutput, first: bool) -> list[Json]:
        choices = []
        if first:
            choices.append(_delta_choice(index, {"role": "assistant", "content": ""}))
        if output.text or (output.token_ids and self.options.every_token):
            content = _delta_choice(index, {"content": output.text})
            content["logprobs"] = self._logprobs(output)
            choices.append({**content, **self._token_ids(output)})
        if output.finish_reason is not None:
            last = _delta_choice(index, {})
            last["finish_reason"] = output.finish_reason
            choices.append({**last, "stop_reason": output.stop_reason})
        return choices

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
        return chat_logprobs(self.model.tokenizer, output.logprobs)


def _delta_choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionAnswer(Answer):
    """Answer of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        prompts: Sequence[TokenIds],
        options: AnswerOptions,
    ) -> None:
        super().__init__(answer_id, model, prompts, options)
        self._offsets = [0] * len(prompts)

    def _choice(self, index: int, output: RequestOutput) -> Json:
        return self._text_choice(index, output, with_prompt=True)

    def _delta_choices(self, index: int, output: RequestOutput, first: bool) -> list[Json]:
        says_something = output.text or output.finish_reason is not None
        if not says_something and not (output.token_ids and self.options.every_token):
            return []
        return [self._text_choice(index, output, with_prompt=first)]

    def _text_choice(self, index: int, output: RequestOutput, *, with_prompt: bool) -> Json:
        choice: Json = {
            "index": index,
            "text": output.text,
            "logprobs": self._logprobs(index, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **self._token_ids(output),
        }
        if self.options.return_token_ids and with_prompt:
            choice["prompt_token_ids"] = list(self.prompts[index])
        return choice

    def _logprobs(self, index: int, output: RequestOutput) -> Json | None:
        if self.options.num_logprobs is None:
            return None
        logprobs, self._offsets[index] = completion_logprobs(
            self.model.tokenizer,
            output.logprobs,
            num_top=self.options.num_logprobs,
            offset=self._offsets[index],
        )
        return logprobs
