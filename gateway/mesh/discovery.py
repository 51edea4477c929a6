"""Where expert workers may be: addresses, from whatever knows them.

Discovery only names addresses; what an expert worker there holds and whether it can be used is
found out by `gateway.mesh.membership`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, Self

from expertmesh.errors import SettingsError
from expertmesh.settings import split_address

Addresses = tuple[str, ...]
"""host:port of each expert worker, ascending, each once."""


class Discovery(Protocol):
    """A source of addresses that may change. Methods may be called from any thread."""

    def start(self, on_change: Callable[[Addresses], None]) -> None:
        """Begins; `on_change` gets the addresses at once and whenever they change."""

    def stop(self) -> None:
        """Ends; `on_change` is not called afterwards."""


class StaticDiscovery:
    """A fixed list.

    Args:
        addresses: host:port, or [host]:port for IPv6.

    Raises:
        SettingsError: An address is malformed or named twice.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        named = [address.strip() for address in addresses]
        for address in named:
            split_address("experts", address)
        if repeated := {address for address in named if named.count(address) > 1}:
            raise SettingsError(f"experts names {min(repeated)} twice, expected each address once")
        self.addresses: Addresses = tuple(sorted(named))

    @classmethod
    def parse(cls, text: str) -> Self:
        """A list like `10.0.0.1:50061,10.0.0.2:50061`; empty for none."""
        return cls(text.split(",") if text.strip() else ())

    def start(self, on_change: Callable[[Addresses], None]) -> None:
        """Tells the addresses once."""
        on_change(self.addresses)

    def stop(self) -> None:
        """Nothing runs."""
