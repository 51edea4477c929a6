"""Which connections NetworkPolicies let pass: as documented, for what we use of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.kube.resources import Json
from tests.support.manifests import Manifests, selects

KINDS_OF_PEER = {"podSelector", "namespaceSelector", "ipBlock"}


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod, or without labels an address outside of the cluster."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""


@dataclass(frozen=True)
class Flow:
    """A connection that is wanted, or is not."""

    source: End
    target: End
    port: int
    protocol: str = "TCP"


def passes(found: Manifests, flow: Flow) -> bool:
    """Whether the policies at both ends let a connection pass."""
    policies = found.of("NetworkPolicy")
    return _lets(policies, flow.source, flow.target, flow, "egress", "to") and _lets(
        policies, flow.target, flow.source, flow, "ingress", "from"
    )


def _lets(
    policies: Sequence[Json], own: End, other: End, flow: Flow, side: str, peers: str
) -> bool:
    """One direction at one end. No policy there lets all pass, several what any of them does."""
    if not own.namespace:
        return True
    here = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == own.namespace
        and side.capitalize() in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"] or {"matchLabels": {}}, own.labels)
    ]
    if not here:
        return True
    rules = [rule for spec in here for rule in spec.get(side, ())]
    return any(
        _port_fits(rule.get("ports"), flow) and _peer_fits(rule.get(peers), other, own.namespace)
        for rule in rules
    )


def _port_fits(ports: Sequence[Json] | None, flow: Flow) -> bool:
    return ports is None or any(
        port["port"] == flow.port and port.get("protocol", "TCP") == flow.protocol for port in ports
    )


def _peer_fits(peers: Sequence[Json] | None, other: End, own_namespace: str) -> bool:
    return peers is None or any(_is_peer(peer, other, own_namespace) for peer in peers)


def _is_peer(peer: Json, other: End, own_namespace: str) -> bool:
    """Selectors side by side must both fit. Of blocks we use the two that are all addresses."""
    assert peer.keys() <= KINDS_OF_PEER
    if "ipBlock" in peer:
        return peer["ipBlock"]["cidr"] in ("0.0.0.0/0", "::/0")
    if not other.namespace:
        return False
    namespace = {"kubernetes.io/metadata.name": other.namespace}
    if "namespaceSelector" in peer:
        here = selects(peer["namespaceSelector"] or {"matchLabels": {}}, namespace)
    else:
        here = other.namespace == own_namespace
    return here and selects(peer.get("podSelector") or {"matchLabels": {}}, other.labels)
