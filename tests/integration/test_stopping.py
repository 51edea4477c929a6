"""A server that is stopped while it answers."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from contextlib import closing
from pathlib import Path

import psutil

from tests.support.api import Api, Json, completion_body, tokens_of_events
from tests.support.mesh import gateway
from tests.support.processes import poll, port_is_free


def test_a_stopping_gateway_finishes_what_it_began(text_model: Path) -> None:
    """After SIGTERM: running answers come to their end, new clients get 503, and those that were
    there are served once more by the connection that they have; gRPC takes no new ones."""
    body = completion_body("one two", 440)
    with (
        gateway(text_model, ["local"], "--drain-grace-s", "30") as server,
        closing(server.api.connect()) as kept,
    ):
        assert _ask(kept, "GET", "/health").headers["Connection"] is None
        answers: list[list[Json]] = [[] for _ in range(8)]

        def read(answer: list[Json]) -> None:
            answer.extend(server.api.stream("/v1/completions", body))

        threads = [
            threading.Thread(target=read, args=(answer,), name="reader") for answer in answers
        ]
        for thread in threads:
            thread.start()
        poll(lambda: load_of(server.api) == 8, timeout_s=20, what="all requests run")
        psutil.Process(server.process.process.pid).send_signal(signal.SIGTERM)
        poll(lambda: server.api.ready().status == 503, timeout_s=5, what="the gateway stops")
        refused = server.api.post("/v1/completions", {"prompt": "a"})
        assert (refused.status, refused.error["code"]) == (503, "engine_overloaded")
        assert "retry-after" in refused.headers
        poll(lambda: port_is_free(server.grpc_port), timeout_s=5, what="gRPC is not listened for")
        last = _ask(kept, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert (last.status, last.headers["Connection"]) == (200, "close")
        for thread in threads:
            thread.join(60)
        assert server.process.process.wait(30) == 0
    for answer in answers:
        assert len(tokens_of_events(answer)) == 440
        assert answer[-1]["choices"][0]["finish_reason"] == "length"


def _ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: Json = None
) -> http.client.HTTPResponse:
    """The answer, read to its end, over a connection that is kept."""
    connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response


def load_of(api: Api) -> int:
    """Requests that run or wait."""
    return int(api.get("/load").json["server_load"])
