"""Starts real ExpertMesh processes for tests, reads their ready line, and proves that they end.

Every process of a tree carries a marker in its environment, so that children which lost their
parent are still found. Output goes to files: a pipe that nobody reads would block the process.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 120.0
"""Generous: the machine may be busy, and kernels may have to be compiled once."""

_MARKER = "EXPERTMESH_TEST_TREE"


class ProcessEndedError(AssertionError):
    """A process ended or stayed silent where it should have become ready."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of this process, with the source tree importable."""
    merged = {**os.environ, **(extra or {})}
    paths = [*filter(None, [(extra or {}).get("PYTHONPATH")]), str(ROOT), str(ROOT / "kernels")]
    merged["PYTHONPATH"] = os.pathsep.join(paths)
    merged["PYTHONUNBUFFERED"] = "1"
    merged["NO_COLOR"] = "1"
    merged["COLUMNS"] = "200"
    return merged


def poll(condition: Callable[[], bool], *, timeout_s: float, what: str) -> float:
    """Waits until `condition()` holds and returns the seconds it took; fails after `timeout_s`."""
    started = time.monotonic()
    pause, _ = socket.socketpair()
    with pause, _:
        while not condition():
            waited = time.monotonic() - started
            assert waited < timeout_s, f"{what}: not within {timeout_s} s"
            select.select([pause], [], [], 0.02)
    return time.monotonic() - started


def processes_of(marker: str) -> list[psutil.Process]:
    """Live processes whose environment carries the marker; zombies do not count."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(_MARKER) == marker:
                found.append(process)
        except psutil.Error:
            continue
    return found


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """The process does nothing meanwhile."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """True if a new server could listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Managed:
    """One process under test, with everything it starts.

    Args:
        argv: Arguments after the Python interpreter, e.g. `["-m", "gateway", "serve"]`.
        name: For messages.
        env: Additions to the environment.
    """

    def __init__(
        self, argv: Sequence[str], *, name: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.marker = uuid.uuid4().hex
        self._folder = Path(tempfile.mkdtemp(prefix="expertmesh-test-"))
        self._ready_fd, ready_write = os.pipe()
        lifeline_read, self._lifeline_fd = os.pipe()
        passed = {
            _MARKER: self.marker,
            "EXPERTMESH_READY_FD": str(ready_write),
            "EXPERTMESH_LIFELINE_FD": str(lifeline_read),
        }
        with (
            (self._folder / "stdout").open("wb") as stdout,
            (self._folder / "stderr").open("wb") as stderr,
        ):
            self.process = subprocess.Popen(
                [sys.executable, *argv],
                cwd=self._folder,
                env=environment({**(env or {}), **passed}),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(ready_write, lifeline_read),
                process_group=0,  # in our session, where priorities of processes count
            )
        os.close(ready_write)
        os.close(lifeline_read)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ready(self, timeout_s: float = READY_TIMEOUT_S) -> dict[str, object]:
        """The ready line as a dictionary; ProcessEndedError with the log if none comes."""
        deadline = time.monotonic() + timeout_s
        received = b""
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self._ready_fd], [], [], max(0.0, left))
            chunk = os.read(self._ready_fd, 65536) if readable else b""
            if not chunk:
                raise ProcessEndedError(f"{self.name} is not ready\n{self.stdout}\n{self.stderr}")
            received += chunk
        message: dict[str, object] = json.loads(received)
        if "error" in message:
            raise ProcessEndedError(f"{self.name}: {message}\n{self.stderr}")
        return message

    @property
    def stdout(self) -> str:
        """What it has written to standard output so far."""
        return (self._folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has written to standard error so far."""
        return (self._folder / "stderr").read_text(errors="replace")

    def descendants(self) -> list[psutil.Process]:
        """All live processes of the tree but the first."""
        return [p for p in processes_of(self.marker) if p.pid != self.process.pid]

    def wait(self, timeout_s: float) -> int:
        """The exit code; fails if the process does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            alive = [f"{p.pid} {p.status()} {p.cmdline()[:4]}" for p in processes_of(self.marker)]
            raise ProcessEndedError(
                f"{self.name} still runs after {timeout_s} s: {alive}\n{self.stderr}"
            ) from None

    def stop(self, timeout_s: float = 10.0, *, sign: signal.Signals = signal.SIGTERM) -> int:
        """Asks it to end and returns the exit code."""
        self.process.send_signal(sign)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """Ends this process at once, as kill -9 does; its children are left to themselves."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """Stops what still runs, kills what does not stop, and forgets the output."""
        if self.process.poll() is None:
            self.process.terminate()
        psutil.wait_procs(processes_of(self.marker), timeout=8)
        for process in processes_of(self.marker):
            process.kill()
        self.process.wait(10)
        for descriptor in (self._ready_fd, self._lifeline_fd):
            os.close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)


def run(
    argv: Sequence[str], *, timeout_s: float = 30.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python *argv` to its end and captures its output."""
    return subprocess.run(
        [sys.executable, *argv],
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
