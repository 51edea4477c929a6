"""What several slices say of a Service, merged: each pod once, each address once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.cluster.fields import JsonObject
from gateway.mesh.discovery import Endpoint
from gateway.mesh.endpoint_slices import ServiceView, read_slices
from tests.support.endpoint_slices import endpoint_slice, pod
from tests.support.kube.resources import Json


def read(*slices: Json) -> ServiceView:
    """With the usual name of the port."""
    return read_slices(slices, "grpc")


def test_an_empty_service() -> None:
    """`endpoints: null` is what servers send for it."""
    assert read(endpoint_slice("a")) == ServiceView(num_slices=1)
    assert read() == ServiceView()


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({}, "up"),
        ({"ready": None, "serving": None, "terminating": None}, "up"),
        ({"ready": True}, "up"),
        ({"ready": False}, "down"),
        ({"ready": True, "serving": True, "terminating": True}, "draining"),
        ({"ready": True, "serving": False, "terminating": False}, "down"),
        ({"ready": False, "serving": True, "terminating": True}, "draining"),
        ({"ready": False, "serving": False, "terminating": True}, "down"),
        ({"ready": False, "terminating": True}, "down"),
    ],
)
def test_states(conditions: Json, state: str) -> None:
    """`serving` decides; where it is not said, `ready` does, and nothing said means yes."""
    view = read(endpoint_slice("a", pod(1) | {"conditions": conditions}))
    expected = {"up": (False,), "draining": (True,), "down": ()}[state]
    assert tuple(endpoint.leaving for endpoint in view.endpoints) == expected
    assert view.num_down == (state == "down")


def test_a_pod_in_two_slices() -> None:
    """Counts once, and is used if either says that it may; the order does not matter."""
    one, other = endpoint_slice("a", pod(1, "down"), pod(2)), endpoint_slice("b", pod(1), pod(3))
    view = read(one, other)
    assert view == read(other, one)
    assert [each.address for each in view.endpoints] == [f"127.77.0.{n}:50061" for n in (1, 2, 3)]
    assert view.num_down == 0


def test_a_pod_with_two_families() -> None:
    """Its IPv4 address is taken; with IPv6 alone, that one."""
    first, second = pod(1, host="10.0.0.1"), pod(1, host="fd00::1")
    only = pod(2, host="fd00::2")
    view = read(endpoint_slice("v6", second, only), endpoint_slice("v4", first))
    assert [each.address for each in view.endpoints] == ["10.0.0.1:50061", "[fd00::2]:50061"]


def test_an_address_that_is_used_again() -> None:
    """A new pod counts, not the one before that is still named."""
    old, new = pod(1, "draining", host="10.0.0.9", node="old"), pod(2, host="10.0.0.9", node="new")
    for pods in ((old, new), (new, old)):
        assert read(endpoint_slice("a", *pods)).endpoints == (
            Endpoint("10.0.0.9:50061", node="new"),
        )


def test_a_slice_without_the_port() -> None:
    """Is named, as nobody can be reached; another slice of the Service is used."""
    view = read(endpoint_slice("a", pod(1), port_name="http"), endpoint_slice("b", pod(2)))
    assert view.portless == "a"
    assert len(view.endpoints) == 1
    assert read(endpoint_slice("empty", port_name="http")).portless == ""


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.sampled_from(["", "grpc", "10.0.0.1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["metadata", "name", "endpoints", "addresses", "conditions", "ports"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["metadata", "endpoints", "ports"]), _JSON))
def test_whatever_is_sent(item: JsonObject) -> None:
    """Nothing of it raises."""
    good = endpoint_slice("good", pod(1))
    assert Endpoint("127.77.0.1:50061") in read(item, good).endpoints
