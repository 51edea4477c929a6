"""The clients of a load: `python -m tests.chaos.harness.load_process PLAN`.

So many streams are open at a time; a client whose stream has ended, whether well or not, opens the
next. It goes on until standard input ends; then the open streams are read to their end. Lines of
JSON tell what came: `{"tokens": n}` often, and every stream once it has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import orjson

from tests.chaos.harness.streams import Json, Streamed, Workload, read_stream

TIMEOUT_S = 120.0
"""Of one stream."""
_REPORT_S = 0.02
_PAUSE_S = 0.05  # after a failure: a server that refuses is not asked without a pause


@dataclass(frozen=True)
class Plan:
    """What a load does."""

    ports: list[int]
    """HTTP ports on this machine; clients take turns."""
    num_streams: int
    workload: Workload
    count: int | None = None
    """How many requests in all; None for as many as there is time for."""

    def to_json(self) -> str:
        """For the command line."""
        return orjson.dumps(dataclasses.asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """From the command line."""
        values = orjson.loads(text)
        return cls(**{**values, "workload": Workload(**values["workload"])})


class _Clients:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._numbers: Iterator[int] = itertools.islice(itertools.count(), plan.count)
        self._stopping = asyncio.Event()
        self._streams: dict[int, Streamed] = {}
        self._num_ended_tokens = 0

    async def run(self) -> None:
        """Until standard input has ended, and all streams after it."""
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._on_input)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            reporter = asyncio.create_task(self._report())
            ports = self._plan.ports
            async with asyncio.TaskGroup() as clients:
                for index in range(self._plan.num_streams):
                    clients.create_task(self._client(session, ports[index % len(ports)]))
            reporter.cancel()

    def _on_input(self) -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._stopping.set()

    async def _client(self, session: aiohttp.ClientSession, port: int) -> None:
        for number in self._numbers:
            if self._stopping.is_set():
                return
            kind = number % self._plan.workload.num_requests
            stream = self._streams[number] = Streamed(kind, time.monotonic())
            await read_stream(session, port, self._plan.workload.body(stream.number), stream)
            del self._streams[number]
            self._num_ended_tokens += len(stream.tokens)
            _say({"stream": dataclasses.asdict(stream)})
            if stream.error:
                await asyncio.sleep(_PAUSE_S)

    async def _report(self) -> None:
        while True:
            _say({"tokens": self._num_ended_tokens + self._num_open_tokens()})
            await asyncio.sleep(_REPORT_S)

    def _num_open_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self._streams.values())


def _say(value: Json) -> None:
    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Runs the clients of the plan on the command line."""
    gc.freeze()
    asyncio.run(_Clients(Plan.from_json(sys.argv[1])).run())


if __name__ == "__main__":
    main()
