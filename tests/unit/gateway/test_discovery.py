"""Where expert workers are found, without Kubernetes."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from expertmesh.expert_source import DnsName
from gateway.mesh.discovery import Endpoint, Endpoints, StaticDiscovery
from gateway.mesh.dns_discovery import DnsDiscovery

PORT = 50061
WAIT_S = 10.0


def test_a_list_is_told_at_start() -> None:
    """Once, and sorted."""
    heard: list[Endpoints] = []
    discovery = StaticDiscovery(("b:1", "a:1"))
    discovery.start(heard.append)
    discovery.stop()
    assert heard == [(Endpoint("a:1"), Endpoint("b:1"))]
    assert discovery.report().num_up == 2


class Resolver:
    """Answers for DNS."""

    def __init__(self) -> None:
        self.hosts: tuple[str, ...] | None = ()
        """None: the name does not resolve."""
        self._num_asked = 0
        self._asked = threading.Condition()

    def __call__(self, host: str, port: int, type: int) -> list[tuple[object, ...]]:
        """As `socket.getaddrinfo`."""
        assert (host, port, type) == ("experts", PORT, socket.SOCK_STREAM)
        with self._asked:
            hosts = self.hosts
            self._num_asked += 1
            self._asked.notify()
        if hosts is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in host else socket.AF_INET, type, 6, "", (host, port))
            for host in hosts
        ]

    def wait(self) -> None:
        """Until the present answer has been used: until the question after the next."""
        with self._asked:
            enough = self._num_asked + 2
            assert self._asked.wait_for(lambda: self._num_asked >= enough, WAIT_S)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    """In place of the system's."""
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    return made


@pytest.fixture
def discovery() -> Iterator[DnsDiscovery]:
    """Stopped at the end."""
    made = DnsDiscovery(DnsName("experts", PORT), interval_s=0.01)
    yield made
    made.stop()
    assert "discovery" not in [thread.name for thread in threading.enumerate()]


def test_a_name_is_looked_up_again(resolver: Resolver, discovery: DnsDiscovery) -> None:
    """Changes are told, and nothing else; while the name does not resolve, the last view stays."""
    heard: queue.SimpleQueue[Endpoints] = queue.SimpleQueue()
    resolver.hosts = ("10.0.0.2", "10.0.0.1")
    discovery.start(heard.put)
    both = (Endpoint("10.0.0.1:50061"), Endpoint("10.0.0.2:50061"))
    assert heard.get(timeout=WAIT_S) == both
    resolver.hosts = None
    resolver.wait()
    report = discovery.report()
    assert (report.num_up, report.problem != "", report.num_errors > 0) == (2, True, True)
    assert report.age_s is not None
    resolver.hosts = ("10.0.0.2",)
    assert heard.get(timeout=WAIT_S) == both[1:]
    resolver.wait()
    assert discovery.report().problem == ""
    assert heard.empty()


def test_an_expert_worker_with_two_addresses_is_one(
    resolver: Resolver, discovery: DnsDiscovery
) -> None:
    """IPv4 is taken where there is any, else IPv6."""
    heard: queue.SimpleQueue[Endpoints] = queue.SimpleQueue()
    resolver.hosts = ("fd00::1", "10.0.0.1")
    discovery.start(heard.put)
    assert heard.get(timeout=WAIT_S) == (Endpoint("10.0.0.1:50061"),)
    resolver.hosts = ("fd00::1",)
    assert heard.get(timeout=WAIT_S) == (Endpoint("[fd00::1]:50061"),)


def test_a_name_that_never_resolves_is_told(resolver: Resolver, discovery: DnsDiscovery) -> None:
    """In the report; no endpoints are made up."""
    heard: list[Endpoints] = []
    resolver.hosts = None
    discovery.start(heard.append)
    resolver.wait()
    report = discovery.report()
    assert report.problem == "experts does not resolve: [Errno -2] Name or service not known"
    assert report.age_s is None
    assert heard == []
