"""How much waits in the sockets of this machine to be sent to some addresses."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_PERIOD_S = 0.005
_CONNECTIONS = Path("/proc/net/tcp")


class QueuedBytes:
    """Looks again and again while the context is open. Thread: `queued-bytes`.

    Args:
        hosts: IPv4 addresses; all connections to one of them count together.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.most = 0
        """Bytes that waited for one address at a time, not acknowledged by it."""
        self._hosts = {_as_in_table(host) for host in hosts}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="queued-bytes")

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
        while not self._ended.wait(_PERIOD_S):
            waiting: Counter[str] = Counter()
            for line in _CONNECTIONS.read_text().splitlines()[1:]:
                words = line.split()
                waiting[words[2].partition(":")[0]] += int(words[4].partition(":")[0], 16)
            self.most = max(self.most, *(waiting[host] for host in self._hosts))


def _as_in_table(host: str) -> str:
    return f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}"
