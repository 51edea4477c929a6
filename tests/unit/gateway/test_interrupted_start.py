"""A gateway that is told to stop while it starts, and a command line while it is imported."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from expertmesh.errors import StartupError
from expertmesh.processes import child_environment
from expertmesh.settings import GatewaySettings, HttpSettings
from gateway.server import Gateway


async def test_told_to_stop_while_something_is_made() -> None:
    """What was being made is not gone on with, whatever it was."""
    gateway = Gateway(GatewaySettings(HttpSettings(port=0, grpc_port=0)))
    begun, may_end = threading.Event(), threading.Event()

    def make(value: int) -> int:
        begun.set()
        assert may_end.wait(10.0)
        return value

    making = asyncio.create_task(gateway._unless_interrupted(make, 1))
    await asyncio.to_thread(begun.wait)
    await gateway.interrupt()
    may_end.set()
    with pytest.raises(StartupError, match="told to stop"):
        await making


async def test_goes_on_otherwise() -> None:
    """It is handed out."""
    gateway = Gateway(GatewaySettings(HttpSettings(port=0, grpc_port=0)))
    assert await gateway._unless_interrupted(len, "four") == 4


def test_the_command_line_hears_a_signal_from_the_first_moment() -> None:
    """Before its imports are done, which take a second; it ends with 0, as nothing was begun."""
    code = (
        "import builtins, sys, time\n"
        "from gateway.command.entry import main\n"
        "found = builtins.__import__\n"
        "def slow(name, *arguments):\n"
        "    if name == 'gateway.command':\n"
        "        print('importing', flush=True)\n"
        "        time.sleep(30)\n"
        "    return found(name, *arguments)\n"
        "builtins.__import__ = slow\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10.0) == 0
