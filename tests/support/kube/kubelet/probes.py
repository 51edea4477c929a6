"""Asks a container how it is, as a kubelet does: over gRPC, HTTP, or by a command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.kube.resources import Json

Execute = Callable[[list[str], float], Awaitable[bool]]
"""Runs a command in the container; whether it ended well within so many seconds."""


@dataclass(frozen=True)
class Probe:
    """A probe of a manifest.

    Args:
        manifest: Of the probe.
        container: Of the container, for names of ports.
        address: Of the pod.
        execute: Runs commands in the container.
    """

    manifest: Json
    container: Json
    address: str
    execute: Execute

    @property
    def period_s(self) -> float:
        """Between two attempts."""
        return float(self.manifest.get("periodSeconds", 10))

    @property
    def delay_s(self) -> float:
        """Before the first."""
        return float(self.manifest.get("initialDelaySeconds", 0))

    @property
    def failure_threshold(self) -> int:
        """So many failures in a row count."""
        return int(self.manifest.get("failureThreshold", 3))

    async def ask(self) -> bool:
        """Whether the container says that all is well."""
        timeout_s = float(self.manifest.get("timeoutSeconds", 1))
        if grpc_probe := self.manifest.get("grpc"):
            target = f"{self.address}:{grpc_probe['port']}"
            service = grpc_probe.get("service", "")
            return await asyncio.to_thread(_ask_grpc, target, service, timeout_s)
        if http := self.manifest.get("httpGet"):
            url = f"http://{self.address}:{self._port(http['port'])}{http.get('path', '/')}"
            return await _ask_http(url, timeout_s)
        return await self.execute(self.manifest["exec"]["command"], timeout_s)

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        named = {each["name"]: each["containerPort"] for each in self.container["ports"]}
        return named[port]


def _ask_grpc(target: str, service: str, timeout_s: float) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _ask_http(url: str, timeout_s: float) -> bool:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url) as response,
        ):
            return 200 <= response.status < 400
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
