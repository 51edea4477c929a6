"""The streams to one life of an attention worker.

Threads, owned by the connection and ended by `close`: `attention-reader` takes step results,
`attention-observer` takes observations; gRPC has one more per stream that sends. A stream read has
no time limit of its own, so results go through a queue that is read with one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator

import grpc

from expertmesh.errors import PeerError
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.v1 import attention_service_pb2_grpc as pb_grpc

logger = logging.getLogger("gateway.attention")

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a Unix socket to a child of ours
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
_JOIN_S = 1.0

Observer = Callable[[pb.MembershipResponse], None]


class AttentionConnection:
    """Run and Membership streams over one Unix socket. Methods may be called from any thread.

    Args:
        socket_path: Where the attention worker listens.
        on_lost: Called once, in the reader thread, if the Run stream ends before `close`.
        on_observations: Takes observations, in the observer thread.
    """

    def __init__(
        self, socket_path: str, on_lost: Callable[[str], None], on_observations: Observer
    ) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket_path}", options=_CHANNEL_OPTIONS)
        self._stub = pb_grpc.AttentionServiceStub(self._channel)
        self._on_lost = on_lost
        self._on_observations = on_observations
        self._steps: queue.SimpleQueue[pb.RunRequest | None] = queue.SimpleQueue()  # few
        self._results: queue.SimpleQueue[pb.StepResponse | PeerError] = queue.SimpleQueue()
        self._maps = _LatestMap()
        self._closing = threading.Event()
        self._lost = ""
        self._calls: list[grpc.Call] = []
        self._threads: list[threading.Thread] = []

    def describe(self, timeout_s: float) -> pb.DescribeResponse:
        """What the attention worker is. Raises PeerError."""
        try:
            return self._stub.Describe(pb.DescribeRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise PeerError(f"attention worker does not answer: {_reason(error)}") from error

    def open(self) -> None:
        """Opens both streams; call once."""
        run = self._stub.Run(iter(self._steps.get, None))
        membership = self._stub.Membership(iter(self._maps))
        self._calls = [run, membership]
        self._threads = [
            threading.Thread(target=self._read, args=(run,), name="attention-reader", daemon=True),
            threading.Thread(
                target=self._observe, args=(membership,), name="attention-observer", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, step: pb.StepRequest) -> None:
        """Sends a step. Raises PeerError if the stream has ended."""
        if self._lost or self._closing.is_set():
            raise PeerError(self._lost or "attention worker is being stopped")
        self._steps.put(pb.RunRequest(step=step))

    def receive(self, timeout_s: float) -> pb.StepResponse:
        """Next result. Raises PeerError if the stream ends or the time is up."""
        try:
            result = self._results.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerError(f"attention worker did not answer within {timeout_s:g} s") from None
        if isinstance(result, PeerError):
            raise result
        return result

    def push_map(self, message: pb.MembershipRequest) -> None:
        """Sends an expert map; one that is not sent yet is replaced."""
        self._maps.put(message)

    def close(self) -> None:
        """Ends streams, threads and channel; a waiting `receive` fails."""
        self._closing.set()
        self._steps.put(None)
        self._maps.close()
        self._results.put(PeerError("attention worker is being stopped"))
        for call in self._calls:
            call.cancel()
        self._channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _read(self, run: Iterator[pb.RunResponse]) -> None:
        reason = "attention worker ended the stream"
        try:
            for response in run:
                self._results.put(response.step)
        except grpc.RpcError as error:
            reason = f"attention worker was lost: {_reason(error)}"
        if self._closing.is_set():
            return
        self._lost = reason
        self._results.put(PeerError(reason))
        self._on_lost(reason)

    def _observe(self, membership: Iterator[pb.MembershipResponse]) -> None:
        try:
            for response in membership:
                self._on_observations(response)
        except grpc.RpcError as error:
            if not self._closing.is_set():
                logger.warning("the Membership stream ended: %s", _reason(error))


class _LatestMap:
    """Iterator over expert maps that skips what was replaced before it was taken."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._latest: pb.MembershipRequest | None = None
        self._closed = False

    def put(self, message: pb.MembershipRequest) -> None:
        with self._changed:
            self._latest = message
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def __iter__(self) -> Iterator[pb.MembershipRequest]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._latest is not None)
                if self._closed or self._latest is None:
                    return
                message, self._latest = self._latest, None
            yield message


def _reason(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
