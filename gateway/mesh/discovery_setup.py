"""What finds the expert workers of a gateway, by its settings."""

from __future__ import annotations

from expertmesh.expert_source import DnsName, KubernetesService
from expertmesh.settings import MeshOptions
from gateway.cluster.access import ClusterAccess
from gateway.cluster.api import ClusterApi
from gateway.mesh.discovery import Discovery, StaticDiscovery
from gateway.mesh.dns_discovery import DnsDiscovery
from gateway.mesh.service_discovery import ServiceDiscovery


def make_discovery(mesh: MeshOptions) -> Discovery:
    """The discovery; nothing runs yet. Not for a thread with a running event loop.

    Args:
        mesh: Where expert workers are.

    Raises:
        StartupError: There is no access to Kubernetes, or no client for it.
    """
    source = mesh.expert_source
    if isinstance(source, DnsName):
        return DnsDiscovery(source)
    if isinstance(source, KubernetesService):
        return ServiceDiscovery(ClusterApi.open(ClusterAccess.of(mesh)), source)
    return StaticDiscovery(source.addresses)
