"""Endpoints for orchestrators, load balancers and people who look after the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from expertmesh import PROTOCOL_REVISION, __version__
from gateway.openai.handlers import json_response
from gateway.openai.logprobs import Json
from gateway.sequence import EngineStats
from gateway.service import GenerationFrontend

OPEN_PATHS = frozenset(
    {"/health", "/ready", "/ping", "/version", "/metrics", "/metrics/experts", "/load"}
)
"""What needs no API key."""

Encoder = Callable[["CollectorRegistry | _OneFamily"], bytes]

_END = b"# EOF\n"


@dataclass(frozen=True)
class _OneFamily:
    """A registry with one family of metrics."""

    family: Metric

    def collect(self) -> Iterable[Metric]:
        """It."""
        return (self.family,)


class StatusHandlers:
    """Endpoints outside /v1.

    Args:
        frontend: Knows the state.
        registry: What /metrics shows.
        settings: What /server_info shows.
    """

    def __init__(
        self,
        frontend: GenerationFrontend,
        registry: CollectorRegistry,
        settings: Mapping[str, object],
    ) -> None:
        self._frontend = frontend
        self._registry = registry
        self._settings = settings

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Puts the endpoints."""
        router.add_get("/health", self.health)
        router.add_get("/ping", self.health)
        router.add_post("/ping", self.health)
        router.add_get("/ready", self.ready)
        router.add_get("/version", self.version)
        router.add_get("/metrics", self.metrics)
        router.add_get("/load", self.load)
        router.add_get("/server_info", self.server_info)

    async def health(self, request: web.Request) -> web.Response:
        """200 unless only a restart can help."""
        return web.Response(status=200 if self._frontend.alive else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """200 if a request can be served now; says what is missing in any case."""
        report = ready_report(self._frontend)
        return json_response(report, status=200 if report["ready"] else 503)

    async def version(self, request: web.Request) -> web.Response:
        """Versions of the product and of the wire protocol."""
        return json_response({"version": __version__, "protocol_revision": PROTOCOL_REVISION})

    async def load(self, request: web.Request) -> web.Response:
        """Requests that run or wait."""
        stats = self._frontend.stats()
        return json_response({"server_load": stats.num_running + stats.num_waiting})

    async def server_info(self, request: web.Request) -> web.Response:
        """What is served with which settings."""
        return json_response(
            {
                "version": __version__,
                "protocol_revision": PROTOCOL_REVISION,
                "model": self._frontend.model.name,
                "system_fingerprint": self._frontend.model.system_fingerprint,
                "settings": dict(self._settings),
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """All metrics, a family at a time: all together may take tens of milliseconds.

        A thread would not help: it has Python to itself for 5 ms at a time.
        """
        encode, content_type = _encoder(request.headers.get("Accept", ""))
        pieces = []
        for family in self._registry.collect():
            pieces.append(encode(_OneFamily(family)).removesuffix(_END))
            await asyncio.sleep(0)  # others are served
        pieces.append(encode(CollectorRegistry()))  # the end mark, in formats that have one
        return web.Response(body=b"".join(pieces), headers={"Content-Type": content_type})


def _encoder(accept: str) -> tuple[Encoder, str]:
    """What writes metrics as the client wants them, or plainly if that cannot be understood."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        return choose_encoder("")


def load_header(wanted: str, stats: EngineStats) -> str | None:
    """The load for load balancers that read it with each answer, as ORCA has it.

    Args:
        wanted: Format that the request asks for.
        stats: Load of the engine.

    Returns:
        Value of the header `endpoint-load-metrics`; None for an unknown format.
    """
    metrics = {
        "kv_cache_usage_perc": stats.kv_cache_usage,
        "num_requests_running": float(stats.num_running),
        "num_requests_waiting": float(stats.num_waiting),
    }
    match wanted.strip().upper():
        case "JSON":
            return f"JSON {orjson.dumps({'named_metrics': metrics}).decode()}"
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{k}={v}" for k, v in metrics.items())
    return None


def ready_report(frontend: GenerationFrontend) -> Json:
    """Body of /ready."""
    mesh = frontend.mesh()
    return {
        "ready": frontend.ready,
        "message": mesh.message if frontend.accepting else "the gateway is stopping",
        "epoch": mesh.epoch,
        "workers": [
            {
                "worker_id": worker.worker_id,
                "address": worker.address,
                "state": str(worker.state),
                "message": worker.message,
                "num_experts": worker.num_experts,
            }
            for worker in mesh.workers
        ],
        "uncovered": {str(layer): list(experts) for layer, experts in mesh.uncovered.items()},
    }
