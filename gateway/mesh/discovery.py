"""Where expert workers may be: addresses, from whatever knows them.

Discovery only names addresses; what an expert worker there holds and whether it can be used is
found out by `gateway.mesh.membership`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, order=True)
class Endpoint:
    """Where an expert worker is."""

    address: str
    """host:port."""
    leaving: bool = False
    """It ends soon: it is asked only for what nobody else holds."""
    node: str = ""
    """Name of its machine; empty if only the expert worker can tell."""


Endpoints = tuple[Endpoint, ...]
"""By address, ascending, each address once."""
OnEndpoints = Callable[[Endpoints], None]


@dataclass(frozen=True)
class DiscoveryReport:
    """How discovery is doing, for metrics and for people."""

    num_up: int = 0
    """Expert workers that stay."""
    num_leaving: int = 0
    num_down: int = 0
    """Known, and not to be used: still starting, or ending."""
    age_s: float | None = None
    """Seconds since it was last certain; None if it never was, or cannot be wrong."""
    num_errors: int = 0
    problem: str = ""
    """Why it is not certain, or finds nothing; empty if nothing is wrong."""


class Discovery(Protocol):
    """A source of endpoints that may change. Methods may be called from any thread."""

    def start(self, on_change: OnEndpoints) -> None:
        """Begins; `on_change` gets the endpoints as soon as they are known, and whenever they
        change."""

    def stop(self) -> None:
        """Ends; `on_change` is not called afterwards."""

    def report(self) -> DiscoveryReport:
        """How it is doing."""


class StaticDiscovery:
    """A fixed list.

    Args:
        addresses: host:port, or [host]:port for IPv6, each once.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self.endpoints: Endpoints = tuple(Endpoint(address) for address in sorted(addresses))

    def start(self, on_change: OnEndpoints) -> None:
        """Tells the endpoints once."""
        on_change(self.endpoints)

    def stop(self) -> None:
        """Nothing runs."""

    def report(self) -> DiscoveryReport:
        """Nothing is uncertain."""
        return DiscoveryReport(num_up=len(self.endpoints))
