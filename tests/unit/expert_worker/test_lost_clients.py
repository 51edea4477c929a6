"""Gateways that are killed: what they had asked for is not computed, and nothing of them stays."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import grpc
import psutil
import pytest

from expert_worker.server import SERVICE, ExpertServer
from expertmesh.checksum import sealed
from expertmesh.direct import METADATA_KEY, connect, read_offer
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as rpc
from tests.support.direct_calls import framed, is_compiled
from tests.support.expert_wire import TIMEOUT_S, RawStream, busy_device, channel, request
from tests.support.processes import poll

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection, as the end of a process with unread bytes does."""


NUM_LOST = 6
NOTICED_S = 0.3
"""Generous: gRPC tells the end of one stream after the other, each in a thread of its own."""


class Client:
    """A Watch stream, a Forward stream and its direct connection, each with a call on its way."""

    def __init__(self, opened: grpc.Channel, message: bytes, *, resets: bool) -> None:
        self._ended = threading.Event()
        self._message = message
        self._watch = rpc.ExpertServiceStub(opened).Watch(pb.WatchRequest(hands_over=True))
        next(self._watch)
        self._forward = opened.stream_stream(f"/{SERVICE}/Forward", bytes, bytes)(self._requests())
        metadata = dict(self._forward.initial_metadata())
        port, token = read_offer(str(metadata[METADATA_KEY]))
        self._direct = connect("127.0.0.1", port, token, TIMEOUT_S)
        if resets:
            self._direct.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._direct.sendall(framed(message) * 3)

    def _requests(self) -> Iterator[bytes]:
        yield from [sealed(self._message)] * 3
        self._ended.wait(TIMEOUT_S)

    def vanish(self) -> None:
        """Ends without a word."""
        self._direct.close()
        self._forward.cancel()
        self._watch.cancel()
        self._ended.set()


def held() -> tuple[int, int]:
    """Open files of this process, and threads of direct connections."""
    direct = sum(thread.name.startswith("direct-") for thread in threading.enumerate())
    return psutil.Process().num_fds(), direct


def lose_one(server: ExpertServer, message: bytes, *, resets: bool) -> None:
    """A gateway is killed while its calls wait for the device."""
    calls = server.state.load().calls
    with channel(server) as opened, busy_device(server):
        client = Client(opened, message, resets=resets)
        try:
            poll(lambda: server.state.calls_in_flight == 2, timeout_s=TIMEOUT_S, what="both wait")
            assert server.state.num_hand_overs == 1
        finally:
            client.vanish()
        poll(lambda: server.state.num_hand_overs == 0, timeout_s=TIMEOUT_S, what="it is gone")
        threading.Event().wait(NOTICED_S)
    poll(lambda: server.state.calls_in_flight == 0, timeout_s=TIMEOUT_S, what="none is left")
    poll(lambda: server.state.num_streams == 0, timeout_s=TIMEOUT_S, what="no stream is open")
    assert server.state.load().calls == calls


@pytest.mark.parametrize("resets", [True, False])
def test_calls_of_a_killed_gateway_are_not_computed(server: ExpertServer, *, resets: bool) -> None:
    """Another one's are answered all the time; no stream, thread or file stays, however many go."""
    assert is_compiled(server)
    message = request(server).SerializeToString()
    with channel(server) as other:
        assert RawStream(other, [message]).read()[0].HasField("outputs")
        lose_one(server, message, resets=resets)  # what gRPC opens once, or nearly so
        files, threads = held()
        for _ in range(NUM_LOST):
            lose_one(server, message, resets=resets)
            assert RawStream(other, [message]).read()[0].HasField("outputs")

        def nothing_stays() -> bool:
            now = held()
            return now[0] < files + NUM_LOST and now[1] <= threads

        poll(nothing_stays, timeout_s=TIMEOUT_S, what=f"{files} files, {threads} threads")
