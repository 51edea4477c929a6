"""Service accounts may do what Roles say, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.kube.access import Access, token_of
from tests.support.kube.api_server import FakeApiServer
from tests.support.kube.client import KubeClient
from tests.support.kube.resources import (
    LEASES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    ApiError,
    Resource,
)

NAMESPACE = "default"
RULES = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": ["ours"],
        "verbs": ["get"],
    },
]


@pytest.fixture
async def gateway() -> AsyncIterator[KubeClient]:
    """A client with the token of an account that has a Role."""
    async with FakeApiServer() as api:
        api.faults.append(Access(api.store).check)
        api.store.create(ROLES, {"metadata": {"name": "gateway"}, "rules": RULES})
        binding = {
            "metadata": {"name": "gateway"},
            "roleRef": {"kind": "Role", "name": "gateway"},
            "subjects": [{"kind": "ServiceAccount", "name": "gateway"}],
        }
        api.store.create(ROLE_BINDINGS, binding)
        for name in ("ours", "theirs"):
            api.store.create(LEASES, {"metadata": {"name": name}})
        async with KubeClient(api.url, token_of(NAMESPACE, "gateway")) as client:
            yield client


async def test_what_roles_allow(gateway: KubeClient) -> None:
    """Verbs on resources, of all objects or of one."""
    await gateway.list(PODS, NAMESPACE)
    await gateway.get(LEASES, NAMESPACE, "ours")


@pytest.mark.parametrize(
    ("resource", "namespace", "name"),
    [
        pytest.param(LEASES, NAMESPACE, "theirs", id="another name"),
        pytest.param(PODS, NAMESPACE, "one", id="another verb"),
        pytest.param(SECRETS, NAMESPACE, "", id="another resource"),
        pytest.param(PODS, "kube-system", "", id="another namespace"),
    ],
)
async def test_what_they_do_not(
    gateway: KubeClient, resource: Resource, namespace: str, name: str
) -> None:
    """403 for all else."""
    with pytest.raises(ApiError, match="forbidden") as refused:
        await gateway.request("GET", resource.path(namespace, name))
    assert refused.value.code == 403
