"""Sockets of the public APIs: bound early, so that a port in use is found before anything slow.

They listen only once there is something to serve, so that a client that is too early is refused
and not left waiting.
"""

from __future__ import annotations

import ipaddress
import socket

from expertmesh.errors import PortError


def bind(flag: str, host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet.

    Args:
        flag: Name of the port's command line flag, for the error message.
        host: Address or host name; empty for all interfaces.
        port: 0 picks a free one.

    Raises:
        PortError: The address cannot be bound; says why.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise PortError(f"cannot listen on {host!r}: {error.strerror or error}") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise port_error(flag, host, port, error) from error
    bound.setblocking(False)
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """True if only this machine can reach a bound socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def port_error(flag: str, host: str, port: int, error: OSError) -> PortError:
    """What to tell a user whose address cannot be used."""
    return PortError(
        f"cannot listen on {host}:{port}: {error.strerror or error}",
        fix=f"stop what uses the port, or choose another one with {flag} (0 picks one)",
    )


def check_free(flag: str, host: str, port: int) -> None:
    """Raises PortError if the address cannot be bound at the moment."""
    if port:
        bind(flag, host, port).close()
