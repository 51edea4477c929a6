"""The last requests of a gateway that was told to stop.

A client that keeps its connection cannot know that the gateway stops before it has read an answer
that says so. So whoever was connected by then is served on, and each answer closes its connection;
the next one leads elsewhere. A stream that began earlier does not say so: the client may send one
more request right after it.
"""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web

from gateway.service import GenerationFrontend

logger = logging.getLogger("gateway")

_POLL_S = 0.02
_LAST_REQUEST_S = 1.0
"""After the last answer, for a request that is already on its way by a connection that is open."""


async def drain(frontend: GenerationFrontend, runner: web.AppRunner, grace_s: float) -> None:
    """Refuses new clients, and returns once others have their answers, or after `grace_s`."""
    frontend.stop_accepting()
    busy_s = time.monotonic()
    deadline_s = busy_s + grace_s
    while (now_s := time.monotonic()) < deadline_s:
        if _num_requests(frontend):
            busy_s = now_s
        elif not _num_connections(runner) or now_s - busy_s > _LAST_REQUEST_S:
            return
        await asyncio.sleep(_POLL_S)
    if count := _num_requests(frontend):
        logger.warning("ending %d requests", count)


def _num_requests(frontend: GenerationFrontend) -> int:
    stats = frontend.stats()
    return stats.num_running + stats.num_waiting


def _num_connections(runner: web.AppRunner) -> int:
    return 0 if runner.server is None else len(runner.server.connections)
