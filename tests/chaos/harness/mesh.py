"""Meshes with several copies of each expert, with and without something in between."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.harness.message_proxy import MessageProxy
from tests.chaos.harness.namespaces import Wire, namespaces
from tests.chaos.harness.network import Line, MessageFault, Network
from tests.chaos.harness.pool import PoolWorker, expert_pool, running, shares_with_copies
from tests.support.api import Api
from tests.support.mesh import COMMAND, Server, gateway, start_server, wait_ready
from tests.support.processes import Managed, poll, processes_of
from tests.support.tiny_checkpoints import MIXTRAL

NUM_WORKERS, NUM_COPIES = 3, 2
_READY_TIMEOUT_S = 60.0
_PATIENCE = ("--experts-hold-s", "120")  # however long a busy machine takes to start a worker

ChangeMessages = Callable[[PoolWorker, MessageFault], AbstractContextManager[None]]


@dataclass
class Mesh:
    """Expert workers, and a gateway that knows their addresses."""

    workers: Sequence[PoolWorker]
    server: Server
    network: Network | None = None
    """Between them, if there is one."""
    proxies: Mapping[PoolWorker, MessageProxy] = field(default_factory=dict)
    """Between them, if there are any."""
    wires: Mapping[PoolWorker, Wire] = field(default_factory=dict)
    """To those that are in namespaces."""

    @property
    def api(self) -> Api:
        """Of the gateway."""
        return self.server.api

    def states(self) -> list[str]:
        """What the gateway says of each expert worker."""
        return [worker["state"] for worker in self.api.ready().json["workers"]]

    def wait_all_ready(self) -> None:
        """Waits until the gateway can use every expert worker."""
        poll(
            lambda: self.states() == ["ready"] * len(self.workers),
            timeout_s=_READY_TIMEOUT_S,
            what="all expert workers are ready",
        )

    def line(self, worker: PoolWorker) -> Line:
        """The line of the network to a worker."""
        assert self.network is not None
        return self.network.lines[worker]

    def reset(self, worker: PoolWorker) -> None:
        """Resets all connections to a worker."""
        assert self.network is not None
        self.network.reset(worker)

    def change_direct_replies(
        self, worker: PoolWorker, change: MessageFault
    ) -> AbstractContextManager[None]:
        """A context in which a worker's replies on direct connections are changed."""
        return self.line(worker).under(reply_fault=change)

    def change_direct_requests(
        self, worker: PoolWorker, change: MessageFault
    ) -> AbstractContextManager[None]:
        """A context in which calls to a worker on direct connections are changed."""
        return self.line(worker).under(request_fault=change)

    def change_replies(self, method: str) -> ChangeMessages:
        """Makes contexts in which what a worker answers to a gRPC method is changed."""
        return lambda worker, change: _entry(self.proxies[worker].faults, method, change)

    def change_requests(self, method: str) -> ChangeMessages:
        """Makes contexts in which what a worker is asked over a gRPC method is changed."""
        return lambda worker, change: _entry(self.proxies[worker].request_faults, method, change)


@contextmanager
def _entry(table: dict[str, MessageFault], key: str, change: MessageFault) -> Iterator[None]:
    table[key] = change
    try:
        yield
    finally:
        del table[key]


@contextmanager
def mesh_of_copies(model: Path) -> Iterator[Mesh]:
    """Three expert workers with two copies of each expert, and a gateway."""
    with pool_of_copies(model) as workers:
        addresses = [worker.address for worker in workers]
        with mesh_at(model, workers, addresses) as mesh:
            yield mesh


@contextmanager
def networked_mesh(model: Path) -> Iterator[Mesh]:
    """The same with a network between gateway and expert workers."""
    with pool_of_copies(model) as workers, Network(workers) as network:
        addresses = [line.address for line in network.lines.values()]
        with mesh_at(model, workers, addresses) as mesh:
            mesh.network = network
            yield mesh


@contextmanager
def proxied_mesh(model: Path) -> Iterator[Mesh]:
    """The same with a gRPC proxy in front of each expert worker, so without direct connections."""
    with pool_of_copies(model) as workers, ExitStack() as stack:
        proxies = {worker: stack.enter_context(MessageProxy(worker.address)) for worker in workers}
        addresses = [proxy.address for proxy in proxies.values()]
        with mesh_at(model, workers, addresses) as mesh:
            mesh.proxies = proxies
            yield mesh


@contextmanager
def mesh_in_namespaces(model: Path) -> Iterator[Mesh]:
    """The same with each expert worker in a network namespace of its own."""
    shares = shares_with_copies(MIXTRAL.num_experts, NUM_WORKERS, NUM_COPIES)
    with namespaces(NUM_WORKERS) as wires:
        members = [
            PoolWorker(
                *(model, share, ("--dtype", "float32", "--host", wire.host, "--insecure")),
                wire.program(),
                host=wire.host,
            )
            for share, wire in zip(shares, wires, strict=True)
        ]
        with running(members) as workers:
            addresses = [worker.address for worker in workers]
            with mesh_at(model, workers, addresses) as mesh:
                mesh.wires = dict(zip(workers, wires, strict=True))
                yield mesh


@contextmanager
def mesh_at(
    model: Path,
    workers: Sequence[PoolWorker],
    addresses: Sequence[str],
    *,
    dtype: str = "float32",
    program: Sequence[str] = COMMAND,
    flags: Sequence[str] = (),
) -> Iterator[Mesh]:
    """A gateway that finds workers at these addresses, which may be those of proxies."""
    flags = ("--threads", "1", *_PATIENCE, *flags)
    with gateway(model, addresses, *flags, dtype=dtype, program=program) as server:
        mesh = Mesh(workers, server)
        mesh.wait_all_ready()
        yield mesh


@contextmanager
def doomed_gateway(
    model: Path, addresses: Sequence[str], *flags: str, placement: str = "static"
) -> Iterator[Server]:
    """A gateway that need not end well."""
    arguments = ("gateway", str(model), "--dtype", "float32", "--placement", placement, *flags)
    server = start_server([*arguments, "--experts", ",".join(addresses)], name="doomed gateway")
    try:
        wait_ready(server.api)
        yield server
    finally:
        server.process.close()


def kill_tree(process: Managed) -> None:
    """Ends a process and all that it has started at once, as kill -9 does."""
    for each in processes_of(process.marker):
        each.send_signal(signal.SIGKILL)


def pool_of_copies(model: Path) -> AbstractContextManager[list[PoolWorker]]:
    """Three expert workers, each expert on two of them, all on one thread each."""
    shares = shares_with_copies(MIXTRAL.num_experts, NUM_WORKERS, NUM_COPIES)
    return expert_pool(model, shares, ("--dtype", "float32"))
