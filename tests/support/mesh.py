"""Real meshes for tests: `expertmesh serve`, or a gateway and expert workers one by one.

Every context manager here proves at its end that the processes stopped with exit code 0 when
asked to, that nothing they started is left, and that their ports are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from expertmesh.transport import Plaintext, Transport
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as rpc
from tests.support.api import Api
from tests.support.kernels import compile_kernels
from tests.support.processes import Managed, poll, port_is_free, processes_of

STOP_TIMEOUT_S = 5.0
"""Promised by `expertmesh serve`: everything has stopped so long after Ctrl-C."""

_END_TIMEOUT_S = 10.0
"""At the end of other tests, where a busy machine must not matter."""

COMMAND = ("-c", "import sys; from gateway.command.cli import main; sys.exit(main())")
"""What the script `expertmesh` does."""


@dataclass(frozen=True)
class Server:
    """A gateway that serves, with the processes it started."""

    process: Managed
    api: Api
    grpc_port: int

    @property
    def ports(self) -> tuple[int, int]:
        """HTTP and gRPC."""
        return self.api.port, self.grpc_port


@dataclass(frozen=True)
class ExpertProcess:
    """An expert worker process."""

    process: Managed
    port: int

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def state(self) -> pb.WatchResponse:
        """A fresh snapshot of its state."""
        return watch_once(self.address)


_PLAINTEXT = Plaintext()


def watch_once(
    address: str, *, transport: Transport = _PLAINTEXT, wait: bool = True, timeout_s: float = 10.0
) -> pb.WatchResponse:
    """The first snapshot of an expert worker's Watch stream.

    Args:
        address: host:port.
        transport: Makes the connection.
        wait: Until there is one; else grpc.RpcError says why there is none.
        timeout_s: Of all of it.
    """
    with transport.channel(address, ()) as channel:
        stream = rpc.ExpertServiceStub(channel).Watch(
            pb.WatchRequest(), timeout=timeout_s, wait_for_ready=wait
        )
        snapshot: pb.WatchResponse = next(stream)
        stream.cancel()
    return snapshot


def start_server(
    arguments: Sequence[str],
    *,
    name: str,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = COMMAND,
) -> Server:
    """Starts `expertmesh *arguments` on free ports and waits until it serves.

    Args:
        arguments: Of the command.
        name: For messages.
        env: Additions to the environment.
        program: What Python runs instead of `expertmesh`.
    """
    compile_kernels()
    argv = [*program, *arguments, "--port", "0", "--grpc-port", "0"]
    process = Managed(argv, name=name, env=env)
    try:
        info = process.ready()
        return Server(process, Api(_port(info, "http_port")), _port(info, "grpc_port"))
    except BaseException:
        process.close()
        raise


def _port(info: dict[str, object], key: str) -> int:
    port = info[key]
    assert isinstance(port, int), info
    assert port > 0, info
    return port


@contextmanager
def serve(
    model: Path | str,
    *flags: str,
    expert_workers: int = 2,
    dtype: str = "float32",
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`expertmesh serve` with this number of expert workers; 0 is the colocated mode."""
    experts = (
        ["--expert-workers", str(expert_workers)] if expert_workers else ["--experts", "local"]
    )
    arguments = ["serve", str(model), "--dtype", dtype, *experts, *flags]
    server = start_server(arguments, name="serve", env=env)
    with _stopped_cleanly(server.process, server.ports):
        wait_ready(server.api)
        yield server


@contextmanager
def gateway(
    model: Path | str,
    experts: Sequence[str],
    *flags: str,
    dtype: str = "float32",
    ready: bool = True,
    placement: str = "static",
    program: Sequence[str] = COMMAND,
) -> Iterator[Server]:
    """`expertmesh gateway` for expert workers at these addresses.

    Args:
        model: Checkpoint folder.
        experts: host:port of the expert workers.
        flags: More flags.
        dtype: Type of computation.
        ready: Wait until every expert is covered.
        placement: auto lets it move experts.
        program: What Python runs instead of `expertmesh`.
    """
    arguments = ["gateway", str(model), "--dtype", dtype, "--experts", ",".join(experts), *flags]
    arguments += ["--placement", placement]
    server = start_server(arguments, name="gateway", program=program)
    with _stopped_cleanly(server.process, server.ports):
        if ready:
            wait_ready(server.api)
        yield server


def start_expert_workers(
    model: Path | str,
    shares: Sequence[str],
    *,
    port: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    flags: Sequence[str] = (),
) -> list[ExpertProcess]:
    """Starts `expertmesh expert-worker` with each of these shares, all at the same time, and waits
    until they serve. The caller closes them.
    """
    compile_kernels()
    processes = [
        Managed(
            [
                *(*COMMAND, "expert-worker", str(model), "--experts", share),
                *("--dtype", dtype, "--port", str(port), "--device", device),
                *flags,
            ],
            name=f"expert-worker {share}",
        )
        for share in shares
    ]
    try:
        return [ExpertProcess(process, _port(process.ready(), "port")) for process in processes]
    except BaseException:
        for process in processes:
            process.close()
        raise


def start_expert_worker(
    model: Path | str, *, experts: str = "all", port: int = 0, dtype: str = "float32"
) -> ExpertProcess:
    """Starts one expert worker and waits until it serves. The caller closes it."""
    return start_expert_workers(model, [experts], port=port, dtype=dtype)[0]


@contextmanager
def expert_workers(
    model: Path | str,
    shares: Sequence[str],
    *,
    port: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    flags: Sequence[str] = (),
) -> Iterator[list[ExpertProcess]]:
    """Expert workers that are stopped, and proven to stop cleanly, at the end."""
    workers = start_expert_workers(
        model, shares, port=port, dtype=dtype, device=device, flags=flags
    )
    with ExitStack() as stack:
        for worker in workers:
            stack.enter_context(_stopped_cleanly(worker.process, (worker.port,)))
        yield workers


@contextmanager
def expert_worker(
    model: Path | str, *, experts: str = "all", port: int = 0, dtype: str = "float32"
) -> Iterator[ExpertProcess]:
    """An expert worker that is stopped, and proven to stop cleanly, at the end."""
    with expert_workers(model, [experts], port=port, dtype=dtype) as (worker,):
        yield worker


@contextmanager
def _stopped_cleanly(process: Managed, ports: Sequence[int]) -> Iterator[None]:
    try:
        yield
        if process.process.poll() is None:
            exit_code = process.stop(_END_TIMEOUT_S)
            assert exit_code == 0, process.stderr
        assert_gone(process, ports)
    finally:
        process.close()


def assert_gone(process: Managed, ports: Sequence[int], *, timeout_s: float = 2.0) -> None:
    """Fails if a process of the tree is left after `timeout_s` seconds, or a port is held."""
    poll(
        lambda: not processes_of(process.marker),
        timeout_s=timeout_s,
        what=f"every process of {process.name} ends",
    )
    assert [port for port in ports if not port_is_free(port)] == []


def wait_ready(api: Api, *, timeout_s: float = 60.0) -> float:
    """Waits until /ready says 200 and returns the seconds that took."""
    return poll(lambda: api.ready().status == 200, timeout_s=timeout_s, what="/ready is 200")
