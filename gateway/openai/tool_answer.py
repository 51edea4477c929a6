"""Answers of /v1/chat/completions to requests with tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.openai.answers import AnswerOptions, ChatAnswer
from gateway.openai.logprobs import Json
from gateway.openai.prompts import TokenIds
from gateway.sequence import FinishReason, RequestOutput
from gateway.service import ServedModel
from gateway.tools.events import CallArguments, CallStart, Event, TextDelta, ToolCall, collect
from gateway.tools.readers import Reader


class ToolChatAnswer(ChatAnswer):
    """A chat answer with the tool calls that its text holds.

    Args:
        answer_id, model, prompts, options: As for every answer.
        make_reader: Makes what reads the text of a choice.
    """

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        prompts: Sequence[TokenIds],
        options: AnswerOptions,
        make_reader: Callable[[], Reader],
    ) -> None:
        super().__init__(answer_id, model, prompts, options)
        self._readers = [make_reader() for _ in range(self.num_choices)]

    def _choice(self, index: int, output: RequestOutput) -> Json:
        reader = self._readers[index]
        found = collect([*reader.push(output.text), *reader.finish()])
        message: Json = {
            "role": "assistant",
            "content": found.content or (None if found.calls else ""),
            "refusal": None,
            "annotations": [],
        }
        if found.calls:
            message["tool_calls"] = [call_json(call) for call in found.calls]
        return {**super()._choice(index, output), "message": message}

    def _deltas(self, index: int, output: RequestOutput) -> list[Json]:
        reader = self._readers[index]
        events = reader.push(output.text)
        if output.finish_reason is not None:
            events += reader.finish()
        return [_delta(event) for event in events]

    def _finish_reason(self, index: int, output: RequestOutput) -> str | None:
        return finish_reason(output.finish_reason, self._readers[index])


def finish_reason(reason: FinishReason | None, reader: Reader) -> str | None:
    """Why an answer ended: "tool_calls" if it ended by itself and has some."""
    return "tool_calls" if reason is FinishReason.STOP and reader.num_calls else reason


def call_json(call: ToolCall) -> Json:
    """A whole tool call."""
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _delta(event: Event) -> Json:
    match event:
        case TextDelta():
            return {"content": event.text}
        case CallStart():
            call = {"index": event.index, **call_json(ToolCall(event.call_id, event.name))}
        case CallArguments():
            call = {"index": event.index, "function": {"arguments": event.text}}
    return {"tool_calls": [call]}
