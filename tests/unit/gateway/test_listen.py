"""Binding the ports of the public APIs."""

from __future__ import annotations

import socket

import pytest

from expertmesh.errors import PortError
from gateway.listen import bind, check_free


def test_a_free_port_is_picked() -> None:
    """Port 0 becomes a real port; nobody can connect before it listens."""
    with bind("--port", "127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert port > 0
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_in_use_is_named_with_the_fix() -> None:
    """The error is one line with address, reason and the flag to change it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortError) as refused:
            check_free("--grpc-port", "127.0.0.1", port)
    assert refused.value.message == f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert "--grpc-port" in refused.value.fix
    assert "\n" not in str(refused.value)


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    """A host that is not ours is named."""
    with pytest.raises(PortError, match=r"cannot listen on 192\.0\.2\.1:80"):
        bind("--port", "192.0.2.1", 80)
