"""A gRPC server that answers the health checks of an orchestrator; see `expert_worker.probes`.

Kubernetes asks without TLS, so this port answers nothing but health checks. Threads: gRPC's pool
(`probe-rpc`), apart from those of calls: an expert worker with all its streams open is healthy.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health_pb2

from expert_worker.direct_server import bind
from expert_worker.probes import LIVENESS, READINESS, STARTUP
from expertmesh.addresses import join_address
from expertmesh.errors import PortError
from expertmesh.grpc_options import server_options

_NUM_THREADS = 2
_MAX_RPCS = 16
_MAX_MESSAGE_BYTES = 4096
_STOP_S = 0.2


class _Health:
    """What the services say."""

    def __init__(self) -> None:
        self._serving = {STARTUP: False, READINESS: False, LIVENESS: True}

    def set_ready(self, ready: bool) -> None:
        self._serving = {
            STARTUP: ready or self._serving[STARTUP], READINESS: ready, LIVENESS: True,
        }  # fmt: skip

    def check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        serving = self._serving.get(request.service)
        if serving is None:
            known = ", ".join(self._serving)
            context.abort(grpc.StatusCode.NOT_FOUND, f"no such service; known are {known}")
        response = health_pb2.HealthCheckResponse
        return response(status=response.SERVING if serving else response.NOT_SERVING)

    def handler(self) -> grpc.GenericRpcHandler:
        """Of grpc.health.v1 without `Watch`, which would hold a thread."""
        check = grpc.unary_unary_rpc_method_handler(
            self.check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})


class ProbeServer:
    """Answers from the start.

    Args:
        host: Address to bind.
        port: Port to bind; 0 picks a free one.

    Raises:
        PortError: The address cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        self._health = _Health()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "probe-rpc")
        self._server = grpc.server(
            self._pool,
            options=server_options(_MAX_MESSAGE_BYTES),
            maximum_concurrent_rpcs=_MAX_RPCS,
        )
        self._server.add_generic_rpc_handlers((self._health.handler(),))
        try:
            bind(host, port).close()  # says why; gRPC would log lines of its own
            self.port = self._server.add_insecure_port(join_address(host, port))
        except PortError as error:
            self._pool.shutdown()
            raise PortError(error.message, fix="choose another --health-port") from error
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        """What `readiness` says from now on, and `startup` for good if it is true."""
        self._health.set_ready(ready)

    def stop(self) -> None:
        """Ends all threads."""
        self._server.stop(_STOP_S).wait(2.0)
        self._pool.shutdown(wait=True, cancel_futures=True)
