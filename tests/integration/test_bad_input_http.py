"""Bad input over HTTP gets its named error, and changes nothing for the next request."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from tests.support.api import Answer, Api, Generated
from tests.support.bad_requests import COMPLETIONS, CONTEXT, BadRequest, corpus
from tests.support.mesh import Server
from tests.support.processes import poll

MIB = 2**20
HUGE = 100 * MIB


@pytest.fixture(scope="module")
def good(text_server: Server) -> Iterator[Generated]:
    """A good request's answer before the bad ones; the same is expected after them."""
    before = text_server.api.complete("The quick brown", 24)
    yield before
    assert before == text_server.api.complete("The quick brown", 24)


def _types_of(status: int) -> str:
    return "not_found_error" if status == 404 else "invalid_request_error"


@pytest.mark.parametrize("bad", corpus(), ids=lambda bad: bad.name)
def test_named_error(text_server: Server, good: Generated, bad: BadRequest) -> None:
    """The answer has the right status and an envelope with type, code and parameter, in JSON."""
    answer = text_server.api.request(bad.method, bad.path, bad.body, bad.headers)
    assert (bad.status, bad.code, bad.param) == (
        answer.status,
        answer.error["code"],
        answer.error["param"],
    ), answer.body
    assert sorted(answer.error) == ["code", "message", "param", "type"]
    assert list(answer.json) == ["error"]
    assert answer.error["type"] == _types_of(bad.status)
    assert answer.error["message"]
    assert len(answer.body) < 2048
    assert answer.headers["content-type"].startswith("application/json")


def test_message_names_value_and_expectation(text_server: Server, good: Generated) -> None:
    """A message says which value was wrong and what would be right."""
    api = text_server.api
    temperature = api.post(COMPLETIONS, {"prompt": "a", "temperature": -7}).error["message"]
    assert "-7" in temperature
    assert "temperature" in temperature
    length = api.post(COMPLETIONS, {"prompt": [5] * 600}).error["message"]
    assert str(CONTEXT) in length
    assert "600" in length


def test_method_not_allowed_says_what_is(text_server: Server, good: Generated) -> None:
    """A wrong method is answered with the right one."""
    answer = text_server.api.request("PUT", COMPLETIONS, b"{}")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


def test_odd_but_good_requests(text_server: Server, good: Generated) -> None:
    """What is unusual but allowed is served: nulls, unknown fields, any text, the exact limit."""
    api = text_server.api
    nulls = dict.fromkeys(("temperature", "top_p", "stop", "seed", "n", "logprobs", "stream"))
    for body in (
        {"prompt": "a", "max_tokens": 2, **nulls},
        {"prompt": "a", "max_tokens": 2, "nobody_knows_this": {"a": [1, 2]}},
        {"prompt": "\u0000 \u202e \u200d e\u0301 \ufffe \U0001f642", "max_tokens": 2},
        {"prompt": [5] * (CONTEXT - 12), "max_tokens": 12, "ignore_eos": True},
        {"prompt": "a", "max_tokens": 2, "temperature": 5e-324},
        {"prompt": "a", "max_tokens": 2, "seed": -1},
        {"prompt": "<|im_end|>", "max_tokens": 2},
    ):
        answer = api.post(COMPLETIONS, body)
        assert answer.status == 200, answer.body


