"""Endpoints under /v1/moe: the mesh as the live page and the commands see it; /metrics/experts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
from aiohttp import web

from expertmesh.errors import RequestError
from gateway.openai.event_stream import EventStream
from gateway.service import GenerationFrontend
from gateway.telemetry.exposition import CONTENT_TYPE, ExpertExposition
from gateway.telemetry.streams import OverviewTicks
from gateway.telemetry.telemetry import Telemetry
from gateway.telemetry.views import Json, experts_view, placement_view, workers_view

EXPERT_METRICS_PATH = "/metrics/experts"

_WINDOWS: dict[str, float | None] = {"10": 10.0, "60": 60.0, "300": 300.0, "all": None}
_DEFAULT_WINDOW = "60"


class MoeHandlers:
    """Handlers over one telemetry.

    Args:
        telemetry: What is shown.
        frontend: Says whether the gateway stops, and its limits.
    """

    def __init__(self, telemetry: Telemetry, frontend: GenerationFrontend) -> None:
        self._telemetry = telemetry
        self._ticks = OverviewTicks(telemetry, lambda: frontend.accepting)
        self._write_timeout_s = frontend.limits.write_timeout_s
        self._exposition = ExpertExposition(telemetry.sources)

    def add_to(self, app: web.Application) -> None:
        """Puts the endpoints; streams end when the application shuts down."""
        app.on_shutdown.append(self._ticks.end)
        app.router.add_get("/v1/moe/experts", self.experts)
        app.router.add_get("/v1/moe/workers", self.workers)
        app.router.add_get("/v1/moe/placement", self.placement)
        app.router.add_get("/v1/moe/stream", self.stream)
        app.router.add_get(EXPERT_METRICS_PATH, self.metrics)

    async def experts(self, request: web.Request) -> web.Response:
        """How each expert was used."""
        window_s = _window(request)
        return await _answer(lambda: experts_view(self._telemetry, window_s))

    async def workers(self, request: web.Request) -> web.Response:
        """What each expert worker does, and who is slow."""
        return await _answer(lambda: workers_view(self._telemetry))

    async def placement(self, request: web.Request) -> web.Response:
        """Who holds what, and what is planned."""
        return await _answer(lambda: placement_view(self._telemetry))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Everything at a glance, once a second."""
        with self._ticks.subscribed():
            stream = EventStream(request, self._write_timeout_s)
            async for overview in self._ticks:
                await stream.send([overview])
            await stream.finish()
        return stream.response

    async def metrics(self, request: web.Request) -> web.Response:
        """The full matrix for Prometheus."""
        pieces = []
        for piece in self._exposition.pieces():
            pieces.append(piece)
            await asyncio.sleep(0)  # others are served
        return web.Response(body=b"".join(pieces), headers={"Content-Type": CONTENT_TYPE})


def _window(request: web.Request) -> float | None:
    asked = request.query.get("window", _DEFAULT_WINDOW)
    if asked not in _WINDOWS:
        known = ", ".join(_WINDOWS)
        raise RequestError(f"window is {asked[:20]!r}, expected one of {known}", param="window")
    return _WINDOWS[asked]


async def _answer(view: Callable[[], Json]) -> web.Response:
    """Made in a thread: other requests are answered while numpy counts."""
    body = await asyncio.to_thread(lambda: orjson.dumps(view(), option=orjson.OPT_SERIALIZE_NUMPY))
    headers = {"Cache-Control": "no-store"}
    return web.Response(body=body, content_type="application/json", headers=headers)
