"""Streams to an attention worker over a real Unix socket: order, deadlines, death, the end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from expertmesh.errors import PeerError
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.v1 import attention_service_pb2_grpc as pb_grpc
from gateway.attention.connection import AttentionConnection

WAIT_S = 10.0


class Service(pb_grpc.AttentionServiceServicer):
    """Echoes step numbers unless it is mute, and remembers expert maps."""

    def __init__(self) -> None:
        self.mute = threading.Event()
        self.maps: queue.SimpleQueue[int] = queue.SimpleQueue()

    def Describe(
        self, request: pb.DescribeRequest, context: grpc.ServicerContext
    ) -> pb.DescribeResponse:
        """Something to recognise."""
        return pb.DescribeResponse(num_kv_blocks=7)

    def Run(
        self, request_iterator: Iterator[pb.RunRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.RunResponse]:
        """Answers each step with its number."""
        for request in request_iterator:
            if not self.mute.is_set():
                yield pb.RunResponse(step=pb.StepResponse(step=request.step.step))

    def Membership(
        self, request_iterator: Iterator[pb.MembershipRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.MembershipResponse]:
        """Answers each map with its epoch."""
        for request in request_iterator:
            self.maps.put(request.expert_map.epoch)
            yield pb.MembershipResponse(epoch=request.expert_map.epoch)


class Peer:
    """A service on a socket, the connection to it, and what the connection told."""

    def __init__(self, socket_path: str) -> None:
        self.service = Service()
        self._pool = ThreadPoolExecutor(4, "peer")
        self._server = grpc.server(self._pool)
        pb_grpc.add_AttentionServiceServicer_to_server(self.service, self._server)
        self._server.add_insecure_port(f"unix:{socket_path}")
        self._server.start()
        self.losses: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.epochs: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.connection = AttentionConnection(
            socket_path, self.losses.put, lambda response: self.epochs.put(response.epoch)
        )

    def die(self) -> None:
        """Ends all streams, as the death of the process does."""
        self._server.stop(None).wait(WAIT_S)

    def close(self) -> None:
        """Ends both sides."""
        self.connection.close()
        self.die()
        self._pool.shutdown()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """An open connection."""
    made = Peer(str(tmp_path / "s"))
    made.connection.open()
    yield made
    made.close()
    names = [thread.name for thread in threading.enumerate()]
    assert [name for name in names if name.startswith("attention")] == []


def step(number: int) -> pb.StepRequest:
    """A step without work."""
    return pb.StepRequest(step=number)


def test_results_come_in_step_order(peer: Peer) -> None:
    """Each step has its result."""
    assert peer.connection.describe(WAIT_S).num_kv_blocks == 7
    for number in (1, 2):
        peer.connection.send(step(number))
    assert [peer.connection.receive(WAIT_S).step for _ in range(2)] == [1, 2]


def test_a_missing_result_is_given_up(peer: Peer) -> None:
    """A hung attention worker costs the time limit, not more."""
    peer.service.mute.set()
    peer.connection.send(step(1))
    started_s = time.monotonic()
    with pytest.raises(PeerError, match=r"did not answer within 0\.2 s"):
        peer.connection.receive(0.2)
    assert time.monotonic() - started_s < 1.0


def test_death_is_noticed_at_once(peer: Peer) -> None:
    """Who waits for a result learns of it, and so does the owner; nothing can be sent then."""
    peer.connection.send(step(1))
    peer.connection.receive(WAIT_S)
    peer.die()
    died_s = time.monotonic()
    with pytest.raises(PeerError, match="attention worker"):
        peer.connection.receive(WAIT_S)
    assert time.monotonic() - died_s < 1.0
    assert "attention worker" in peer.losses.get(timeout=WAIT_S)
    with pytest.raises(PeerError):
        peer.connection.send(step(2))


def test_closing_ends_a_wait(peer: Peer) -> None:
    """A thread that waits for a result is released, and the owner hears of no loss."""
    peer.service.mute.set()
    peer.connection.send(step(1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(peer.connection.receive, WAIT_S)
        peer.connection.close()
        with pytest.raises(PeerError, match="being stopped"):
            waiting.result(WAIT_S)
    assert peer.losses.empty()


def test_maps_go_out_and_observations_come_in(peer: Peer) -> None:
    """The newest map always arrives; older ones may be skipped, never reordered."""
    for epoch in range(1, 6):
        update = pb.ExpertMapUpdate(epoch=epoch)
        peer.connection.push_map(pb.MembershipRequest(expert_map=update))
    seen = [peer.service.maps.get(timeout=WAIT_S)]
    while seen[-1] != 5:
        seen.append(peer.service.maps.get(timeout=WAIT_S))
    assert seen == sorted(set(seen))
    assert peer.epochs.get(timeout=WAIT_S) == seen[0]
