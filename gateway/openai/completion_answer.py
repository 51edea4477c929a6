"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.openai.answers import Answer, AnswerOptions
from gateway.openai.logprobs import Json, completion_logprobs, prompt_logprobs
from gateway.openai.prompts import TextPrompt
from gateway.sequence import FinishReason, RequestOutput, TokenLogprobs
from gateway.service import ServedModel


class CompletionAnswer(Answer):
    """Answer of /v1/completions.

    Args:
        answer_id: Id of the object.
        model: What is served.
        prompts: The prompts, with the texts to echo.
        options: What the client wants to see.
    """

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        prompts: Sequence[TextPrompt],
        options: AnswerOptions,
    ) -> None:
        super().__init__(answer_id, model, [prompt.token_ids for prompt in prompts], options)
        self._texts = [prompt.text for prompt in prompts]
        self._offsets = [0] * self.num_choices

    def _visible(self, output: RequestOutput) -> RequestOutput:
        """Without the one token that is generated though none was asked for."""
        if not self.options.prompt_only:
            return output
        experts = output.routed_experts
        return replace(
            output,
            text="",
            token_ids=(),
            logprobs=(),
            finish_reason=output.finish_reason and FinishReason.LENGTH,
            stop_reason=None,
            routed_experts=None if experts is None else experts[:-1],
        )

    def _choice(self, index: int, output: RequestOutput) -> Json:
        return self._text_choice(index, output, first=True)

    def _delta_choices(self, index: int, output: RequestOutput, first: bool) -> list[Json]:
        says_something = output.text or output.finish_reason is not None
        says_something = says_something or (first and self.options.echo)
        if not says_something and not (output.token_ids and self.options.every_token):
            return []
        return [self._text_choice(index, output, first=first)]

    def _text_choice(self, index: int, output: RequestOutput, *, first: bool) -> Json:
        echo = first and self.options.echo
        choice: Json = {
            "index": index,
            "text": (self._texts[self.prompt_of(index)] if echo else "") + output.text,
            "logprobs": self._logprobs(index, output, echo=echo),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **self._extras(output),
        }
        if self.options.return_token_ids and first:
            choice["prompt_token_ids"] = list(self.prompts[self.prompt_of(index)])
        if self.options.prompt_logprobs:
            tokens = output.prompt_logprobs or ()
            choice["prompt_logprobs"] = prompt_logprobs(self.model.tokenizer, tokens)
        return choice

    def _logprobs(self, index: int, output: RequestOutput, *, echo: bool) -> Json | None:
        if self.options.num_logprobs is None:
            return None
        logprobs, self._offsets[index] = completion_logprobs(
            self.model.tokenizer,
            output.logprobs,
            offset=self._offsets[index],
            prompt=self._prompt_tokens(index, output) if echo else (),
            as_ids=self.options.tokens_as_ids,
        )
        return logprobs

    def _prompt_tokens(
        self, index: int, output: RequestOutput
    ) -> list[tuple[int, TokenLogprobs | None]]:
        token_ids = self.prompts[self.prompt_of(index)]
        found = output.prompt_logprobs or (None,) * len(token_ids)
        return list(zip(token_ids, found, strict=True))
