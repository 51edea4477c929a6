"""Who may have how many of a gateway's file descriptors.

Clients of both APIs have bounds that leave some free: for expert workers that are found, attention
workers that are started again, files that are read anew, and answers to those who come too much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from expertmesh.descriptors import descriptor_limit

_MOST_OWN = 1024
"""More than a gateway needs for hundreds of expert workers."""
_MOST_TURNED_AWAY = 64


@dataclass(frozen=True)
class DescriptorShares:
    """Bounds for clients."""

    below: int
    """Descriptors of HTTP connections have numbers below this."""
    grpc: int
    """gRPC connections at a time."""
    turned_away: int
    """HTTP connections too many at a time, which get an answer and end."""

    @classmethod
    def of(cls, limit: int) -> Self:
        """A quarter is for gRPC, and up to a quarter for the gateway itself.

        Args:
            limit: Descriptors that the process may have open.
        """
        grpc = limit // 4
        own = min(grpc, _MOST_OWN)
        return cls(limit - grpc - own, grpc, max(1, min(own // 4, _MOST_TURNED_AWAY)))

    @classmethod
    def now(cls) -> Self:
        """Of this process."""
        return cls.of(descriptor_limit())
