"""The life of a gateway process: it starts, serves until a signal, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from expertmesh.errors import StartupError
from expertmesh.processes import announce_ready
from expertmesh.quiet_gc import QuietGc
from expertmesh.settings import GatewaySettings
from expertmesh.tls_settings import warn_of_exposure
from gateway.server import Gateway

logger = logging.getLogger("gateway")


async def run_gateway(settings: GatewaySettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code.

    Raises:
        StartupError: The gateway cannot start; says why and what to do.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    warn_of_exposure(settings.http.host, encrypted=bool(settings.http.api_tls_cert_file))
    gateway = Gateway(settings)
    try:
        if await start_unless(gateway, stopping):
            announce_ready(gateway.info)
            logger.info("%s", gateway.summary())
            mesh = gateway.mesh()
            if mesh.uncovered and not mesh.workers:
                logger.warning("not ready: %s", mesh.message)
            with QuietGc(gateway.work_done):
                await stopping.wait()
            logger.info("stopping")
            await gateway.drain(settings.engine.drain_grace_s)
    finally:
        await gateway.stop()
    return 0


async def start_unless(gateway: Gateway, stopping: asyncio.Event) -> bool:
    """Starts the gateway; False if it is told to stop meanwhile."""
    starting = asyncio.create_task(gateway.start())
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if starting.done():
        starting.result()
        return True
    await gateway.interrupt()
    with contextlib.suppress(StartupError):  # it was interrupted by us
        await starting
    return False