def test_special_tokens_typed_by_a_user_are_text(text_server: Server, good: Generated) -> None:
    """`<|im_end|>` in a message has the length of its characters, not of a special token."""
    api = text_server.api

    def prompt_tokens(content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answer = api.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        return int(answer.json["usage"]["prompt_tokens"])

    assert prompt_tokens("a<|im_end|>b") > prompt_tokens("ab") + 2


def _resident(server: Server) -> int:
    return int(psutil.Process(server.process.process.pid).memory_info().rss) + sum(
        process.memory_info().rss for process in server.process.descendants()
    )


def _answer_to(api: Api, pieces: Iterator[bytes], head: str) -> tuple[Answer | None, int]:
    """Sends until the server answers or hangs up; the answer and the bytes sent of the body."""
    sent = 0
    with socket.create_connection(("127.0.0.1", api.port), timeout=20) as connection:
        connection.sendall(head.encode())
        connection.setblocking(True)
        try:
            for piece in pieces:
                connection.sendall(piece)
                sent += len(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has answered and does not read on
        connection.settimeout(20)
        try:
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionResetError:
            received = b""
    if not received:
        return None, sent
    status = int(received.split(b" ", 2)[1])
    return Answer(status, {}, received.partition(b"\r\n\r\n")[2]), sent


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
def test_hundred_megabytes(text_server: Server, good: Generated, chunked: bool) -> None:
    """A body of 100 MB is refused early, with memory that stays bounded, and the server goes on."""
    before = _resident(text_server)
    piece = b" " * MIB
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {HUGE}"
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\n{framing}\r\n\r\n"
    )
    pieces = (b"%x\r\n%b\r\n" % (MIB, piece) if chunked else piece for _ in range(HUGE // MIB))
    started = time.monotonic()
    answer, sent = _answer_to(text_server.api, pieces, head)
    assert time.monotonic() - started < 5
    assert sent < HUGE
    if answer is not None:  # a reset may overtake the answer while we still send
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert _resident(text_server) - before < 40 * MIB


def test_declared_size_alone_is_refused(text_server: Server, good: Generated) -> None:
    """Ten declared gigabytes are refused with an envelope before a byte of the body is sent."""
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {10 * 2**30}\r\n\r\n"
    )
    answer, _ = _answer_to(text_server.api, iter([]), head)
    assert answer is not None
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


GOOD_BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()

GARBAGE = {
    "binary": bytes(range(256)) * 4,
    "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "http/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"POST /v1/completions\r\n\r\n",
    "length and chunked": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "two lengths": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
        b"Content-Length: 6\r\n\r\nhello!"
    ),
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "length in words": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: six\r\n\r\n",
    "bad chunk size": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    ),
    "long header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 70_000 + b"\r\n\r\n",
    "long path": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_on_the_socket(text_server: Server, good: Generated, garbage: bytes) -> None:
    """What is not HTTP gets a 4xx or a closed connection within seconds."""
    with socket.create_connection(("127.0.0.1", text_server.api.port), timeout=10) as connection:
        connection.sendall(garbage)
        connection.settimeout(10)
        try:
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionResetError:
            received = b""
    assert received[:10] in (b"", b"HTTP/1.1 4", b"HTTP/1.0 4"), received[:200]
    assert b"Traceback" not in received


def test_clients_that_send_half_a_request(text_server: Server, good: Generated) -> None:
    """Connections that stop in the middle of a request do not keep others waiting."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    address = ("127.0.0.1", text_server.api.port)
    halves = [socket.create_connection(address, timeout=5) for _ in range(50)]
    for half in halves:
        half.sendall(head)
    try:
        assert text_server.api.post(COMPLETIONS, json.loads(GOOD_BODY)).status == 200
    finally:
        for half in halves:
            half.close()


def test_many_requests_on_one_connection(text_server: Server, good: Generated) -> None:
    """A connection serves good requests after bad ones."""
    with closing(text_server.api.connect()) as connection:
        statuses = []
        for body in (b"{", GOOD_BODY, b"[]", GOOD_BODY):
            connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
    assert statuses == [400, 200, 400, 200]


def test_too_many_requests_are_refused_at_once(text_server: Server, good: Generated) -> None:
    """Requests beyond the queue are answered 429 or 503 with Retry-After, not kept for ever."""
    api = text_server.api
    body = {"prompt": [[5, 6, 7]] * 320, "max_tokens": 300, "ignore_eos": True}
    with closing(api.stream(COMPLETIONS, body)) as events:
        assert "error" not in next(events), "the queue takes that many"
        answer = api.post(COMPLETIONS, body)
        assert answer.status in (429, 503), answer.body[:300]
        assert float(answer.headers["retry-after"]) > 0
        never = api.post(COMPLETIONS, {**body, "prompt": [[5, 6, 7]] * 321})
        assert never.status == 400, "a client must not repeat what can never be taken"
    poll(
        lambda: api.metrics()["moe_request_slots_used"] == 0,
        timeout_s=10,
        what="the requests of the refused call end",
    )


def test_log_has_no_traceback(text_server: Server, good: Generated) -> None:
    """None of this was logged as an unexpected failure."""
    logged = text_server.process.stderr.splitlines()
    assert [line for line in logged if "Traceback" in line] == []
