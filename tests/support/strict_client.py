"""A client that believes nothing: every answer, chunk and error is checked before a test sees it.

Checked are the published schema and, beside it, what the schema cannot say: the framing of event
streams, that chunks of a stream belong together, that usage adds up, the headers.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from tests.support import api_schema
from tests.support.api import Answer, Api, Json

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
CONTEXT_LEN = 2048
"""Tokens that the tiny model of these tests takes."""
JSON_TYPE = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class RawStream:
    """An event stream as it came."""

    headers: Mapping[str, str]
    events: Sequence[tuple[str | None, str]]
    """(name, data) in order; comments are left out."""
    num_comments: int


class StrictClient:
    """Calls one server.

    Args:
        api: The server.
        headers: Sent with every call, e.g. a key.
    """

    def __init__(self, api: Api, headers: Mapping[str, str] | None = None) -> None:
        self.api = api
        self.headers = {**JSON_TYPE, **(headers or {})}

    def post(self, path: str, body: Json, **headers: str) -> Answer:
        """POST of a JSON value; any answer."""
        data = json.dumps(body).encode()
        return self.api.request("POST", path, data, {**self.headers, **headers})

    def chat(self, **fields: Json) -> Json:
        """A whole chat answer."""
        answer = self.ok(CHAT, chat_body(**fields))
        api_schema.check_chat(answer)
        _check_whole(answer, "chatcmpl-")
        for choice in answer["choices"]:
            assert choice["message"]["annotations"] == []
        return answer

    def complete(self, prompt: Json = "The quick brown", **fields: Json) -> Json:
        """A whole answer of /v1/completions."""
        answer = self.ok(TEXT, text_body(prompt, **fields))
        api_schema.check_completion(answer)
        _check_whole(answer, "cmpl-")
        return answer

    def chat_stream(self, **fields: Json) -> list[Json]:
        """Chunks of a streamed chat answer."""
        chunks = self.chunks(CHAT, chat_body(**fields))
        for chunk in chunks:
            api_schema.check_chat_chunk(chunk)
            assert chunk["object"] == "chat.completion.chunk"
        _check_chunks(chunks, "chatcmpl-", fields)
        _check_roles(chunks)
        return chunks

    def text_stream(self, prompt: Json = "The quick brown", **fields: Json) -> list[Json]:
        """Chunks of a streamed answer of /v1/completions."""
        chunks = self.chunks(TEXT, text_body(prompt, **fields))
        for chunk in chunks:
            api_schema.check_completion_chunk(chunk)
        _check_chunks(chunks, "cmpl-", fields)
        return chunks

    def ok(self, path: str, body: Json) -> Json:
        """JSON of an answer that must be 200."""
        answer = self.post(path, body)
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.headers["x-request-id"]
        return answer.json

    def refused(self, path: str, body: Json, status: int = 400) -> Json:
        """The error object of a call that must fail."""
        return error_of(self.post(path, body), status)

    def chunks(self, path: str, body: Json) -> list[Json]:
        """Chunks of a stream in the OpenAI style: no names, [DONE] at the end."""
        stream = self.stream(path, {**body, "stream": True})
        names = {name for name, _ in stream.events}
        assert names <= {None}, f"named events: {names}"
        data = [data for _, data in stream.events]
        assert data[-1] == "[DONE]", data[-1]
        assert data.count("[DONE]") == 1
        return [json.loads(text) for text in data[:-1]]

    def stream(self, path: str, body: Json) -> RawStream:
        """An event stream of any kind, to its end."""
        with closing(self.api.connect()) as connection:
            connection.request("POST", path, json.dumps(body).encode(), self.headers)
            response = connection.getresponse()
            raw = response.read()
            assert response.status == 200, raw
            return _parse_stream(response, raw)


def _parse_stream(response: http.client.HTTPResponse, raw: bytes) -> RawStream:
    headers = {name.lower(): value for name, value in response.getheaders()}
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"]
    text = raw.decode("utf-8")
    assert text.endswith("\n\n"), "the last event is cut"
    blocks = text.removesuffix("\n\n").split("\n\n")
    events = [_parse_event(block) for block in blocks if not block.startswith(":")]
    return RawStream(headers, events, len(blocks) - len(events))


def _parse_event(block: str) -> tuple[str | None, str]:
    """Either `data: X`, or `event: NAME` and `data: X`."""
    *head, data = block.split("\n")
    assert data.startswith("data: "), f"not an event: {block!r}"
    assert len(head) <= 1, f"too many lines: {block!r}"
    if head:
        assert head[0].startswith("event: "), f"not an event: {block!r}"
    name = head[0].removeprefix("event: ") if head else None
    return name, data.removeprefix("data: ")


def error_of(answer: Answer, status: int) -> Json:
    """The error object of an answer with this status, whose envelope is checked."""
    assert answer.status == status, (answer.status, answer.body)
    assert answer.headers["content-type"].startswith("application/json"), answer.headers
    assert answer.headers["x-request-id"]
    api_schema.check_error(answer.json)
    if status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1
    return answer.error


def chat_body(**fields: Json) -> Json:
    """A short greedy chat request; `fields` add to it or replace."""
    return {"messages": HELLO, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


def text_body(prompt: Json, **fields: Json) -> Json:
    """A short greedy request of /v1/completions."""
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


def check_usage(usage: Json) -> None:
    """Usage adds up and has its details."""
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= cached <= usage["prompt_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def _check_whole(answer: Json, prefix: str) -> None:
    assert answer["id"].startswith(prefix)
    assert abs(time.time() - answer["created"]) < 3600
    assert answer["system_fingerprint"]
    check_usage(answer["usage"])
    indices = [choice["index"] for choice in answer["choices"]]
    assert indices == list(range(len(indices)))


def _check_chunks(chunks: Sequence[Json], prefix: str, fields: Mapping[str, Json]) -> None:
    """Chunks of one stream belong together, and each choice ends once, with its last chunk."""
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in chunks}) == 1, name
    assert chunks[0]["id"].startswith(prefix)
    ended: set[int] = set()
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        assert choice["index"] not in ended, "a choice goes on after its end"
        if choice["finish_reason"] is not None:
            ended.add(choice["index"])
    assert ended == {choice["index"] for chunk in chunks for choice in chunk["choices"]}
    _check_stream_usage(chunks, fields.get("stream_options") or {})


def _check_stream_usage(chunks: Sequence[Json], options: Mapping[str, Json]) -> None:
    """`include_usage`: null in all chunks but one more at the end, which has no choices."""
    every = bool(options.get("continuous_usage_stats"))
    if options.get("include_usage"):
        assert chunks[-1]["choices"] == []
        check_usage(chunks[-1]["usage"])
        assert all(every or chunk["usage"] is None for chunk in chunks[:-1])
        chunks = chunks[:-1]
    assert all(chunk["choices"] for chunk in chunks)
    if every:
        totals = [chunk["usage"]["total_tokens"] for chunk in chunks]
        assert totals == sorted(totals)
    elif not options.get("include_usage"):
        assert all(chunk.get("usage") is None for chunk in chunks)


def _check_roles(chunks: Sequence[Json]) -> None:
    """The first delta of each choice names the role, no other does; the last adds nothing."""
    seen: set[int] = set()
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        first = choice["index"] not in seen
        assert ("role" in choice["delta"]) == first, choice
        if first:
            assert choice["delta"]["role"] == "assistant"
        seen.add(choice["index"])


def joined_chat(chunks: Sequence[Json], index: int = 0) -> tuple[str, str]:
    """Content and finish reason of a choice of a streamed chat answer."""
    choices = _of(chunks, index)
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, choices[-1]["finish_reason"]


def joined_text(chunks: Sequence[Json], index: int = 0) -> tuple[str, str]:
    """Text and finish reason of a choice of a streamed answer of /v1/completions."""
    choices = _of(chunks, index)
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def joined_tokens(chunks: Sequence[Json], index: int = 0) -> list[int]:
    """Token ids of a choice of a stream."""
    return [token for choice in _of(chunks, index) for token in choice.get("token_ids") or ()]


def _of(chunks: Sequence[Json], index: int) -> list[Json]:
    found = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    assert found, f"no choice {index}"
    return found
