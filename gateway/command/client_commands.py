"""`expertmesh chat` and `expertmesh complete`: clients of a running server.

They speak the OpenAI API over HTTP with streaming, and only need the standard library. The
text goes to standard output, a line with the times to standard error.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from expertmesh.errors import PeerError, StartupError

_TIMEOUT_S = 300.0
"""Between two chunks: before the first one a long prompt is computed."""
_MAX_LINE_BYTES = 1_048_576

Message = dict[str, str]


@dataclass(frozen=True)
class ClientOptions:
    """Where to ask, and how the answer is generated."""

    url: str
    """Address of the HTTP API, without a path."""
    model: str | None = None
    """None: the first one that the server lists."""
    max_tokens: int = 512
    temperature: float | None = None
    """None: the server's default."""
    seed: int | None = None
    api_key: str | None = field(default=None, repr=False)
    context: ssl.SSLContext | None = field(default=None, repr=False)
    """Whom to trust; by default whom the system does, or SSL_CERT_FILE names."""
    timeout_s: float = _TIMEOUT_S
    """Between two pieces of an answer."""


@dataclass
class Timing:
    """When tokens arrived; seconds of time.monotonic()."""

    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0

    def saw_text(self) -> None:
        """A chunk with text has arrived."""
        self.last_s = time.monotonic()
        if self.first_s is None:
            self.first_s = self.last_s

    def __str__(self) -> str:
        """E.g. `TTFT 212 ms, 45 tokens, 13.2 tok/s`."""
        if self.first_s is None:
            return "no text"
        text = f"TTFT {1000 * (self.first_s - self.started_s):.0f} ms, {self.num_tokens} tokens"
        seconds = self.last_s - self.first_s
        if self.num_tokens > 1 and seconds > 0:
            text += f", {(self.num_tokens - 1) / seconds:.1f} tok/s"
        return text


def run_chat(message: str | None, system: str | None, options: ClientOptions) -> int:
    """One answer, or a dialogue until end of input; returns the exit code.

    Args:
        message: What to say; None reads lines from standard input.
        system: Instructions that come first.
        options: Where to ask, and how.
    """
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    said = [message] if message is not None else _lines()
    for text in said:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answer(messages, options)})
    return 0


def run_complete(prompt: str, options: ClientOptions) -> int:
    """Continues a text; returns the exit code."""
    sys.stdout.write(prompt)
    _stream("/v1/completions", {"prompt": prompt}, options)
    return 0


def answer(messages: Sequence[Message], options: ClientOptions) -> str:
    """Streams the answer to a dialogue to standard output and returns it.

    Raises:
        StartupError: No server answers at the address.
        PeerError: The server answered with an error, or broke off.
    """
    return _stream("/v1/chat/completions", {"messages": list(messages)}, options)


def _stream(path: str, body: Mapping[str, object], options: ClientOptions) -> str:
    timing = Timing()
    parts = []
    for chunk in events(options, "POST", path, _request(body, options)):
        if text := _text(chunk):
            timing.saw_text()
            parts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            timing.num_tokens = int(usage.get("completion_tokens", 0))
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stderr.write(f"[{timing}]\n")
    return "".join(parts)


def _request(body: Mapping[str, object], options: ClientOptions) -> dict[str, object]:
    request = {
        **body,
        "model": options.model or _first_model(options),
        "max_tokens": options.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    optional = {"temperature": options.temperature, "seed": options.seed}
    return request | {name: value for name, value in optional.items() if value is not None}


def _first_model(options: ClientOptions) -> str:
    with _Connection(options) as connection:
        listed = json.loads(connection.send("GET", "/v1/models").read())
    return str(listed["data"][0]["id"])


def events(
    options: ClientOptions, method: str, path: str, body: Mapping[str, object] | None = None
) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE].

    Raises:
        StartupError: No server answers.
        PeerError: It refuses, or breaks off.
    """
    with _Connection(options) as connection:
        sent = None if body is None else json.dumps(body).encode()
        response = connection.send(method, path, sent)
        while line := _read_line(response):
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue  # a comment that keeps the connection alive, or the end of an event
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise PeerError(f"the server broke off: {_error_message(event)}")
            yield event
    raise PeerError("the server closed the connection before the answer was complete")


def ask_json(options: ClientOptions, method: str, path: str) -> dict[str, Any]:
    """The JSON object that a server answers.

    Raises:
        StartupError: No server answers.
        PeerError: It refuses, or answers something else.
    """
    with _Connection(options) as connection:
        body = connection.send(method, path).read()
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise PeerError(f"the server answered what is no JSON: {body[:100]!r}") from error
    if not isinstance(answer, dict):
        raise PeerError(f"the server answered {body[:100]!r}, expected an object")
    return answer


def _read_line(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.readline(_MAX_LINE_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise PeerError(f"the connection broke off: {error}") from error


class _Connection:
    """One HTTP exchange; errors name the server."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        try:
            parts = urllib.parse.urlsplit(options.url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(options.url)
            self._http = _connect(parts.scheme, parts.hostname, parts.port, options)
        except (ValueError, http.client.InvalidURL) as error:
            message = f"url is {options.url!r}, expected http://host:port"
            raise StartupError(message) from error

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def send(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        """The response, whose status is 200 or 202."""
        headers = {"Content-Type": "application/json"}
        if self._options.api_key:
            headers["Authorization"] = f"Bearer {self._options.api_key}"
        try:
            self._http.request(method, path, body, headers)
            response = self._http.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise StartupError(
                f"no server answers at {self._options.url}: {error}",
                fix="start one with `expertmesh serve`, or name its address with --url",
            ) from error
        if response.status not in (http.client.OK, http.client.ACCEPTED):
            raise PeerError(f"the server answered {response.status}: {_error_text(response)}")
        return response


def _connect(
    scheme: str, host: str, port: int | None, options: ClientOptions
) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=options.timeout_s)
    context = options.context
    return http.client.HTTPSConnection(host, port, timeout=options.timeout_s, context=context)


def _error_text(response: http.client.HTTPResponse) -> str:
    body = response.read(65_536).decode("utf-8", "replace")
    try:
        return _error_message(json.loads(body))
    except ValueError:
        return body.strip() or response.reason


def _error_message(envelope: Mapping[str, object]) -> str:
    error = envelope.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(envelope)


def _text(chunk: Mapping[str, object]) -> str:
    """Text of a chunk of either API."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices:
        return ""
    choice = choices[0]
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def _lines() -> Iterator[str]:
    """Lines of standard input, with a prompt on a terminal; empty ones are left out."""
    terminal = sys.stdin.isatty()
    while True:
        if terminal:
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if text := line.strip():
            yield text
