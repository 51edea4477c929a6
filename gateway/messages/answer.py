"""The message object of /v1/messages, and the events from which a client can build it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gateway.messages.errors import MessagesError
from gateway.openai.chat_call import ChatCall
from gateway.openai.errors import ApiError
from gateway.openai.logprobs import Json
from gateway.sequence import FinishReason, RequestOutput
from gateway.tools.events import CallArguments, CallStart, Event, TextDelta


@dataclass
class _Block:
    """A block of the content: text, or a call if it has an id."""

    text: str = ""
    """The text, or the arguments of the call."""
    call_id: str = ""
    name: str = ""

    def begun(self) -> Json:
        """The block before anything is in it."""
        if self.call_id:
            block = {"type": "tool_use", "id": self.call_id, "name": self.name, "input": {}}
            return {**block, "caller": {"type": "direct"}}
        return {"type": "text", "text": "", "citations": None}

    def shown(self) -> Json:
        """The whole block."""
        if self.call_id:
            return {**self.begun(), "input": _input_of(self.text)}
        return {**self.begun(), "text": self.text}

    def delta(self, text: str) -> Json:
        """More of it."""
        if self.call_id:
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": "text_delta", "text": text}


def _input_of(text: str) -> object:
    """Arguments as an object; empty if a model did not finish them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class MessagesAnswer:
    """One message, as it grows.

    Args:
        message_id: Its id.
        call: The chat request.
    """

    def __init__(self, message_id: str, call: ChatCall) -> None:
        self._message_id = message_id
        self._call = call
        self._reader = call.reader()
        self._blocks: list[_Block] = []
        self._num_generated = 0
        self._num_cached = 0
        self._started = False
        self._stop = _stop_fields(None)

    def push(self, output: RequestOutput) -> list[Json]:
        """What a step adds."""
        self._num_cached = output.num_cached_tokens
        events = self._start()
        self._num_generated += len(output.token_ids)
        found = self._reader.push(output.text)
        if output.finish_reason is not None:
            found += self._reader.finish()
        for event in found:
            events += self._take(event)
        return events if output.finish_reason is None else [*events, *self._finish(output)]

    def whole(self) -> Json:
        """The message object."""
        return self._message()

    def keep_alive(self) -> list[Json]:
        """A ping."""
        return [{"type": "ping"}]

    def fail(self, error: ApiError) -> list[Json]:
        """The last event of a stream that failed."""
        return [MessagesError.of(error).event()]

    def _start(self) -> list[Json]:
        if self._started:
            return []
        self._started = True
        return [{"type": "message_start", "message": self._message()}, {"type": "ping"}]

    def _take(self, event: Event) -> list[Json]:
        match event:
            case TextDelta():
                is_text = self._blocks and not self._blocks[-1].call_id
                events = [] if is_text else self._begin(_Block())
                return [*events, self._delta(event.text)]
            case CallStart():
                return self._begin(_Block(call_id=_tool_use_id(event.call_id), name=event.name))
            case CallArguments():
                return [self._delta(event.text)]

    def _begin(self, block: _Block) -> list[Json]:
        events = self._close()
        self._blocks.append(block)
        index = len(self._blocks) - 1
        start: Json = {
            "type": "content_block_start",
            "index": index,
            "content_block": block.begun(),
        }
        return [*events, start]

    def _close(self) -> list[Json]:
        if not self._blocks:
            return []
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, text: str) -> Json:
        block = self._blocks[-1]
        block.text += text
        index = len(self._blocks) - 1
        return {"type": "content_block_delta", "index": index, "delta": block.delta(text)}

    def _finish(self, output: RequestOutput) -> list[Json]:
        events = self._close()
        self._stop = _stop(output, calls=self._reader.num_calls > 0)
        end: Json = {"type": "message_delta", "delta": self._stop, "usage": self._usage()}
        return [*events, end, {"type": "message_stop"}]

    def _message(self) -> Json:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model.name,
            "content": [block.shown() for block in self._blocks],
            **self._stop,
            "usage": {
                **self._usage(),
                "cache_creation": None,
                "inference_geo": None,
                "service_tier": "standard",
            },
        }

    def _usage(self) -> Json:
        """Tokens that the prefix cache had do not count as input here."""
        return {
            "input_tokens": len(self._call.prompt) - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_generated,
            "output_tokens_details": {"thinking_tokens": 0},
            "server_tool_use": None,
        }


def _tool_use_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id


def _stop(output: RequestOutput, *, calls: bool) -> Json:
    if output.finish_reason is FinishReason.LENGTH:
        return _stop_fields("max_tokens")
    if calls:
        return _stop_fields("tool_use")
    if isinstance(output.stop_reason, str):
        return _stop_fields("stop_sequence", output.stop_reason)
    return _stop_fields("end_turn")


def _stop_fields(reason: str | None, sequence: str | None = None) -> Json:
    return {
        "stop_reason": reason,
        "stop_sequence": sequence,
        "stop_details": None,
        "container": None,
    }
