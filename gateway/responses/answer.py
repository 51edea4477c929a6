"""The response object of /v1/responses, and the events from which a client can build it."""

from __future__ import annotations

import time

from gateway.openai.chat_call import ChatCall
from gateway.openai.errors import ApiError
from gateway.openai.logprobs import Json
from gateway.responses.items import CallItem, Item, MessageItem
from gateway.responses.request import ResponseRequest
from gateway.sequence import FinishReason, RequestOutput
from gateway.tools.events import CallArguments, CallStart, Event, TextDelta


class ResponseAnswer:
    """One response, as it grows.

    Args:
        response_id: Its id.
        request: What the client sent.
        call: The chat request that it became.
    """

    def __init__(self, response_id: str, request: ResponseRequest, call: ChatCall) -> None:
        self._request = request
        self._call = call
        self._reader = call.reader()
        self._items: list[Item] = []
        self._open: Item | None = None
        """The item that is being written; the last of the items."""
        self._sequence_number = 0
        self._num_generated = 0
        self._num_cached = 0
        self._started = False
        self._head: Json = {"id": response_id, "created_at": int(time.time())}
        self._end: Json = {
            "status": "in_progress",
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
        }

    def push(self, output: RequestOutput) -> list[Json]:
        """What a step adds."""
        self._num_generated += len(output.token_ids)
        self._num_cached = output.num_cached_tokens
        events = self._start()
        found = self._reader.push(output.text)
        if output.finish_reason is not None:
            found += self._reader.finish()
        for event in found:
            events += self._take(event)
        if output.finish_reason is not None:
            events += self._finish(output.finish_reason)
        return events

    def whole(self) -> Json:
        """The response object."""
        return self._response()

    def keep_alive(self) -> list[Json]:
        """There is no event for it."""
        return []

    def fail(self, error: ApiError) -> list[Json]:
        """The last event of a stream that failed."""
        self._end |= {
            "status": "failed",
            "error": {"code": error.code or "server_error", "message": error.message},
        }
        return [self._event("response.failed", {"response": self._response()})]

    def _start(self) -> list[Json]:
        if self._started:
            return []
        self._started = True
        return [
            self._event(f"response.{name}", {"response": self._response()})
            for name in ("created", "in_progress")
        ]

    def _take(self, event: Event) -> list[Json]:
        match event:
            case TextDelta():
                return self._text(event.text)
            case CallStart():
                return self._begin_call(CallItem(event.call_id, event.name))
            case CallArguments():
                return self._arguments(event.text)

    def _text(self, text: str) -> list[Json]:
        events: list[Json] = []
        if not isinstance(self._open, MessageItem):
            events = self._begin_message(MessageItem())
        assert isinstance(self._open, MessageItem), "just begun"
        self._open.text += text
        if text:
            delta = {"content_index": 0, "delta": text, "logprobs": []}
            events.append(self._of_item("response.output_text.delta", delta))
        return events

    def _arguments(self, text: str) -> list[Json]:
        assert isinstance(self._open, CallItem), "a call begins before its arguments"
        self._open.arguments += text
        return [self._of_item("response.function_call_arguments.delta", {"delta": text})]

    def _begin_message(self, item: MessageItem) -> list[Json]:
        events = self._begin(item, item.shown(empty=True))
        part = {"content_index": 0, "part": item.part()}
        return [*events, self._of_item("response.content_part.added", part)]

    def _begin_call(self, item: CallItem) -> list[Json]:
        return self._begin(item, item.shown())

    def _begin(self, item: Item, shown: Json) -> list[Json]:
        events = self._close()
        self._items.append(item)
        self._open = item
        added = {"output_index": len(self._items) - 1, "item": shown}
        return [*events, self._event("response.output_item.added", added)]

    def _close(self, status: str = "completed") -> list[Json]:
        item = self._open
        if item is None:
            return []
        item.status = status
        match item:
            case MessageItem():
                events = self._closing_message(item)
            case CallItem():
                done: Json = {"name": item.name, "arguments": item.arguments}
                events = [self._of_item("response.function_call_arguments.done", done)]
        self._open = None
        done = {"output_index": len(self._items) - 1, "item": item.shown()}
        return [*events, self._event("response.output_item.done", done)]

    def _closing_message(self, item: MessageItem) -> list[Json]:
        text: Json = {"content_index": 0, "text": item.text, "logprobs": []}
        part: Json = {"content_index": 0, "part": item.part()}
        return [
            self._of_item("response.output_text.done", text),
            self._of_item("response.content_part.done", part),
        ]

    def _finish(self, reason: FinishReason) -> list[Json]:
        events = [] if self._items else self._text("")
        if reason is FinishReason.LENGTH:
            events += self._close("incomplete")
            self._end["status"] = "incomplete"
            self._end["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            events += self._close()
            self._end["status"] = "completed"
            self._end["completed_at"] = int(time.time())
        name = f"response.{self._end['status']}"
        return [*events, self._event(name, {"response": self._response()})]

    def _of_item(self, name: str, fields: Json) -> Json:
        assert self._open is not None, "called with an open item"
        index = len(self._items) - 1
        return self._event(name, {"item_id": self._open.item_id, "output_index": index, **fields})

    def _event(self, name: str, fields: Json) -> Json:
        event = {"type": name, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event

    def _response(self) -> Json:
        """The response as it is now; every key is there, whatever the request had."""
        return {
            **self._head,
            "object": "response",
            **self._end,
            "model": self._call.model.name,
            "output": [item.shown() for item in self._items],
            "usage": None if self._end["status"] in ("in_progress", "failed") else self._usage(),
            "store": False,
            "background": False,
            "previous_response_id": None,
            "conversation": None,
            "prompt": None,
            "max_tool_calls": None,
            "service_tier": "default",
            "top_logprobs": 0,
            "truncation": "disabled",
            "prompt_cache_retention": None,
            **self._echoed(),
        }

    def _echoed(self) -> Json:
        """What the client asked for, with defaults."""
        request, chat = self._request, self._call.body
        return {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": self._call.tools.parallel,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})},
            "safety_identifier": request.safety_identifier,
            "temperature": 1.0 if chat.temperature is None else chat.temperature,
            "top_p": 1.0 if chat.top_p is None else chat.top_p,
            "presence_penalty": chat.presence_penalty or 0.0,
            "frequency_penalty": chat.frequency_penalty or 0.0,
            "text": {
                "format": _format_shown(request.text.format if request.text else None),
                "verbosity": (request.text.verbosity if request.text else None) or "medium",
            },
            "tools": _tools_shown(self._request.tools),
            "tool_choice": request.tool_choice or "auto",
            "user": request.user,
        }

    def _usage(self) -> Json:
        num_prompt = len(self._call.prompt)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached},
            "output_tokens": self._num_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + self._num_generated,
        }


def _format_shown(wanted: object) -> Json:
    if not isinstance(wanted, dict):
        return {"type": "text"}
    if wanted["type"] == "json_schema":
        return {"description": None, **wanted, "strict": wanted.get("strict") is not False}
    return wanted


def _tools_shown(tools: object) -> list[Json]:
    shown: Json = {"description": None, "parameters": None, "strict": None}
    return [{**shown, **tool} for tool in tools] if isinstance(tools, list) else []
