"""Streams that are always open, in a process of their own, so that nobody delays their clocks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import orjson

from tests.chaos.harness.load_process import TIMEOUT_S, Plan
from tests.chaos.harness.streams import Streamed, Workload
from tests.support.processes import ROOT, environment, poll


class Load:
    """So many streams at a time, over one HTTP server or several, until `finish`.

    Args:
        ports: HTTP ports on this machine; clients take turns.
        workload: The requests.
        num_streams: How many at a time.
        count: How many requests in all; None for as many as there is time for.
    """

    def __init__(
        self,
        ports: Sequence[int],
        workload: Workload,
        num_streams: int,
        *,
        count: int | None = None,
    ) -> None:
        self.num_tokens = 0
        """Tokens that arrived so far."""
        self.streams: list[Streamed] = []
        """All that have ended."""
        self._plan = Plan(list(ports), num_streams, workload, count)
        self._reader = threading.Thread(target=self._read, name="load-reader", daemon=True)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.harness.load_process", self._plan.to_json()],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def wait_tokens(self, count: int, *, timeout_s: float = 60.0) -> float:
        """Waits until so many more tokens have arrived; the seconds that took."""
        wanted = self.num_tokens + count
        return poll(lambda: self.num_tokens >= wanted, timeout_s=timeout_s, what="streams go on")

    def finish(self) -> list[Streamed]:
        """Opens no more streams, and returns all once they have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.wait()

    def wait(self) -> list[Streamed]:
        """All streams, once the load has come to its end."""
        exit_code = self._process.wait(2 * TIMEOUT_S)
        self._reader.join()
        assert exit_code == 0
        return self.streams

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = orjson.loads(line)
            if "stream" in news:
                self.streams.append(Streamed(**news["stream"]))
            else:
                self.num_tokens = news["tokens"]
