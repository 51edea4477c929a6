"""An expert worker that only has state: a real gRPC server whose snapshots a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc

from expertmesh import PROTOCOL_REVISION
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as pb_grpc


def snapshot(
    worker_id: str,
    fingerprint: bytes,
    resident: dict[int, list[int]],
    *,
    incarnation: int = 1,
    bytes_of: Callable[[int, int], int] | None = None,
) -> pb.WatchResponse:
    """A snapshot of a float32 expert worker.

    Args:
        worker_id: Its name.
        fingerprint: Of the model.
        resident: Layer to experts.
        incarnation: Which life of it.
        bytes_of: Fingerprint of a layer's expert; None for a worker that does not tell.
    """
    layers = [
        pb.LayerExperts(
            layer=layer,
            resident=ids,
            fingerprints=[bytes_of(layer, expert) for expert in ids] if bytes_of else (),
        )
        for layer, ids in resident.items()
    ]
    model = pb.ModelIdentity(fingerprint=fingerprint, name="tiny", dtype=pb.DTYPE_FLOAT32)
    return pb.WatchResponse(
        worker_id=worker_id,
        incarnation=incarnation,
        protocol_revision=PROTOCOL_REVISION,
        model=model,
        numerics_fingerprint=b"n" * 16,
        layers=layers,
        row_credits=64,
    )


class WatchServer(pb_grpc.ExpertServiceServicer):
    """Sends its state at once, after each change, and as a heartbeat unless it is mute."""

    def __init__(self, state: pb.WatchResponse, *, port: int = 0, mute: bool = False) -> None:
        self._changed = threading.Condition()
        self._state = state
        self._version = 1
        self._mute = mute
        self._stopping = False
        self._pool = ThreadPoolExecutor(4, "watch-server")
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_ExpertServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._server.stop(None).wait(5.0)
        self._pool.shutdown()

    def change(self, state: pb.WatchResponse) -> None:
        """Sends another state."""
        with self._changed:
            self._state = state
            self._version += 1
            self._changed.notify_all()

    def set_mute(self, mute: bool) -> None:
        """A mute server keeps its streams open and sends nothing, as a hung process does."""
        with self._changed:
            self._mute = mute
            self._changed.notify_all()

    def Watch(
        self, request: pb.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchResponse]:
        """The state, as `change` and `set_mute` say."""
        context.add_callback(self._wake)
        sent = 0
        while context.is_active() and not self._stopping:
            with self._changed:
                if sent and not self._mute:
                    self._changed.wait(request.heartbeat_ms / 1000)
                while self._mute and context.is_active() and not self._stopping:
                    self._changed.wait(10.0)
                state, sent = self._state, self._version
            yield state

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
