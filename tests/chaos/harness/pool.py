"""Expert workers on ports of their own that are killed, hung and started again while others serve.

A worker that is started again has the address it had, as a pod behind a stable name has, and stays
behind the others for the cores until it serves, as one of `expertmesh serve` does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from expertmesh.v1 import expert_service_pb2 as pb
from gateway.command.launcher import RESTART_NICENESS
from tests.support.mesh import COMMAND, assert_gone, watch_once
from tests.support.processes import Managed, free_port

HOST = "127.0.0.1"
EXPERT_WORKER = (*COMMAND, "expert-worker")
_STOP_TIMEOUT_S = 20.0
_TURN_S = 0.02  # of a slow one: more than a call takes, so that most calls meet a pause
_REVIVAL_S = 0.05  # from a death to the next life, at most


class PoolWorker:
    """One address, and the expert worker that serves there now.

    Args:
        model: Checkpoint folder.
        share: `--experts` of every life.
        flags: More flags of every life.
        program: What Python runs instead of `expertmesh expert-worker`.
        host: Where it is reached.
    """

    def __init__(
        self,
        model: Path,
        share: str,
        flags: Sequence[str] = (),
        program: Sequence[str] = EXPERT_WORKER,
        *,
        host: str = HOST,
    ) -> None:
        self._host = host
        self.port, self.direct_port = free_port(), free_port()
        self.share = share
        self._arguments = (
            *(*program, str(model), "--experts", share, "--threads", "1"),
            *("--port", str(self.port), "--direct-port", str(self.direct_port), *flags),
        )
        self._process: Managed | None = None

    @property
    def address(self) -> str:
        """host:port, without a proxy."""
        return f"{self._host}:{self.port}"

    @property
    def process(self) -> Managed:
        """The present life, or the last one."""
        assert self._process is not None, f"{self.address} was never started"
        return self._process

    @property
    def pid(self) -> int:
        """Of the present life."""
        return self.process.process.pid

    def start(self, *, env: Mapping[str, str] | None = None) -> None:
        """Starts the next life and returns at once."""
        behind = ("--start-niceness", str(RESTART_NICENESS)) if self._process is not None else ()
        self.forget()
        arguments = (*self._arguments, *behind)
        self._process = Managed(arguments, name=f"expert-worker {self.port}", env=env)

    def wait_ready(self) -> None:
        """Waits until it serves what it holds."""
        self.process.ready()

    def state(self) -> pb.WatchResponse:
        """A snapshot, not through a proxy."""
        return watch_once(self.address)

    def kill(self) -> None:
        """Ends it as kill -9 does."""
        os.kill(self.pid, signal.SIGKILL)

    def hang(self, for_s: float) -> None:
        """Stops all its threads, as SIGSTOP does, and lets them go on after so many seconds.

        A shell in a session of its own does both, so that it outlives whoever has asked for it.
        """
        commands = f"kill -STOP {self.pid}; sleep {for_s}; kill -CONT {self.pid}"
        subprocess.run(["sh", "-c", commands], check=True, start_new_session=True)

    @contextmanager
    def slowed(self, share: float) -> Iterator[None]:
        """Its threads run for so much of the time only, a little again and again."""
        ended = threading.Event()

        def take_turns() -> None:
            while not ended.is_set():
                os.kill(self.pid, signal.SIGSTOP)
                ended.wait(_TURN_S * (1.0 - share))
                os.kill(self.pid, signal.SIGCONT)
                ended.wait(_TURN_S * share)

        turns = threading.Thread(target=take_turns, name=f"slowed-{self.port}")
        turns.start()
        try:
            yield
        finally:
            ended.set()
            turns.join()

    def stop(self) -> None:
        """Asks it to end; fails unless it does, with exit code 0, and leaves nothing behind."""
        exit_code = self.process.stop(_STOP_TIMEOUT_S)
        assert exit_code == 0, self.process.stderr
        assert_gone(self.process, (self.port, self.direct_port))

    @property
    def is_alive(self) -> bool:
        """True from start until its end."""
        return self._process is not None and self._process.process.poll() is None

    def forget(self) -> None:
        """Ends what still runs, and drops its output."""
        if self._process is not None:
            self._process.close()
            self._process = None


@contextmanager
def expert_pool(
    model: Path,
    shares: Sequence[str],
    flags: Sequence[str] = (),
    *,
    program: Sequence[str] = EXPERT_WORKER,
) -> Iterator[list[PoolWorker]]:
    """A worker for each share, ready; each must end cleanly when it is asked to at the end.

    Args:
        model: Checkpoint folder.
        shares: `--experts` of each.
        flags: More flags of all.
        program: See `PoolWorker`.
    """
    with running([PoolWorker(model, share, flags, program) for share in shares]) as workers:
        yield workers


@contextmanager
def running(workers: list[PoolWorker]) -> Iterator[list[PoolWorker]]:
    """Workers, ready; each must end cleanly when it is asked to at the end."""
    with _pool(workers):
        start_all(workers)
        yield workers


@contextmanager
def empty_pool(
    model: Path, num_workers: int, flags: Sequence[str] = ()
) -> Iterator[list[PoolWorker]]:
    """Workers that are not started yet, and then hold nothing until they are told to."""
    with _pool([PoolWorker(model, "none", flags) for _ in range(num_workers)]) as workers:
        yield workers


def start_all(workers: Sequence[PoolWorker]) -> None:
    """Starts workers at the same time, and waits until they serve."""
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.wait_ready()


class Revival:
    """Starts each of some workers again as soon as it has died; a context.

    Args:
        workers: All of them; they are started, and nobody else starts them.
    """

    def __init__(self, workers: Sequence[PoolWorker]) -> None:
        self.num_deaths = 0
        """So far."""
        self._workers = workers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="revival")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_REVIVAL_S):
            for worker in self._workers:
                if not worker.is_alive:
                    self.num_deaths += 1
                    worker.start()


@contextmanager
def _pool(workers: list[PoolWorker]) -> Iterator[list[PoolWorker]]:
    try:
        yield workers
        for worker in workers:
            if worker.is_alive:
                worker.stop()
    finally:
        for worker in workers:
            worker.forget()


def shares_with_copies(num_experts: int, num_workers: int, num_copies: int) -> list[str]:
    """`--experts` of each worker, so that each expert is on `num_copies` of them."""
    return [
        ",".join(
            str(expert)
            for expert in range(num_experts)
            if (worker - expert) % num_workers < num_copies
        )
        for worker in range(num_workers)
    ]
