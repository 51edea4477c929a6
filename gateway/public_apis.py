"""The public APIs of a gateway, HTTP and gRPC, from their ports to their end.

All methods run in the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket

from prometheus_client import CollectorRegistry

from expertmesh.settings import GatewaySettings
from gateway.admin_handlers import AdminAccess
from gateway.api_keys import ADMIN_DIGESTS_VARIABLE, ApiKeys
from gateway.api_tls import make_api_transport
from gateway.app import Access, build_app
from gateway.drain import drain
from gateway.grpc_api import GrpcServer
from gateway.http_connections import HttpRunner, make_runner
from gateway.listen import bind, check_free, is_loopback, port_error
from gateway.placement.operator import Operator
from gateway.reception import Reception
from gateway.service import GenerationFrontend
from gateway.telemetry.telemetry import Telemetry

_ANSWER_GRACE_S = 0.7
"""At the end, for connections to write what was decided."""


class PublicApis:
    """Both servers.

    Args:
        settings: Of the gateway.

    Raises:
        SettingsError: Keys or certificates cannot be used.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._socket: socket.socket | None = None
        self._runner: HttpRunner | None = None
        self._grpc: GrpcServer | None = None
        self._frontend: GenerationFrontend | None = None
        self._keys = ApiKeys.from_environment(file=settings.keys.api)
        self._admin_keys = ApiKeys.from_environment(ADMIN_DIGESTS_VARIABLE, settings.keys.admin)
        self._transport = make_api_transport(settings.http)

    def bind(self) -> None:
        """Takes the port of HTTP, and looks whether that of gRPC is free.

        Raises:
            PortError: An address cannot be bound.
        """
        http = self._settings.http
        self._socket = bind("--port", http.host, http.port)
        check_free("--grpc-port", http.host, http.grpc_port)

    async def open(
        self,
        frontend: GenerationFrontend,
        registry: CollectorRegistry,
        operator: Operator,
        telemetry: Telemetry,
    ) -> tuple[int, int]:
        """Serves from now on; returns the ports of HTTP and of gRPC.

        Args:
            frontend: Where answers come from.
            registry: What /metrics shows.
            operator: Does what operators ask.
            telemetry: What /v1/moe shows.

        Raises:
            PortError: A port was taken meanwhile.
        """
        assert self._socket is not None, "it is bound first"
        http = self._settings.http
        self._runner = make_runner(
            build_app(
                frontend,
                registry,
                access=Access(self._keys, self._admin_access(self._socket), http.origins),
                settings=dataclasses.asdict(self._settings),
                operator=operator,
                telemetry=telemetry,
            ),
            frontend.limits,
            stop_s=_ANSWER_GRACE_S,
        )
        await self._runner.setup()
        tls = self._transport
        self._grpc = GrpcServer(frontend, http.host, http.grpc_port, self._keys, tls)
        grpc_port = await self._grpc.start()
        port: int = self._socket.getsockname()[1]
        reception = Reception(self._runner, self._socket, registry, ssl_context=tls.ssl_context)
        try:
            await reception.start()
        except OSError as error:  # taken since it was bound
            raise port_error("--port", http.host, port, error) from error
        self._frontend = frontend
        return port, grpc_port

    async def drain(self, grace_s: float) -> None:
        """Refuses new clients and lets the requests of others finish, for this long."""
        if self._frontend is not None and self._runner is not None and self._grpc is not None:
            self._grpc.leave(grace_s)
            await drain(self._frontend, self._runner, grace_s)

    async def stop(self) -> None:
        """Answers what was decided, and ends both servers."""
        parts = []
        if self._runner is not None:
            parts.append(self._runner.cleanup())
        if self._grpc is not None:
            parts.append(self._grpc.stop(_ANSWER_GRACE_S))
        await asyncio.gather(*parts)
        if self._socket is not None:
            self._socket.close()

    def _admin_access(self, bound: socket.socket) -> AdminAccess:
        is_private = is_loopback(bound) and not self._keys.required
        return AdminAccess(self._admin_keys, is_private)
