"""`expertmesh doctor` beside a real mesh: what answers, what is missing, and what does not fit."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.support.mesh import COMMAND, expert_worker, gateway
from tests.support.processes import free_port, run
from tests.support.tiny_checkpoints import MIXTRAL, MIXTRAL_FOUR, save_tiny

Findings = list[dict[str, str]]


def doctor(*arguments: str) -> tuple[int, Findings]:
    """Exit code and findings."""
    done = run([*COMMAND, "doctor", *arguments, "--json"], timeout_s=60)
    told = json.loads(done.stdout)
    assert told["healthy"] == (done.returncode == 0), done.stderr
    findings: Findings = told["findings"]
    return done.returncode, findings


def of(findings: Findings, subject: str, health: str) -> list[str]:
    """Messages of the findings that are so."""
    return [
        one["message"] for one in findings if (one["subject"], one["health"]) == (subject, health)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is served."""
    return save_tiny(tmp_path_factory.mktemp("models") / "served", MIXTRAL)


def test_beside_a_mesh(model: Path, tmp_path: Path) -> None:
    """A server that is up is ready; its expert worker fits its model, and no other one."""
    other = save_tiny(tmp_path / "other", MIXTRAL_FOUR)
    with expert_worker(model) as worker:
        experts = ("--dtype", "float32", "--experts", worker.address)
        with gateway(model, [worker.address]) as server:
            url = f"http://127.0.0.1:{server.api.port}"
            code, findings = doctor(str(model), *experts, "--url", url)
            assert code == 0
            assert f"{url} is ready" in of(findings, "server", "fine")
            (fits,) = of(findings, "expert workers", "fine")
            assert worker.address in fits
            port = ("--port", str(server.api.port), "--grpc-port", "0")
            (taken,) = of(doctor(str(model), *port)[1], "port", "warning")
            assert "ExpertMesh" in taken
        code, findings = doctor(str(other), *experts)
        assert code == 1
        (differs,) = of(findings, "expert workers", "broken")
        assert "it serves model" in differs


def test_without_a_mesh(model: Path) -> None:
    """Ports that others use, a server and an expert worker that are not there are named."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port, nobody = other.getsockname()[1], f"127.0.0.1:{free_port()}"
        code, findings = doctor(
            *(str(model), "--port", str(port), "--grpc-port", "0", "--experts", nobody)
        )
    assert code == 1
    assert any(str(port) in message for message in of(findings, "port", "broken"))
    assert of(findings, "expert workers", "broken") == [f"{nobody}: connection refused"]
    code, findings = doctor(str(model), "--url", f"http://{nobody}")
    assert code == 1
    assert any(nobody in message for message in of(findings, "server", "broken"))


def test_what_has_no_name(model: Path) -> None:
    """Expert workers that DNS does not know are said to be missing."""
    code, findings = doctor(str(model), "--experts", "dns:nowhere.invalid:50061")
    assert code == 1
    assert any("nowhere.invalid" in message for message in of(findings, "expert workers", "broken"))
