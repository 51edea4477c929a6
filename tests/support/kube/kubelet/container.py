"""A container of the tests: a process of this machine, in a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ROOT

_INHERITED = ("LD_LIBRARY_PATH", "LANG", "GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY")


@dataclass(frozen=True)
class Lifeline:
    """A pipe whose end the processes of a mesh notice: nothing outlives a test that is killed.

    Args:
        read_fd: What processes inherit.
        marker: Is in the environment of all, so that they are found.
    """

    read_fd: int
    marker: str


def base_environment(lifeline: Lifeline) -> dict[str, str]:
    """What an image brings along; all else is up to the manifest."""
    found = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    programs = Path(sys.executable).parent
    return found | {
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "EXPERTMESH_LIFELINE_FD": str(lifeline.read_fd),
        "EXPERTMESH_TEST_TREE": lifeline.marker,
    }


class Container:
    """One process, from its start to its end.

    Args:
        command: What to run.
        variables: Its environment besides the image's.
        log: Output is added to this file.
        folder: Where it runs.
        lifeline: Ends it when the tests have ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        folder: Path,
        lifeline: Lifeline,
    ) -> None:
        self._command = list(command)
        self._environment = {**base_environment(lifeline), **variables}
        self._log, self._folder, self._lifeline = log, folder, lifeline
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the process."""
        self._process = await self._spawn(self._command)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._started.pid

    async def wait(self) -> int:
        """Its exit code; negative if a signal ended it. What it has left behind is killed."""
        code = await self._started.wait()
        self._kill_session(self._started)
        return code

    def terminate(self) -> None:
        """Asks it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and all it has started at once, as a container's end does."""
        self._signal(signal.SIGKILL)
        self._kill_session(self._started)

    async def execute(self, command: list[str], timeout_s: float) -> bool:
        """Runs another command beside it; whether that ended well in time."""
        process = await self._spawn(command)
        try:
            return await asyncio.wait_for(process.wait(), timeout_s) == 0
        except TimeoutError:
            return False
        finally:
            self._kill_session(process)
            await process.wait()

    @property
    def _started(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "it was not started"
        return self._process

    async def _spawn(self, command: list[str]) -> asyncio.subprocess.Process:
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                cwd=self._folder,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._lifeline.read_fd,),
                start_new_session=True,
            )

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._started.send_signal(number)

    @staticmethod
    def _kill_session(process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
