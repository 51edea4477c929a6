"""What `expertmesh serve` decides before it starts anything, and what it shows."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from expertmesh.cores import UsableCores
from expertmesh.errors import PortError, SettingsError, StartupError
from expertmesh.expert_source import AddressList
from expertmesh.model_config import (
    DenseFfnConfig,
    GateConfig,
    GqaConfig,
    LayerConfig,
    ModelConfig,
    MoeFfnConfig,
    RopeConfig,
)
from expertmesh.settings import (
    ExpertWorkerOptions,
    GatewaySettings,
    HttpSettings,
    LogSettings,
    MeshSettings,
    ModelSettings,
)
from gateway.api_keys import GivenKeys
from gateway.command.launcher import (
    FoundModel,
    LocalMesh,
    _changed_flags,
    check_ports,
    reserve_port,
)
from gateway.command.launcher_console import (
    LogProgress,
    ReadyBlock,
    make_progress,
    print_ready_block,
)
from gateway.command.launcher_probe import ReadyProbe, reachable_host


def _config(num_experts: int) -> ModelConfig:
    attention = GqaConfig(2, 1, 4, RopeConfig(1e4, 4), 0.5)
    moe = MoeFfnConfig(GateConfig(max(num_experts, 2), 2), 8)
    ffn = moe if num_experts else DenseFfnConfig(8)
    return ModelConfig(
        "mixtral", 32, 8, (LayerConfig(attention, ffn),) * 3, 1e-5, 64, True, "float32"
    )


def _plan(num_experts: int, **mesh: object) -> LocalMesh:
    settings = GatewaySettings(model=ModelSettings(model="/m"), mesh=MeshSettings.from_dict(mesh))
    with contextlib.ExitStack() as stack:
        found = FoundModel(settings, _config(num_experts), expert_nbytes=1000)
        return LocalMesh.plan(found, stack, GivenKeys())


def test_plan_starts_expert_workers() -> None:
    """By default two expert workers are started, and the gateway knows their addresses."""
    mesh = _plan(8)

    assert [m.name for m in mesh.members] == ["gateway", "expert worker 0", "expert worker 1"]
    assert [m.restart is not None for m in mesh.members] == [False, True, True]
    assert isinstance(mesh.settings.mesh.expert_source, AddressList)
    assert len(mesh.settings.mesh.expert_source.addresses) == 2
    assert mesh.num_pairs == 24
    assert not mesh.settings.mesh.overlap  # they compute on the attention worker's cores


@pytest.mark.parametrize(
    ("num_experts", "given", "expected"),
    [
        (8, "local", "local"),
        (8, "10.0.0.1:5,10.0.0.2:5", "10.0.0.1:5,10.0.0.2:5"),
        (0, "", "local"),
    ],
)
def test_plan_without_expert_workers(num_experts: int, given: str, expected: str) -> None:
    """None are started colocated, where some are named, and for a dense model."""
    mesh = _plan(num_experts, experts=given)

    assert [member.name for member in mesh.members] == ["gateway"]
    assert mesh.settings.mesh.experts == expected
    assert mesh.settings.mesh.overlap


def test_more_expert_workers_than_experts() -> None:
    """An expert worker that would hold nothing is refused."""
    with pytest.raises(SettingsError, match="expert_workers is 9, but the model has 8 experts"):
        _plan(8, expert_workers=9, placement="static")


def test_flags_for_an_expert_worker() -> None:
    """Only what differs from the defaults is passed on."""
    options = ExpertWorkerOptions(port=5, experts="1/2", worker_id="expert-worker-1")

    assert _changed_flags(LogSettings()) == []
    assert _changed_flags(options) == [
        *("--port", "5"),
        *("--experts", "1/2"),
        *("--worker-id", "expert-worker-1"),
    ]


def test_expert_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told its threads and the cores that it stays on."""
    cores = UsableCores((0, 1, 2, 5), 4)
    monkeypatch.setattr("gateway.command.launcher.usable_cores", lambda: cores)
    started: list[list[str]] = []
    monkeypatch.setattr(
        "gateway.command.launcher.spawn_module",
        lambda module, flags, name, **_: started.append(flags),
    )
    for options in ({}, {"threads": 1}, {"pin_cores": False}, {"expert_workers": 1}):
        for member in _plan(8, **options).members[1:]:
            member.start(lambda child: None)
    names = ("--threads", "--cores")
    told = [
        {name: flags[flags.index(name) + 1] for name in names if name in flags} for flags in started
    ]
    assert told == [
        *({"--threads": "2", "--cores": "0-1"}, {"--threads": "2", "--cores": "2,5"}),
        *({"--threads": "1", "--cores": "0-1"}, {"--threads": "1", "--cores": "2,5"}),
        *({"--threads": "2"}, {"--threads": "2"}),
        {"--threads": "4"},
    ]


