"""The kinds of objects that the API server of the tests knows, and their errors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]
"""An object of the API, or a part of one, as JSON or YAML has it: nested, and of any kind."""


@dataclass(frozen=True)
class Resource:
    """One kind of object.

    Args:
        group: As in URLs, e.g. "apps"; empty for the core group.
        version: Of the group, e.g. "v1".
        plural: As in URLs.
        kind: As in manifests.
        short: Names that kubectl takes, too.
        namespaced: False for what belongs to the whole cluster.
        subresources: e.g. "status"; an object with it keeps its status on other writes.
        has_generation: The server counts changes of its spec.
    """

    group: str
    version: str
    plural: str
    kind: str
    short: tuple[str, ...] = ()
    namespaced: bool = True
    subresources: tuple[str, ...] = ()
    has_generation: bool = field(default=False, kw_only=True)

    @property
    def api_version(self) -> str:
        """As in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """The path of the group in URLs."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str = "", name: str = "") -> str:
        """Of the collection, or of one object."""
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{self.root}{place}/{self.plural}" + (f"/{name}" if name else "")


NAMESPACES = Resource("", "v1", "namespaces", "Namespace", ("ns",), namespaced=False)
NODES = Resource("", "v1", "nodes", "Node", ("no",), False, ("status",))
PODS = Resource(
    "", "v1", "pods", "Pod", ("po",), subresources=("status", "binding", "eviction", "log")
)
SERVICES = Resource("", "v1", "services", "Service", ("svc",), subresources=("status",))
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap", ("cm",))
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", ("sa",))
DEPLOYMENTS = Resource(
    "apps", "v1", "deployments", "Deployment", ("deploy",), True, ("status", "scale"),
    has_generation=True,
)  # fmt: skip
STATEFUL_SETS = Resource(
    "apps", "v1", "statefulsets", "StatefulSet", ("sts",), True, ("status", "scale"),
    has_generation=True,
)  # fmt: skip
ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
DISRUPTION_BUDGETS = Resource(
    "policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", ("pdb",), True, ("status",),
    has_generation=True,
)  # fmt: skip
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")

RESOURCES = (
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    CONFIG_MAPS,
    SECRETS,
    SERVICE_ACCOUNTS,
    Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", ("pvc",)),
    Resource("", "v1", "events", "Event", ("ev",)),
    DEPLOYMENTS,
    STATEFUL_SETS,
    Resource("apps", "v1", "replicasets", "ReplicaSet", ("rs",), True, ("status", "scale")),
    ENDPOINT_SLICES,
    LEASES,
    DISRUPTION_BUDGETS,
    ROLES,
    ROLE_BINDINGS,
    Resource(
        "networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", ("netpol",),
        has_generation=True,
    ),
    Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", ("pc",), False),
)  # fmt: skip


class ApiError(Exception):
    """A request that is refused, as the API says it.

    Args:
        code: HTTP status.
        reason: One word, e.g. "Conflict".
        message: For people.
        details: Of what, e.g. name and kind.
    """

    def __init__(self, code: int, reason: str, message: str, details: Json | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": details or {},
            "code": code,
        }

    def response(self) -> web.Response:
        """What a client is answered."""
        return web.Response(
            status=self.code, text=json.dumps(self.status), content_type="application/json"
        )


def not_found(resource: Resource, name: str) -> ApiError:
    """There is no such object."""
    qualified = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    return ApiError(404, "NotFound", f'{qualified} "{name}" not found', details)


def already_exists(resource: Resource, name: str) -> ApiError:
    """There is one of this name."""
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    return ApiError(409, "AlreadyExists", f'{resource.plural} "{name}" already exists', details)


def conflict(resource: Resource, name: str) -> ApiError:
    """It was changed since the caller read it, or is another one."""
    message = (
        f'Operation cannot be fulfilled on {resource.plural} "{name}": the object has been'
        " modified; please apply your changes to the latest version and try again"
    )
    return ApiError(409, "Conflict", message, {"name": name, "kind": resource.plural})


def expired(version: int) -> ApiError:
    """The history since this version is not known any more."""
    return ApiError(410, "Expired", f"too old resource version: {version}")


def bad_request(message: str) -> ApiError:
    """It makes no sense."""
    return ApiError(400, "BadRequest", message)
