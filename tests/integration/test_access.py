"""A server with API keys, and one that is stopped while it answers."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import grpc
import psutil
import pytest

from expertmesh.v1 import generation_service_pb2 as pb
from expertmesh.v1 import generation_service_pb2_grpc as rpc
from tests.support.api import Api, Json, completion_body, tokens_of_events
from tests.support.mesh import gateway, serve
from tests.support.processes import poll, processes_of

KEY = "sk-test-0123456789abcdef"


def test_a_server_with_keys(text_model: Path) -> None:
    """Callers need a key, our own question has it, and no process shows it to other users."""
    env = {"EXPERTMESH_API_KEYS": f"sk-other-000000, {KEY}"}
    with serve(text_model, "--ask", "Who are you?", expert_workers=0, env=env) as server:
        assert "API key" not in server.process.stdout + server.process.stderr
        assert server.api.post("/v1/completions", {"prompt": "a"}).status == 401
        shown = {"Authorization": f"Bearer {KEY}"}
        assert server.api.request("GET", "/v1/models", headers=shown).status == 200
        info = server.api.request("GET", "/server_info", headers=shown)
        assert KEY not in info.body.decode()
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            stub = rpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
            assert isinstance(caught.value, grpc.Call)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            metadata = (("authorization", f"Bearer {KEY}"),)
            model = stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata, timeout=10)
            assert model.vocab_size
        for process in processes_of(server.process.marker):
            assert KEY not in " ".join(process.cmdline())
            if "attention_worker" in process.cmdline():
                assert not [name for name in process.environ() if "API_KEY" in name]
        assert KEY not in server.process.stderr


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
