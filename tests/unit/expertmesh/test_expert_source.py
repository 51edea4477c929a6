"""Where expert workers are looked for: what may be written, and what a mistake is answered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.addresses import join_address, split_address
from expertmesh.errors import SettingsError
from expertmesh.expert_source import (
    AddressList,
    DnsName,
    ExpertSource,
    KubernetesService,
    parse_experts,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AddressList()),
        ("  ", AddressList()),
        ("b:2,a:1", AddressList(("b:2", "a:1"))),
        (" 10.0.0.1:50061 , [::1]:50062 ", AddressList(("10.0.0.1:50061", "[::1]:50062"))),
        ("dns:experts.mesh.svc:50061", DnsName("experts.mesh.svc", 50061)),
        ("k8s:experts", KubernetesService("experts")),
        ("k8s:mesh/experts", KubernetesService("experts", "mesh")),
        ("k8s:experts:data", KubernetesService("experts", port_name="data")),
        ("k8s:mesh/experts:data", KubernetesService("experts", "mesh", "data")),
    ],
)
def test_what_is_understood(text: str, expected: ExpertSource) -> None:
    """A list in its order, a name, or a Service whose port is called grpc unless named."""
    assert parse_experts(text) == expected


@pytest.mark.parametrize(
    "text",
    ["host", "host:", ":1", "host:0", "host:65536", "host:x", "a:1,,b:2", "host:-1", "dns:name"],
)
def test_a_malformed_address_is_named(text: str) -> None:
    """The error names the offending address and what was expected."""
    with pytest.raises(SettingsError, match=r"experts has '.*', expected host:port"):
        parse_experts(text)


@pytest.mark.parametrize("text", ["k8s:", "k8s:A", "k8s:/a", "k8s:a/b/c", "k8s:a:", "k8s:a b"])
def test_a_malformed_service_is_named(text: str) -> None:
    """With all that may be written."""
    with pytest.raises(SettingsError, match=r"experts is 'k8s:.*', expected k8s:SERVICE, k8s:NAME"):
        parse_experts(text)


def test_an_address_may_be_named_once() -> None:
    """The same address twice is a mistake, not two expert workers."""
    with pytest.raises(SettingsError, match="experts names a:1 twice"):
        parse_experts("a:1,b:2,a:1")


@given(st.text(max_size=20))
def test_split_address_never_fails_otherwise(text: str) -> None:
    """Any text is an address with a valid port, or a SettingsError; joined, it is the same."""
    try:
        host, port = split_address("experts", text)
    except SettingsError:
        return
    assert host
    assert 1 <= port <= 65_535
    assert split_address("experts", join_address(host, port)) == (host, port)
