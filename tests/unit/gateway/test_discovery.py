"""Addresses of expert workers: what a list may look like, and what a wrong one says."""

from __future__ import annotations

import pytest

from expertmesh.errors import SettingsError
from gateway.mesh.discovery import Addresses, StaticDiscovery


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("  ", ()),
        ("b:2,a:1", ("a:1", "b:2")),
        (" 10.0.0.1:50061 , [::1]:50062 ", ("10.0.0.1:50061", "[::1]:50062")),
    ],
)
def test_a_list_is_parsed(text: str, expected: Addresses) -> None:
    """Blanks are ignored, order does not matter, IPv6 hosts are in brackets."""
    assert StaticDiscovery.parse(text).addresses == expected


@pytest.mark.parametrize(
    "text", ["host", "host:", ":1", "host:0", "host:65536", "host:x", "a:1,,b:2", "host:-1"]
)
def test_a_malformed_address_is_named(text: str) -> None:
    """The error names the offending address and what was expected."""
    with pytest.raises(SettingsError, match=r"experts has '.*', expected host:port"):
        StaticDiscovery.parse(text)


def test_an_address_may_be_named_once() -> None:
    """The same address twice is a mistake, not two expert workers."""
    with pytest.raises(SettingsError, match="experts names a:1 twice"):
        StaticDiscovery.parse("a:1,b:2,a:1")


def test_the_addresses_are_told_at_start() -> None:
    """A listener gets the list once."""
    heard: list[Addresses] = []
    discovery = StaticDiscovery.parse("a:1")
    discovery.start(heard.append)
    discovery.stop()
    assert heard == [("a:1",)]
