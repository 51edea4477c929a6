"""HTTP itself: ids, methods, connections, headers, endpoints for machines."""

from __future__ import annotations

import http.client
import json
import re
from contextlib import closing

import pytest

from tests.support.strict_client import CHAT, TEXT, StrictClient, chat_body, error_of, text_body


@pytest.mark.parametrize("stream", [False, True])
def test_request_id_is_echoed(client: StrictClient, stream: bool) -> None:
    """The client's own id comes back, whole and streamed, from successes and from errors."""
    body = chat_body(stream=stream)
    for path, sent in ((CHAT, body), (TEXT, text_body("x", stream=stream)), (CHAT, {})):
        answer = client.post(path, sent, **{"X-Request-Id": "my-id-42"})
        assert answer.headers["x-request-id"] == "my-id-42"


def test_request_id_is_made(client: StrictClient) -> None:
    """Without one, or with one that could split headers, the server makes one; each its own."""
    answers = [client.api.get("/v1/models") for _ in range(2)]
    answers.append(client.api.request("GET", "/v1/models", None, {"X-Request-Id": "a b<>"}))
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 3
    assert all(re.fullmatch(r"[\w-]{8,}", request_id) for request_id in ids)


def test_ids_of_answers_differ(client: StrictClient) -> None:
    """Every answer has an id of its own, also where the requests are alike."""
    assert len({client.chat()["id"] for _ in range(3)}) == 3


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/version", "/ready"])
def test_head(client: StrictClient, path: str) -> None:
    """HEAD is GET without the body, which probes use."""
    answer = client.api.request("HEAD", path)
    assert answer.status == 200
    assert answer.body == b""


def test_options(client: StrictClient) -> None:
    """A preflight gets an answer without a key and without a body of its own."""
    headers = {"Origin": "http://localhost", "Access-Control-Request-Method": "POST"}
    answer = client.api.request("OPTIONS", CHAT, None, headers)
    assert answer.status in (200, 204, 405)
    assert "POST" in answer.headers["allow"]


def test_connection_is_kept(client: StrictClient) -> None:
    """One connection serves many requests: whole, streamed and refused ones."""
    with closing(client.api.connect()) as connection:
        connection.connect()
        socket = connection.sock
        for body in (chat_body(), chat_body(stream=True), {"messages": []}, chat_body()):
            connection.request("POST", CHAT, json.dumps(body).encode(), client.headers)
            response = connection.getresponse()
            assert response.status == (400 if body == {"messages": []} else 200)
            assert response.read()
            assert connection.sock is socket, "the server closed the connection"


def test_close_is_honoured(client: StrictClient) -> None:
    """`Connection: close` closes."""
    with closing(client.api.connect()) as connection:
        connection.request("GET", "/v1/models", headers={"Connection": "close"})
        response = connection.getresponse()
        assert response.read()
        assert response.will_close


def test_http_1_0(client: StrictClient) -> None:
    """Old proxies get streams too, ended by the close of the connection."""

    class Old(http.client.HTTPConnection):
        _http_vsn, _http_vsn_str = 10, "HTTP/1.0"

    with closing(Old("127.0.0.1", client.api.port, timeout=30)) as connection:
        connection.request(
            "POST", CHAT, json.dumps(chat_body(stream=True)).encode(), client.headers
        )
        response = connection.getresponse()
        assert response.getheader("transfer-encoding") is None
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_chunked_body(client: StrictClient) -> None:
    """A body without a length, in chunks."""
    with closing(client.api.connect()) as connection:
        data = json.dumps(chat_body()).encode()
        parts = iter([data[:20], data[20:]])
        connection.request("POST", CHAT, parts, client.headers, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == 200
        assert json.loads(response.read())["choices"]


def test_trace_context(client: StrictClient) -> None:
    """W3C trace headers, and any other, are no trouble."""
    headers = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "vendor=x",
        "Accept": "text/event-stream",
        "OpenAI-Organization": "org",
        "X-Stainless-Lang": "python",
    }
    assert client.post(CHAT, chat_body(), **headers).status == 200


def test_form_type_of_curl(client: StrictClient) -> None:
    """curl says that JSON is a form unless told otherwise; other JSON types are fine as well."""
    for kind in (
        "application/x-www-form-urlencoded",
        "application/json; charset=utf-8",
        "text/json",
    ):
        answer = client.api.request(
            "POST", CHAT, json.dumps(chat_body()).encode(), {"Content-Type": kind}
        )
        assert answer.status == 200, kind


def test_health(client: StrictClient) -> None:
    """200 and no body."""
    answer = client.api.get("/health")
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping(client: StrictClient, method: str) -> None:
    """What SageMaker asks, with either method."""
    assert client.api.request(method, "/ping").status == 200


def test_version(client: StrictClient) -> None:
    """The version as text."""
    assert re.match(r"\d+\.\d+", client.api.get("/version").json["version"])


def test_load(client: StrictClient) -> None:
    """Nobody is served at the moment."""
    assert client.api.get("/load").json["server_load"] == 0


def test_ready(client: StrictClient) -> None:
    """Every expert has a copy, and both expert workers are named."""
    report = client.api.get("/ready").json
    assert report["ready"] is True
    assert len(report["workers"]) == 2


def test_metrics(client: StrictClient) -> None:
    """Text of the Prometheus format; what load generators scrape is there."""
    answer = client.api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for name in ("vllm:num_requests_running", "vllm:generation_tokens_total"):
        assert f"\n{name}" in answer.body.decode()


def test_load_report_for_balancers(client: StrictClient) -> None:
    """The load in the answer's headers, if a balancer asks for it."""
    for kind in ("JSON", "TEXT"):
        headers = {"endpoint-load-metrics-format": kind}
        answer = client.post(TEXT, text_body("x"), **headers)
        assert answer.headers["endpoint-load-metrics"]
    assert "endpoint-load-metrics" not in client.post(TEXT, text_body("x")).headers


def test_web_page_or_404(client: StrictClient) -> None:
    """The root is a page or an envelope, never an error of the framework."""
    answer = client.api.get("/")
    if answer.status != 200:
        error_of(answer, 404)
