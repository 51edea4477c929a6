"""Meshes and APIs behind certificates, as processes."""

from __future__ import annotations

import http.client
import json
import ssl
from contextlib import closing
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conftest import Models
from tests.support.api import completion_body
from tests.support.certificates import Authority, mesh_flags, serial_of
from tests.support.mesh import Server, gateway, serve, start_server
from tests.support.processes import poll, processes_of, run
from tests.support.tiny_checkpoints import MIXTRAL

PROMPT = [5, 9, 2, 7]
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    """A tiny Mixtral."""
    return models.tiny(MIXTRAL)


def test_mesh_with_certificates(model: Path, tmp_path: Path) -> None:
    """The same tokens as without a mesh; certificates are replaced, and who comes later uses the
    new ones, while who is connected goes on."""
    with gateway(model, ["local"]) as alone:
        expected = alone.api.complete(PROMPT, 40)
    before, after = Authority.new(), Authority.new()
    files = before.issue(tmp_path / "tls")
    with serve(model, *mesh_flags(files)) as server:
        assert server.api.complete(PROMPT, 40) == expected
        assert "rows travel by gRPC alone" in server.process.stderr
        after.issue(tmp_path / "tls")
        assert server.api.complete(PROMPT, 40) == expected
        _expert_worker(server).kill()
        poll(lambda: _all_ready(server), timeout_s=60, what="another one comes, by the new ones")
        assert server.api.complete(PROMPT, 40) == expected


def _expert_worker(server: Server) -> psutil.Process:
    processes = processes_of(server.process.marker)
    return next(process for process in processes if "expert_worker" in process.cmdline())


def _all_ready(server: Server) -> bool:
    workers = server.api.ready().json["workers"]
    states = [worker["state"] for worker in workers]
    return "starting it again" in server.process.stderr and states == ["ready"] * 2


def test_api_with_a_certificate(model: Path, tmp_path: Path) -> None:
    """HTTP and gRPC are encrypted, plain text is refused, and a new certificate is taken up."""
    authority = Authority.new()
    files = authority.issue(tmp_path / "tls", "expertmesh.example")
    flags = ("--api-tls-cert-file", files.cert, "--api-tls-key-file", files.key)
    server = start_server(["serve", str(model), "--experts", "local", *flags], name="serve")
    with server.process as process:
        _check_http(server, files.ca)
        with pytest.raises((http.client.HTTPException, OSError)):
            server.api.get("/health")
        _check_grpc(server, files.ca)
        port = server.api.port
        first = ssl.get_server_certificate(("127.0.0.1", port), timeout=TIMEOUT_S)
        authority.issue(tmp_path / "tls", "expertmesh.example")
        second = ssl.get_server_certificate(("127.0.0.1", port), timeout=TIMEOUT_S)
        assert serial_of(first.encode()) != serial_of(second.encode())
        _check_http(server, files.ca)
        _check_grpc(server, files.ca)
        assert process.stop(TIMEOUT_S) == 0, process.stderr


def _check_http(server: Server, ca: str) -> None:
    context = ssl.create_default_context(cafile=ca)
    connection = http.client.HTTPSConnection(
        "127.0.0.1", server.api.port, timeout=TIMEOUT_S, context=context
    )
    with closing(connection):
        body = json.dumps(completion_body(PROMPT, 4))
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()


def _check_grpc(server: Server, ca: str) -> None:
    credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{server.grpc_port}", credentials) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["-m", "expert_worker", "demo", "--host", "0.0.0.0"], "host is 0.0.0.0"),
        (["-m", "expert_worker", "demo", "--insecure=maybe"], "expected true or false"),
        (["-m", "expert_worker", "demo", "--tls-key-file", "k"], "tls_key_file is set, but not"),
    ],
)
def test_expert_workers_that_would_be_open(argv: list[str], named: str) -> None:
    """They end with 2 and say what to do."""
    ended = run(argv, timeout_s=TIMEOUT_S)
    assert ended.returncode == 2
    assert named in ended.stderr
