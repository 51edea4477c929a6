"""The other ends of `bench.rpc`: `python -m bench.rpc_servers mesh|grpc|socket [SHARE]`.

Each prints its port and serves until its standard input is closed.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import grpc
import torch

from bench.rpc_wire import CREDITS, ECHO, INCARNATION, SIZES, demo_folder
from expert_worker.selection import parse_experts
from expert_worker.server import ExpertServer
from expert_worker.state import WorkerIdentity
from expert_worker.store import ExpertStore
from expertmesh.checkpoint import Checkpoint
from expertmesh_kernels.grouped_mlp import ExpertWeights, pack_expert
from expertmesh_kernels.host import TORCH_DTYPES

LAYER = 0


class NarrowStore(ExpertStore):
    """Experts of the model's hidden size that are one wide, so that they compute next to nothing.

    The kernel runs as always: compiled calls know no other.
    """

    def _read(self, layer: int, expert: int) -> ExpertWeights:
        hidden, dtype = self.config.hidden_size, TORCH_DTYPES[self.dtype]
        return pack_expert(torch.zeros(2, hidden, dtype=dtype), torch.zeros(hidden, 1, dtype=dtype))


def serve_mesh(share: str) -> None:
    """An expert worker whose experts compute next to nothing."""
    checkpoint = Checkpoint.open(demo_folder())
    store = NarrowStore(checkpoint, checkpoint.config.dtype)
    for expert in parse_experts(share, checkpoint.config.num_experts):
        store.load(LAYER, expert)
    identity = WorkerIdentity(f"worker-{share}", INCARNATION, b"none", CREDITS)
    server = ExpertServer(store, identity, "127.0.0.1", 0, 4)
    server.start()
    server.warm_up(LAYER, store.residency()[LAYER].resident[0])
    wait_for_end(server.port)
    server.stop(0.1)


def serve_grpc() -> None:
    """Answers bytes with bytes over one stream."""

    def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            yield reply_of(request)

    pool = ThreadPoolExecutor(4)
    server = grpc.server(pool, options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.stream_stream_rpc_method_handler(echo)
    service, method = ECHO.strip("/").split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    wait_for_end(port)
    server.stop(0.1).wait(2)


def serve_socket() -> None:
    """Answers bytes with bytes over plain sockets, a blocking thread each."""
    listener = socket.create_server(("127.0.0.1", 0))

    def echo(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(2**24)
        while head := connection.recv(4, socket.MSG_WAITALL):
            (length,) = struct.unpack("<I", head)
            view = memoryview(buffer)[:length]
            done = 0
            while done < length:
                done += connection.recv_into(view[done:])
            reply = reply_of(view)
            connection.sendall(struct.pack("<I", len(reply)) + reply)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    wait_for_end(listener.getsockname()[1])


def reply_of(request: bytes | memoryview) -> bytes:
    """As many bytes as the request asks for in its first four."""
    return _zeros(SIZES.unpack_from(request)[0])


@cache
def _zeros(length: int) -> bytes:
    return bytes(length)


def wait_for_end(port: int) -> None:
    """Says where it listens, and returns when nobody needs it any more."""
    print(port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    {"mesh": serve_mesh, "grpc": serve_grpc, "socket": serve_socket}[kind](*arguments)
