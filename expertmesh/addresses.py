"""Addresses of processes: host:port, with IPv6 hosts in brackets."""

from __future__ import annotations

from expertmesh.errors import SettingsError


def split_address(name: str, address: str) -> tuple[str, int]:
    """Host and port of `host:port` (`[host]:port` for IPv6). Raises SettingsError.

    Args:
        name: The setting, for the message.
        address: What to split.
    """
    host, colon, port = address.rpartition(":")
    if colon and host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535:
        return host.removeprefix("[").removesuffix("]"), int(port)
    raise SettingsError(f"{name} has {address!r}, expected host:port with a port of 1 to 65535")


def join_address(host: str, port: int) -> str:
    """Inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
