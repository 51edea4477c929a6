"""A server that is stopped while it answers."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import psutil

from tests.support.api import Api, Json, completion_body, tokens_of_events
from tests.support.mesh import gateway
from tests.support.processes import poll


def test_a_stopping_gateway_finishes_what_it_began(text_model: Path) -> None:
    """After SIGTERM: running answers come to their end, new requests get 503."""
    body = completion_body("one two", 440)
    with gateway(text_model, ["local"], "--drain-grace-s", "30") as server:
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
        for thread in threads:
            thread.join(60)
        assert server.process.process.wait(30) == 0
    for answer in answers:
        assert len(tokens_of_events(answer)) == 440
        assert answer[-1]["choices"][0]["finish_reason"] == "length"


def load_of(api: Api) -> int:
    """Requests that run or wait."""
    return int(api.get("/load").json["server_load"])
