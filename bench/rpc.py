"""Dispatch and combine through the real codec and streams, against echoes of the same bytes.

`python -m bench.rpc [--rows 1,8,32,512] [--workers 1,2] [--json FILE]`. Expert workers run in
processes of their own and compute next to nothing, so that what is measured is everything else. A
gRPC echo over one bidirectional stream and a blocking echo over a plain socket, in as many
processes, answer messages of the same size with as many bytes as an expert worker does. All three
take turns in one run, so that noise of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import numpy as np
import torch

from attention_worker.experts import RemoteExperts
from bench.rpc_wire import CREDITS, ECHO, INCARNATION, SIZES, demo_folder
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.placement import ExpertMap, ExpertWorkerEntry, expert_share
from expertmesh_kernels.host import TORCH_DTYPES
from expertmesh_kernels.router import Routing

LAYER = 0
TIMEOUT_S = 10.0
Call = Callable[[], object]


@dataclass
class Times:
    """Of one way to call: seconds of each call, and CPU seconds of this process for all."""

    walls: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def run(self, call: Call, num_calls: int) -> None:
        """Calls and measures."""
        cpu_s = time.process_time()
        for _ in range(num_calls):
            started_s = time.perf_counter()
            call()
            self.walls.append(time.perf_counter() - started_s)
        self.cpu_s += time.process_time() - cpu_s

    @property
    def p50_us(self) -> float:
        """Median of a call in microseconds."""
        return 1e6 * statistics.median(self.walls)

    @property
    def cpu_us(self) -> float:
        """CPU time of this process per call in microseconds."""
        return 1e6 * self.cpu_s / len(self.walls)


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    rows: int
    workers: int
    bytes_out: int
    bytes_back: int
    mesh_us: float
    grpc_us: float
    socket_us: float
    mesh_cpu_us: float
    grpc_cpu_us: float
    ratio: float
    """Mesh / gRPC echo."""


@contextmanager
def server(kind: str, *arguments: str) -> Iterator[int]:
    """A process of `bench.rpc_servers`; its port."""
    argv = [sys.executable, "-m", "bench.rpc_servers", kind, *arguments]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(10)


class GrpcEcho:
    """One stream to each port; writes to all, then reads from all."""

    def __init__(self, ports: Sequence[int], stack: ExitStack) -> None:
        self._outboxes: list[queue.SimpleQueue[bytes | None]] = []
        self._streams = []
        for port in ports:
            outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            options = [("grpc.max_receive_message_length", -1)]
            channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options))
            self._outboxes.append(outbox)
            self._streams.append(channel.stream_stream(ECHO)(iter(outbox.get, None)))
            stack.callback(outbox.put, None)

    def __call__(self, messages: Sequence[bytes]) -> None:
        for outbox, message in zip(self._outboxes, messages, strict=False):
            outbox.put(message)
        for stream, _ in zip(self._streams, messages, strict=False):
            next(stream)


class SocketEcho:
    """One connection to each port; writes to all, then reads from all."""

    def __init__(self, ports: Sequence[int], stack: ExitStack) -> None:
        self._sockets = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for port in ports
        ]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(2**24))

    def __call__(self, messages: Sequence[bytes]) -> None:
        for connection, message in zip(self._sockets, messages, strict=False):
            connection.sendall(struct.pack("<I", len(message)) + message)
        for connection, _ in zip(self._sockets, messages, strict=False):
            (length,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
            done = 0
            while done < length:
                done += connection.recv_into(self._buffer[done:length])


class Mesh:
    """A dispatch and its combine, as the forward pass does them."""

    def __init__(self, checkpoint: Checkpoint, ports: Sequence[int], stack: ExitStack) -> None:
        config = checkpoint.config
        entries = [
            ExpertWorkerEntry(
                f"worker-{index}",
                f"127.0.0.1:{port}",
                INCARNATION,
                {LAYER: tuple(expert_share(index, len(ports), config.num_experts))},
                CREDITS,
            )
            for index, port in enumerate(ports)
        ]
        self._config = config
        self.experts = RemoteExperts(config, checkpoint.fingerprint, config.dtype)
        stack.callback(self.experts.close)
        self.experts.warm_up()
        self.experts.update_map(ExpertMap.empty(config).replaced(entries), gateway=1)
        self._step = 0

    def call(self, num_rows: int) -> Call:
        """Rows at random, half of them generated."""
        rng = np.random.default_rng(num_rows)
        shape = (num_rows, self._config.hidden_size)
        h_TH = torch.from_numpy(rng.standard_normal(shape, np.float32))
        h_TH = h_TH.to(TORCH_DTYPES[self._config.dtype])
        scores = rng.random((num_rows, self._config.num_experts))
        ids_TK = np.ascontiguousarray(np.argsort(scores, axis=1)[:, :2].astype(np.int32))
        weights_TK = np.full((num_rows, 2), 0.5, np.float32)
        routing = Routing.of(ids_TK, weights_TK, self._config.num_experts)

        def dispatch_and_combine() -> None:
            self._step += 1
            self.experts.begin_step(self._step)
            deadline_s = time.monotonic() + TIMEOUT_S
            self.experts.dispatch(LAYER, h_TH, routing, num_rows // 2, deadline_s).result()

        return dispatch_and_combine

    def sizes(self, call: Call, num_workers: int) -> list[tuple[int, int]]:
        """Bytes out and back of each message of a call, payload alone."""
        self.experts.observations()
        call()
        seen = self.experts.observations()
        return [(entry.bytes_out, entry.bytes_back) for entry in seen]


def measure(options: argparse.Namespace) -> list[Result]:
    """Starts everything, takes turns, and stops everything."""
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(demo_folder())
    results = []
    with ExitStack() as stack:
        for workers in options.workers:
            shares = [f"{index}/{workers}" for index in range(workers)]
            mesh_ports = [stack.enter_context(server("mesh", share)) for share in shares]
            mesh = Mesh(checkpoint, mesh_ports, stack)
            echoes = (
                GrpcEcho([stack.enter_context(server("grpc")) for _ in shares], stack),
                SocketEcho([stack.enter_context(server("socket")) for _ in shares], stack),
            )
            _wait_until_up(mesh)
            for rows in options.rows:
                results.append(_take_turns(mesh, echoes, rows, workers, options))
                _print(results[-1])
    return results


def _wait_until_up(mesh: Mesh) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return mesh.call(8)()
        except ExpertUnavailableError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _take_turns(
    mesh: Mesh,
    echoes: tuple[GrpcEcho, SocketEcho],
    rows: int,
    workers: int,
    options: argparse.Namespace,
) -> Result:
    dispatch = mesh.call(rows)
    sizes = mesh.sizes(dispatch, workers)
    messages = [SIZES.pack(back) + bytes(max(0, out - SIZES.size)) for out, back in sizes]
    ways: list[Call] = [dispatch, *((lambda echo=echo: echo(messages)) for echo in echoes)]
    times = [Times() for _ in ways]
    per_turn = max(1, options.calls // options.turns)
    for way in ways:
        Times().run(way, per_turn)  # warms up
    for _ in range(options.turns):
        for one, way in zip(times, ways, strict=True):
            one.run(way, per_turn)
    ours, raw, plain = times
    return Result(
        rows, workers, sum(out for out, _ in sizes), sum(back for _, back in sizes),
        ours.p50_us, raw.p50_us, plain.p50_us, ours.cpu_us, raw.cpu_us, ours.p50_us / raw.p50_us,
    )  # fmt: skip


def _print(result: Result) -> None:
    print(
        f"{result.rows:>5}{result.workers:>8}{result.bytes_out:>11}{result.bytes_back:>11}"
        f"{result.mesh_us:>10.0f}{result.grpc_us:>10.0f}{result.socket_us:>10.0f}"
        f"{result.mesh_cpu_us:>10.0f}{result.grpc_cpu_us:>10.0f}{result.ratio:>8.2f}",
        flush=True,
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Prints the table; writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=_numbers, default=[1, 8, 32, 512])
    parser.add_argument("--workers", type=_numbers, default=[1, 2])
    parser.add_argument("--calls", type=int, default=600, help="of each kind")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    print("medians in microseconds; cpu: of the calling process per call")
    print(
        f"{'rows':>5}{'workers':>8}{'bytes out':>11}{'back':>11}{'mesh':>10}{'gRPC':>10}"
        f"{'socket':>10}{'mesh cpu':>10}{'gRPC cpu':>10}{'ratio':>8}"
    )
    results = measure(options)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
