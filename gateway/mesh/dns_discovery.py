"""Discovery by a name of DNS that stands for all expert workers, such as a headless Service.

Thread: `discovery` asks again and again; a resolver cannot be interrupted, so at the end it may
outlive `stop` by the resolver's own time limit.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from dataclasses import replace

from expertmesh.addresses import join_address
from expertmesh.expert_source import DnsName
from gateway.mesh.discovery import DiscoveryReport, Endpoint, Endpoints, OnEndpoints

logger = logging.getLogger("gateway.discovery")

INTERVAL_S = 3.0
_JOIN_S = 2.0


class DnsDiscovery:
    """All addresses of a name. While it does not resolve, those known last are kept.

    Args:
        name: What to ask for, and the port of the expert workers.
        interval_s: Seconds between two questions, on average.
    """

    def __init__(self, name: DnsName, interval_s: float = INTERVAL_S) -> None:
        self._name = name
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._told: Endpoints | None = None
        self._certain_s: float | None = None
        self._report = DiscoveryReport(problem=f"{name.host}: not asked for yet")
        self._thread: threading.Thread | None = None

    def start(self, on_change: OnEndpoints) -> None:
        """Begins to ask."""
        self._thread = threading.Thread(
            target=self._run, args=(on_change,), name="discovery", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Asks no more."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def report(self) -> DiscoveryReport:
        """As of now."""
        certain_s = self._certain_s
        return replace(
            self._report, age_s=None if certain_s is None else time.monotonic() - certain_s
        )

    def _run(self, on_change: OnEndpoints) -> None:
        while not self._stopping.is_set():
            self._ask(on_change)
            self._stopping.wait(self._interval_s * random.uniform(0.8, 1.2))

    def _ask(self, on_change: OnEndpoints) -> None:
        try:
            endpoints = _resolved(self._name)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that is too long
            self._say(f"{self._name.host} does not resolve: {error}")
            self._report = replace(self._report, num_errors=self._report.num_errors + 1)
            return
        self._certain_s = time.monotonic()
        self._say("")
        self._report = replace(self._report, num_up=len(endpoints))
        if endpoints != self._told and not self._stopping.is_set():
            self._told = endpoints
            on_change(endpoints)

    def _say(self, problem: str) -> None:
        """Remembers what is wrong, and logs it if it is news."""
        if problem == self._report.problem:
            return
        if problem:
            logger.warning("no expert workers can be looked up: %s", problem)
        else:
            logger.info("expert workers are looked up at %s", self._name.host)
        self._report = replace(self._report, problem=problem)


def _resolved(name: DnsName) -> Endpoints:
    """Endpoints at its IPv4 addresses, or at its IPv6 addresses if it has no others: an expert
    worker that has both is one. Raises OSError."""
    found = socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for family, *_, address in found if family == socket.AF_INET}
    hosts = hosts or {str(address[0]) for *_, address in found}
    return tuple(Endpoint(address) for address in sorted(join_address(h, name.port) for h in hosts))
