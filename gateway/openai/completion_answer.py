"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.openai.answers import Answer, AnswerOptions
from gateway.openai.logprobs import Json, TextOffsets, completion_logprobs, prompt_logprobs
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
        self._offsets = [self._output_offsets(index) for index in range(self.num_choices)]

    def _output_offsets(self, index: int) -> TextOffsets:
        return TextOffsets(
            self.model.tokenizer,
            start=len(self._texts[self.prompt_of(index)]) if self.options.echo else 0,
            skip_special_tokens=self.options.skip_special_tokens,
        )

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
        tokenizer = self.model.tokenizer
        tokens: list[tuple[int, TokenLogprobs | None]] = []
        offsets: list[int] = []
        if echo:
            tokens, offsets = self._prompt_tokens(self.prompt_of(index), output)
        tokens += [(found.token_id, found) for found in output.logprobs]
        offsets += [self._offsets[index].next(found.token_id) for found in output.logprobs]
        as_ids = self.options.tokens_as_ids
        return completion_logprobs(tokenizer, tokens, offsets, as_ids=as_ids)

    def _prompt_tokens(
        self, prompt: int, output: RequestOutput
    ) -> tuple[list[tuple[int, TokenLogprobs | None]], list[int]]:
        """Tokens of the prompt, and where they begin in the text."""
        token_ids, text = self.prompts[prompt], self._texts[prompt]
        found = output.prompt_logprobs or (None,) * len(token_ids)
        tokenizer = self.model.tokenizer
        # Those that the tokenizer added are not in the text, those that the client wrote are.
        skip = tokenizer is not None and tokenizer.decode(token_ids, False) != text
        offsets = TextOffsets(tokenizer, skip_special_tokens=skip)
        starts = [min(offsets.next(token_id), len(text)) for token_id in token_ids]
        return list(zip(token_ids, found, strict=True)), starts
