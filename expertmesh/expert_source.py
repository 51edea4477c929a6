"""Where a gateway looks for expert workers: what `--experts` can say.

host:port,...                          a fixed list
dns:NAME:PORT                          whatever a name resolves to, asked again and again
k8s:[NAMESPACE/]SERVICE[:PORTNAME]     the pods behind a Service of Kubernetes
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from expertmesh.addresses import split_address
from expertmesh.errors import SettingsError

DNS_PREFIX = "dns:"
SERVICE_PREFIX = "k8s:"
PORT_NAME = "grpc"
"""Of the Service's port, unless another one is named."""

_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(_LABEL)
_SERVICE = re.compile(
    rf"((?P<namespace>{_LABEL})/)?(?P<service>{_LABEL})(:(?P<port_name>[a-z0-9-]{{1,15}}))?"
)


@dataclass(frozen=True)
class AddressList:
    """Expert workers that are named one by one."""

    addresses: tuple[str, ...] = ()
    """host:port, in the order given, each once."""


@dataclass(frozen=True)
class DnsName:
    """Expert workers are all addresses of a name."""

    host: str
    port: int


@dataclass(frozen=True)
class KubernetesService:
    """Expert workers are the pods behind a Service."""

    service: str
    namespace: str = ""
    """Empty: the gateway's own."""
    port_name: str = PORT_NAME


ExpertSource = AddressList | DnsName | KubernetesService


def parse_experts(text: str) -> ExpertSource:
    """What `--experts` says, other than `local`. Raises SettingsError."""
    if text.startswith(DNS_PREFIX):
        return DnsName(*split_address("experts", text.removeprefix(DNS_PREFIX)))
    if text.startswith(SERVICE_PREFIX):
        return _parse_service(text)
    return AddressList(_parse_list(text))


def is_name(text: str) -> bool:
    """True if Kubernetes takes it for the name of a Service, of a namespace or of a Lease."""
    return _NAME.fullmatch(text) is not None


def _parse_service(text: str) -> KubernetesService:
    match = _SERVICE.fullmatch(text.removeprefix(SERVICE_PREFIX))
    if match is None:
        raise SettingsError(
            f"experts is {text!r}, expected k8s:SERVICE, k8s:NAMESPACE/SERVICE or "
            "k8s:NAMESPACE/SERVICE:PORTNAME, of lower-case letters, digits and dashes",
            fix="the name of the port, not its number, comes last",
        )
    return KubernetesService(
        match["service"], match["namespace"] or "", match["port_name"] or PORT_NAME
    )


def _parse_list(text: str) -> tuple[str, ...]:
    named = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    for address in named:
        split_address("experts", address)
    if repeated := {address for address in named if named.count(address) > 1}:
        raise SettingsError(f"experts names {min(repeated)} twice, expected each address once")
    return named
