"""The gRPC server of an expert worker: from an open checkpoint to the end of a drain.

Threads: gRPC's pool (`expert-rpc`, one thread an open RPC), those of `DirectServer` and of
`Maintenance`, `scrubber`, `metrics`. `stop` ends all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from expert_worker.backend import ExpertBackend
from expert_worker.compiled_calls import CompiledCalls
from expert_worker.device_turn import DeviceTurn, NoTurn, Turn
from expert_worker.direct_server import (
    DirectCalls,
    DirectOffers,
    DirectServer,
    NoDirectServer,
    ParsedCalls,
    bind,
    port_error,
)
from expert_worker.drain import drain
from expert_worker.maintenance import Maintenance
from expert_worker.published_experts import PublishedExperts
from expert_worker.scrubber import make_scrubber
from expert_worker.servicer import ExpertServicer, zeros_message
from expert_worker.state import WorkerIdentity, WorkerState
from expert_worker.store import ExpertStore
from expertmesh.addresses import join_address
from expertmesh.descriptors import descriptor_limit
from expertmesh.errors import PortError
from expertmesh.grpc_options import Option, server_options
from expertmesh.transport import Plaintext, Transport
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import Received, max_message_bytes, receiver, sealed_receiver
from expertmesh.wire_encode import join_message
from expertmesh_kernels.cpu.words import HAS_FUTEX

SERVICE = "expertmesh.v1.ExpertService"
_SPARE_THREADS = 8  # health checks, orders and refusals beside the long-lived streams
_LAST_WORDS_S = 0.5  # for Watch streams to say that it drains
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _nobody_ends_it() -> None:
    """For a server that is stopped by whoever made it."""


def _nobody_asks(ready: bool) -> None:
    """For a server without an orchestrator."""


class ExpertServer:
    """One expert worker on a port. Serves from the start; healthy once `set_ready` was called.

    Args:
        store: Its experts; may be filled while it serves.
        identity: Who it is.
        host: Address to bind.
        port: Port to bind; 0 picks a free one.
        max_streams: Attention workers at a time, and gateways that watch.
        direct_port: Of direct connections; 0 picks a free one, None for gRPC alone.
        drain_grace_s: Longest time of a drain whose order does not say.
        scrub_mib_per_s: Of weights in memory that are looked at; 0 for none.
        on_drain: Called when a drain was ordered, in any thread; has `stop` called.
        transport: How it is connected to; plain text by default.
        on_ready: Called with True once it is healthy, and with False when it will refuse calls.

    Raises:
        PortError: An address cannot be bound.
    """

    def __init__(
        self,
        store: ExpertStore,
        identity: WorkerIdentity,
        host: str,
        port: int,
        max_streams: int,
        *,
        direct_port: int | None = 0,
        drain_grace_s: float = 1.0,
        scrub_mib_per_s: int = 0,
        on_drain: Callable[[], None] = _nobody_ends_it,
        on_ready: Callable[[bool], None] = _nobody_asks,
        transport: Transport | None = None,
    ) -> None:
        transport = transport or Plaintext()
        self._drain_grace_s = drain_grace_s
        self._on_drain = on_drain
        self._on_ready = on_ready
        is_compiled = direct_port is not None and _runs_compiled(store)
        turn = DeviceTurn() if is_compiled else NoTurn()
        self.backend = ExpertBackend(store, turn)
        self.state = WorkerState(identity, store)
        self._maintenance = Maintenance(self.state)
        self.scrubber = make_scrubber(store, self._maintenance.reload, scrub_mib_per_s)
        self._health = health.HealthServicer()
        limit = max_message_bytes(store.config, store.dtype, identity.row_credits)
        self._direct: DirectOffers = NoDirectServer()
        if direct_port is not None:
            self._direct = DirectServer(host, direct_port)
        self._servicer = ExpertServicer(
            self.state,
            self.backend,
            self._maintenance,
            max_streams,
            self._direct,
            self._order_drain,
        )
        self._calls = self._direct_calls(store, turn, limit)
        num_threads = 2 * max_streams + _SPARE_THREADS
        self._pool = ThreadPoolExecutor(num_threads, "expert-rpc")
        self._server = grpc.server(
            self._pool,
            options=[*server_options(limit), _bound_of_connections()],
            maximum_concurrent_rpcs=num_threads,
            compression=grpc.Compression.NoCompression,
        )
        self._server.add_generic_rpc_handlers((_handlers(self._servicer),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._set_health(_NOT_SERVING)
        try:
            self.port = _bind(self._server, transport, host, port)
        except PortError:
            self._direct.stop()
            raise

    def start(self) -> None:
        """Answers from now on."""
        self._direct.serve(self._calls.answer_all)
        self._server.start()
        self.scrubber.start()

    def warm_up(self, layer: int, expert: int) -> None:
        """Computes a row of zeros as if it came over the network; counts nothing."""
        limits = self._servicer.limits
        self._servicer.warm_up(layer, expert)
        self._calls.warm_up(zeros_message(layer, expert, limits.dtype, limits))

    def set_ready(self) -> None:
        """Healthy from now on."""
        self._set_health(_SERVING)
        self._on_ready(True)

    def stop(self, grace_s: float | None = None) -> None:
        """Drains, see `expert_worker.drain`, and ends all threads.

        Args:
            grace_s: Longest time of the drain, if it has not begun; by default that of the server.
        """
        self.state.begin_drain(self._drain_grace_s if grace_s is None else grace_s)
        drain(self.state, self._refuse)
        self.state.stop()
        self._health.enter_graceful_shutdown()
        self._server.stop(_LAST_WORDS_S).wait(2.0)
        self._direct.stop()
        self.scrubber.stop()
        self._maintenance.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _refuse(self) -> None:
        self._set_health(_NOT_SERVING)
        self._on_ready(False)

    def _order_drain(self, grace_s: float | None) -> None:
        self.state.begin_drain(self._drain_grace_s if grace_s is None else grace_s)
        self._on_drain()

    def _direct_calls(self, store: ExpertStore, turn: Turn, max_message_bytes: int) -> DirectCalls:
        servicer = self._servicer
        if not isinstance(turn, DeviceTurn):
            return ParsedCalls(servicer.answer, max_message_bytes)
        published = PublishedExperts(store.config, store.packed_likes(), turn)
        store.publish_to(published.publish)
        return CompiledCalls(self.state, published, turn, servicer, max_message_bytes)

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE):
            self._health.set(service, status)


def _bound_of_connections() -> Option:
    """Half of the descriptors is left for direct connections and weights."""
    return "grpc.max_allowed_incoming_connections", descriptor_limit() // 2


def _runs_compiled(store: ExpertStore) -> bool:
    """True if calls can be answered by compiled code that computes itself."""
    return HAS_FUTEX and store.device.type == "cpu" and bool(store.config.moe_layers)


M = TypeVar("M", bound=Message)


def _handlers(servicer: ExpertServicer) -> grpc.GenericRpcHandler:
    """Our own deserializers: bytes that are no message reach the servicer as such."""

    def stream_out(
        behaviour: Callable[..., Iterable[Message]], request: type[M]
    ) -> grpc.RpcMethodHandler[Received[M], Message]:
        return grpc.unary_stream_rpc_method_handler(behaviour, receiver(request), _to_bytes)

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Forward": grpc.stream_stream_rpc_method_handler(
                servicer.forward, sealed_receiver(pb.ForwardRequest), join_message
            ),
            "Watch": stream_out(servicer.watch, pb.WatchRequest),
            "LoadExperts": stream_out(servicer.load_experts, pb.LoadExpertsRequest),
            "UnloadExperts": stream_out(servicer.unload_experts, pb.UnloadExpertsRequest),
            "Drain": stream_out(servicer.drain, pb.DrainRequest),
        },
    )


def _to_bytes(message: Message) -> bytes:
    return message.SerializeToString()


def _bind(server: grpc.Server, transport: Transport, host: str, port: int) -> int:
    """Binds; the port. A plain socket tries first, as gRPC would log its own lines."""
    bind(host, port).close()
    try:
        return transport.bind(server, join_address(host, port))
    except RuntimeError as error:
        raise port_error(host, port, str(error)) from error
