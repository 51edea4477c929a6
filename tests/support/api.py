"""A small HTTP client for tests: the standard library only, nothing retried, nothing hidden."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

Json = Any
"""Parsed JSON of a response: what it holds is what the tests check."""

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")


@dataclass(frozen=True)
class Answer:
    """Status, headers (lower-case names) and body of a response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> Json:
        """The error object of the envelope."""
        return self.json["error"]


@dataclass(frozen=True)
class Generated:
    """One completion: token ids, their log probabilities, and why it ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    text: str = ""


class Api:
    """The HTTP API of one gateway."""

    def __init__(self, port: int, *, timeout_s: float = 60.0) -> None:
        self.port = port
        self.timeout_s = timeout_s

    def connect(self) -> http.client.HTTPConnection:
        """A connection of its own; the caller closes it."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout_s)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends one request on a fresh connection."""
        with closing(self.connect()) as connection:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    def get(self, path: str) -> Answer:
        """GET."""
        return self.request("GET", path)

    def post(self, path: str, value: Json) -> Answer:
        """POST of a JSON value."""
        body = json.dumps(value).encode()
        return self.request("POST", path, body, {"Content-Type": "application/json"})

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, **extra: Json) -> Generated:
        """Greedy completion with log probabilities; fails unless the answer is 200."""
        answer = self.post("/v1/completions", completion_body(prompt, max_tokens, **extra))
        assert answer.status == 200, answer.body
        return generated_of(answer.json["choices"][0])

    def stream(self, path: str, value: Json) -> Iterator[Json]:
        """Events of a streamed answer, until `[DONE]`; closing the iterator closes the connection.

        An error envelope, in the stream or instead of it, is an event like any other.
        """
        body = json.dumps({**value, "stream": True})
        with closing(self.connect()) as connection:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                yield {**json.loads(response.read()), "status": response.status}
                return
            yield from _events(response)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics, summed over all labels."""
        totals: dict[str, float] = {}
        for line in self.get("/metrics").body.decode().splitlines():
            if match := _SAMPLE.match(line):
                name = match["name"]
                totals[name] = totals.get(name, 0.0) + float(match["value"])
        return totals

    def ready(self) -> Answer:
        """GET /ready."""
        return self.get("/ready")


def _events(response: http.client.HTTPResponse) -> Iterator[Json]:
    for raw in response:
        line = raw.decode().rstrip("\r\n")
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def completion_body(prompt: Sequence[int] | str, max_tokens: int, **extra: Json) -> Json:
    """Body of a greedy /v1/completions request that wants token ids and log probabilities."""
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 0,
        **extra,
    }


def generated_of(choice: Json) -> Generated:
    """One choice of a /v1/completions answer."""
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return Generated(
        tuple(choice["token_ids"]), tuple(logprobs), choice["finish_reason"], choice["text"]
    )


def tokens_of_events(events: Sequence[Json]) -> tuple[int, ...]:
    """All token ids of a streamed /v1/completions answer."""
    chunks = [event["choices"][0].get("token_ids") or [] for event in events if event["choices"]]
    return tuple(token for chunk in chunks for token in chunk)