@pytest.mark.parametrize("name", ["port", "grpc_port"])
def test_port_in_use(name: str) -> None:
    """A port that somebody listens on is refused, with the flag that chooses another."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        free = HttpSettings(port=0, grpc_port=0)

        with pytest.raises(PortError) as caught:
            check_ports(dataclasses.replace(free, **{name: port}))

    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" == caught.value.message
    assert f"--{name.replace('_', '-')}" in caught.value.fix


def test_address_of_another_machine() -> None:
    """An address that is not ours is refused."""
    with pytest.raises(PortError, match=r"cannot listen on 203\.0\.113\.7:5000"):
        check_ports(HttpSettings(host="203.0.113.7", port=5000, grpc_port=0, insecure=True))


def test_free_ports_are_accepted() -> None:
    """Port 0, and a port that is free, pass and stay free."""
    with reserve_port("127.0.0.1") as port:
        pass
    check_ports(HttpSettings(port=port, grpc_port=0))
    check_ports(HttpSettings(port=port, grpc_port=0))


def test_reserved_port_is_ours() -> None:
    """A gRPC server of ours can listen on a reserved port, twice in a row; nobody is given it."""
    with reserve_port("127.0.0.1") as port:
        for _ in range(2):
            with ThreadPoolExecutor(1) as pool:
                server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
                assert port == server.add_insecure_port(f"127.0.0.1:{port}")
                server.start()
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                server.stop(0).wait(5)


class _Ready(http.server.BaseHTTPRequestHandler):
    """Answers /ready with what the test says."""

    answers: list[tuple[int, bytes]]

    def do_GET(self) -> None:
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def ready_server() -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    """Port of a server, and the list of its next answers, of which the last one stays."""
    answers: list[tuple[int, bytes]] = []
    handler = type("Handler", (_Ready,), {"answers": answers})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, name="ready-server")
    thread.start()
    yield server.server_address[1], answers
    server.shutdown()
    thread.join(5)
    server.server_close()


def test_probe(ready_server: tuple[int, list[tuple[int, bytes]]]) -> None:
    """Ready is what /ready says, and how many experts nobody holds."""
    port, answers = ready_server
    answers += [(503, b"{}"), (200, json.dumps({"uncovered": {"0": [1, 2], "3": [4]}}).encode())]
    probe = ReadyProbe("0.0.0.0", timeout_s=30)

    assert not probe.is_ready({"http_port": port})
    assert probe.is_ready({"http_port": port})
    assert probe.num_uncovered == 3


def test_probe_gives_up(ready_server: tuple[int, list[tuple[int, bytes]]]) -> None:
    """After the time, the error says what /ready answered last."""
    port, answers = ready_server
    answers.append((503, b'{"message": "expert worker 10.0.0.1:5 is unreachable"}'))

    with pytest.raises(StartupError, match=r"10\.0\.0\.1:5 is unreachable"):
        ReadyProbe("127.0.0.1", timeout_s=0).is_ready({"http_port": port})


def test_probe_without_a_server() -> None:
    """A gateway that does not answer is not ready yet."""
    with reserve_port("127.0.0.1") as port:
        assert not ReadyProbe("127.0.0.1", timeout_s=30).is_ready({"http_port": port})


def test_reachable_host() -> None:
    """A wildcard address is reached over loopback."""
    assert reachable_host("0.0.0.0") == "127.0.0.1"
    assert reachable_host("::") == "::1"
    assert reachable_host("10.1.2.3") == "10.1.2.3"


def test_ready_block(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal the block is plain lines with everything one needs."""
    block = ReadyBlock(
        http_url="http://127.0.0.1:8000",
        grpc_address="127.0.0.1:50051",
        model="demo",
        folder="/models/demo-granular",
        processes={"gateway": 10, "expert worker 0": 11, "attention worker": 12},
        kv_cache="4096 tokens",
        experts="240/240 covered",
    )

    print_ready_block(block)

    assert capsys.readouterr().out.splitlines() == [
        "ExpertMesh is ready",
        "HTTP       http://127.0.0.1:8000/v1",
        "gRPC       127.0.0.1:50051",
        "metrics    http://127.0.0.1:8000/metrics",
        "model      demo (/models/demo-granular)",
        "processes  gateway 10, expert worker 0 11, attention worker 12",
        "KV cache   4096 tokens",
        "experts    240/240 covered",
    ]


def test_ready_block_takes_no_markup_from_paths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal too, brackets in the name of a folder are shown as they are."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    print_ready_block(
        ReadyBlock("http://h:1", "h:2", "m", "/models/[bold]x[/]", {}, "9 tokens", "1/1 covered")
    )

    assert "m (/models/[bold]x[/])" in capsys.readouterr().out


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A line at the begin and end of a stage, on standard error."""
    with make_progress() as progress:
        assert isinstance(progress, LogProgress)
        progress.stage("building", 100)
        progress.advance(50)
        progress.done()

    assert tuple(capsys.readouterr()) == ("", "building: begins\nbuilding: done\n")


def test_progress_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar that is full at the end, on standard error."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    with make_progress() as progress:
        progress.stage("loading", 0)
        progress.advance(5)
        progress.stage("building", 100)
        progress.advance(100)
        progress.done()

    written = capsys.readouterr()
    assert written.out == ""
    assert "building" in written.err
