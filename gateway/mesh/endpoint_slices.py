"""EndpointSlices of one Service as endpoints.

A Service has many slices; a pod may be in two of them for a while, and with two address families
always is. Slices also name pods that are not to be used, and such without an address.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from expertmesh.addresses import join_address
from gateway.cluster.fields import JsonObject, flag_at, list_at, number_at, text_at
from gateway.mesh.discovery import Endpoint, Endpoints


class PodState(IntEnum):
    """What a slice says of a pod; the lower, the more it can be used."""

    UP = 0
    DRAINING = 1
    """It ends soon, and serves until then."""
    DOWN = 2


@dataclass(frozen=True, order=True)
class _Place:
    """One entry of a slice; the least of several of a pod is the one to use."""

    state: PodState
    is_ipv6: bool
    address: str
    node: str


@dataclass(frozen=True)
class ServiceView:
    """What all slices of a Service say together."""

    endpoints: Endpoints = ()
    """Pods to use: those that serve."""
    num_down: int = 0
    """Pods that do not serve."""
    num_slices: int = 0
    portless: str = ""
    """Name of a slice with pods and without the port, if there is one."""


def read_slices(slices: Iterable[JsonObject], port_name: str) -> ServiceView:
    """Merges slices.

    Args:
        slices: EndpointSlice objects as the API server sends them.
        port_name: Of the Service's port.
    """
    pods: dict[str, _Place] = {}
    num_slices, portless = 0, ""
    for item in slices:
        num_slices += 1
        port = _port(item, port_name)
        if not port and list_at(item, "endpoints"):
            portless = text_at(item, "metadata", "name")
        for entry in list_at(item, "endpoints") if port else ():
            for host in list_at(entry, "addresses")[:1]:  # none of an evicted pod
                place = _place(entry, str(host), port)
                key = text_at(entry, "targetRef", "uid") or place.address
                pods[key] = min(place, pods.get(key, place))
    used = [place for place in pods.values() if place.state is not PodState.DOWN]
    return ServiceView(_endpoints(used), len(pods) - len(used), num_slices, portless)


def _port(item: JsonObject, port_name: str) -> int:
    """The number of the port of that name; 0 if the slice has none."""
    for port in list_at(item, "ports"):
        if text_at(port, "name") == port_name:
            return number_at(port, "port")
    return 0


def _place(entry: object, host: str, port: int) -> _Place:
    is_ready = flag_at(entry, "conditions", "ready") is not False  # unknown means yes
    serving = flag_at(entry, "conditions", "serving")
    if not (is_ready if serving is None else serving):
        state = PodState.DOWN
    elif flag_at(entry, "conditions", "terminating"):
        state = PodState.DRAINING
    else:
        state = PodState.UP
    return _Place(state, ":" in host, join_address(host, port), text_at(entry, "nodeName"))


def _endpoints(places: Iterable[_Place]) -> Endpoints:
    """Each address once: a new pod may have got that of one that ends."""
    best: dict[str, _Place] = {}
    for place in places:
        best[place.address] = min(place, best.get(place.address, place))
    return tuple(
        Endpoint(address, leaving=place.state is PodState.DRAINING, node=place.node)
        for address, place in sorted(best.items())
    )
