"""`python -m gateway --settings JSON`: a gateway as a child process, or the command line by hand.

With `--settings` the argument is `GatewaySettings.to_json()`; any other arguments are those of the
command `expertmesh`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import Callable

from expertmesh.descriptors import raise_descriptor_limit
from expertmesh.errors import StartupError
from expertmesh.logs import configure_logging
from expertmesh.processes import announce_failure, watch_lifeline
from expertmesh.settings import GatewaySettings


def run(settings: GatewaySettings) -> int:
    """Runs a gateway until it is told to stop; returns the exit code.

    The parent, if there is one, learns from the ready line why the gateway cannot start.
    """
    configure_logging(settings.log, "gateway")
    raise_descriptor_limit()
    watch_lifeline(lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(settings))
    except StartupError as error:
        announce_failure(error)
        return error.exit_code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: gRPC and HTTP answer about a fifth sooner on it."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


async def _serve(settings: GatewaySettings) -> int:
    from gateway.life import run_gateway

    return await run_gateway(settings)


def main(arguments: list[str]) -> int:
    """Exit code of `python -m gateway *arguments`."""
    if len(arguments) == 2 and arguments[0] == "--settings":
        try:
            settings = GatewaySettings.from_json(arguments[1])
        except StartupError as error:
            announce_failure(error)
            return error.exit_code
        return run(settings)
    from gateway.command.cli import run_command

    return run_command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
