"""What a mesh writes of requests: a line for each, with its ids, and nothing of its content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.api import Json
from tests.support.mesh import Server, serve
from tests.support.processes import poll

SECRET = "my-secret-words"
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
TALK = [{"role": "user", "content": SECRET}]


@pytest.fixture(scope="module")
def server(text_model: Path) -> Iterator[Server]:
    """A mesh that writes all it can."""
    with serve(text_model, "--log-level", "debug", "--log-format", "json") as started:
        yield started


def lines_of(server: Server, call_id: str) -> list[Json]:
    """What was written when the requests of a call ended."""
    entries = [json.loads(line) for line in server.process.stderr.splitlines() if line[:1] == "{"]
    return [entry for entry in entries if entry.get("call_id") == call_id]


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        (CHAT, {"messages": TALK, "max_tokens": 3}, "chatcmpl-"),
        (COMPLETIONS, {"prompt": SECRET, "max_tokens": 3, "n": 2}, "cmpl-"),
        (MESSAGES, {"messages": TALK, "max_tokens": 3}, "msg_"),
    ],
)
def test_each_request_has_a_line(server: Server, path: str, body: Json, prefix: str) -> None:
    """With the id of the answer, and the one that the client has given the call."""
    call_id = f"call-{prefix}7"
    headers = {"Content-Type": "application/json", "X-Request-Id": call_id}
    answer = server.api.request("POST", path, json.dumps(body).encode(), headers)
    assert answer.status == 200
    wanted = body.get("n", 1)
    poll(lambda: len(lines_of(server, call_id)) == wanted, timeout_s=10, what="lines of the call")
    for index, entry in enumerate(sorted(lines_of(server, call_id), key=lambda e: e["request_id"])):
        assert entry["request_id"] == f"{answer.json['id']}-{index}"
        assert answer.json["id"].startswith(prefix)
        assert entry["process"] == "gateway"
        assert entry["prompt_tokens"] >= len(SECRET)  # a token is a byte
        assert 1 <= entry["output_tokens"] <= 3
        assert 0 <= entry["queue_s"] <= entry["ttft_s"] <= entry["total_s"]
        assert entry["finish_reason"] in ("stop", "length")


def test_nothing_of_the_content_is_written(server: Server) -> None:
    """Neither prompts nor answers, by any process, at any level, also of requests that fail."""
    answer = server.api.post(COMPLETIONS, {"prompt": SECRET, "max_tokens": 24, "ignore_eos": True})
    bad = server.api.post(CHAT, {"messages": TALK, "temperature": SECRET})
    assert bad.status == 400
    written = server.process.stderr
    assert SECRET not in written
    assert answer.json["choices"][0]["text"] not in written
