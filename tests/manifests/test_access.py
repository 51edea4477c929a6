"""Who may connect to whom, and what may be asked of the API server: all that is needed, no more."""

from __future__ import annotations

import pytest

from tests.support.kube.resources import Json
from tests.support.manifests import Breakage, Manifests, labels_of, pod_of
from tests.support.network_policies import End, Flow, passes
from tests.support.pod_programs import environment

OWN = "expertmesh"
OUTSIDE = End()
DNS = End({"k8s-app": "kube-dns"}, "kube-system")
PROMETHEUS = End({"app.kubernetes.io/name": "prometheus"}, "monitoring")
STRANGER = End({"app": "stranger"}, "default")


def ends(found: Manifests) -> tuple[End, End]:
    """A gateway and an expert worker."""
    return End(labels_of(found.gateway), OWN), End(labels_of(found.experts), OWN)


def port(found: Manifests, container: str, name: str) -> int:
    """A port of a container by its name."""
    ports = found.container(container)["ports"]
    return next(int(each["containerPort"]) for each in ports if each["name"] == name)


def test_everything_needed_passes(found: Manifests) -> None:
    """Clients, calls, health, metrics, the API server, names."""
    gateway, expert = ends(found)
    http, grpc = (port(found, "gateway", name) for name in ("http", "grpc"))
    flows = [
        *(Flow(client, gateway, at) for client in (OUTSIDE, STRANGER) for at in (http, grpc)),
        *(Flow(gateway, expert, port(found, "expert-worker", at)) for at in ("grpc", "direct")),
        Flow(PROMETHEUS, gateway, http),
        Flow(PROMETHEUS, expert, port(found, "expert-worker", "metrics")),
        *(Flow(gateway, OUTSIDE, at) for at in (443, 6443)),  # the API server
        *(Flow(end, DNS, 53, how) for end in (gateway, expert) for how in ("UDP", "TCP")),
    ]
    assert [flow for flow in flows if not passes(found, flow)] == []


def test_nothing_else_passes(found: Manifests) -> None:
    """Nobody but gateways calls expert workers, which call nobody."""
    gateway, expert = ends(found)
    other = End({"app": "other"}, OWN)
    ports = [each["containerPort"] for each in found.container("expert-worker")["ports"]]
    flows = [
        *(Flow(end, expert, at) for end in (STRANGER, OUTSIDE, other, expert) for at in ports),
        *(Flow(gateway, expert, at) for at in (22, port(found, "expert-worker", "metrics"))),
        *(Flow(expert, end, 8000) for end in (gateway, STRANGER, OUTSIDE)),
        *(Flow(gateway, end, 8080) for end in (STRANGER, OUTSIDE)),
        *(Flow(end, other, 8000) for end in (STRANGER, OUTSIDE)),
        *(Flow(other, end, at) for end in (OUTSIDE, STRANGER) for at in (443, 80)),
        *(Flow(end, OUTSIDE, 80) for end in (gateway, expert)),
    ]
    assert [flow for flow in flows if passes(found, flow)] == []


def test_models_are_downloaded_only_where_the_volume_is_shared(found: Manifests) -> None:
    """Expert workers reach a hub with the component that downloads, and not without it."""
    _, expert = ends(found)
    downloads = "model-pvc" in found.name or found.name.startswith("gpu-")
    assert passes(found, Flow(expert, OUTSIDE, 443)) == downloads


def test_rights_are_the_least(found: Manifests) -> None:
    """Gateways read where expert workers are, scale them, and elect a leader; nothing else, nowhere
    else. Expert workers have no rights and no token."""
    assert not found.of("ClusterRole", "ClusterRoleBinding")
    (role,), (binding,) = found.of("Role"), found.of("RoleBinding")
    container = found.container("gateway")
    lock = environment(found, container)["EXPERTMESH_LEADER_LOCK"].removeprefix("lease:")
    wanted = [
        rule("discovery.k8s.io", "endpointslices", ["get", "list", "watch"]),
        rule("apps", "statefulsets/scale", ["get", "patch", "update"], ["expert-worker"]),
        rule("coordination.k8s.io", "leases", ["create"]),
        rule("coordination.k8s.io", "leases", ["get", "update", "patch"], [lock]),
    ]
    assert role["rules"] == wanted
    assert binding["roleRef"]["kind"] == "Role"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = pod_of(found.gateway)["serviceAccountName"]
    assert [subject["name"] for subject in binding["subjects"]] == [account]
    for name in (account, pod_of(found.experts)["serviceAccountName"]):
        assert found.one("ServiceAccount", name)["automountServiceAccountToken"] is False
    assert pod_of(found.experts)["serviceAccountName"] != account


def rule(group: str, resource: str, verbs: list[str], names: list[str] | None = None) -> Json:
    """A rule of a Role."""
    limited = {"resourceNames": names} if names else {}
    return {"apiGroups": [group], "resources": [resource], "verbs": verbs, **limited}


def test_only_the_gateway_has_a_token(found: Manifests) -> None:
    """One that ends soon, in the one container that needs it."""
    for workload in found.workloads:
        pod = pod_of(workload)
        assert pod["automountServiceAccountToken"] is False
        tokens = {
            volume["name"]
            for volume in pod["volumes"]
            for source in volume.get("projected", {}).get("sources", ())
            if "serviceAccountToken" in source
        }
        holders = [
            container["name"]
            for container in (*pod["containers"], *pod["initContainers"])
            if tokens & {mount["name"] for mount in container["volumeMounts"]}
        ]
        assert holders == (["gateway"] if workload is found.gateway else [])


def test_secrets_are_files(found: Manifests) -> None:
    """No manifest holds a secret, and keys reach no environment but a download token."""
    assert not found.of("Secret")
    for container in found.all_containers():
        for entry in container["env"]:
            assert "secretKeyRef" not in entry.get("valueFrom", {}) or entry["name"] == "HF_TOKEN"
        assert all("configMapRef" in source for source in container["envFrom"])


def policy(found: Manifests, name: str) -> Json:
    """The specification of a NetworkPolicy."""
    return found.one("NetworkPolicy", name)["spec"]


def role(found: Manifests) -> list[Json]:
    """The rules of the gateway."""
    return found.one("Role", "gateway")["rules"]


BREAKAGES = [
    Breakage(
        test_everything_needed_passes, "labels that a policy does not know",
        lambda m: labels_of(m.experts).update({"app.kubernetes.io/name": "experts"}),
    ),
    Breakage(
        test_everything_needed_passes, "another port",
        lambda m: m.container("expert-worker")["ports"][0].update(containerPort=50071),
    ),
    Breakage(
        test_everything_needed_passes, "names over UDP alone",
        lambda m: policy(m, "dns")["egress"][0]["ports"].pop(),
    ),
    Breakage(
        test_everything_needed_passes, "no way to the API server",
        lambda m: policy(m, "gateway-egress")["egress"].pop(),
    ),
    Breakage(
        test_everything_needed_passes, "metrics for nobody",
        lambda m: m.objects.remove(m.one("NetworkPolicy", "expert-worker-metrics")),
    ),
    Breakage(
        test_nothing_else_passes, "nothing is denied",
        lambda m: m.objects.remove(m.one("NetworkPolicy", "default-deny")),
    ),
    Breakage(
        test_nothing_else_passes, "everybody's expert workers",
        lambda m: policy(m, "expert-worker-calls")["ingress"][0].pop("from"),
    ),
    Breakage(
        test_nothing_else_passes, "gateways that call anybody",
        lambda m: policy(m, "gateway-egress")["egress"].append({}),
    ),
    Breakage(
        test_models_are_downloaded_only_where_the_volume_is_shared, "downloads forgotten",
        lambda m: m.objects.remove(m.one("NetworkPolicy", "model-download")), "gpu-prod",
    ),
    Breakage(
        test_rights_are_the_least, "pods",
        lambda m: role(m).append(rule("", "pods", ["get", "patch"])),
    ),
    Breakage(
        test_rights_are_the_least, "any verb", lambda m: role(m)[0].update(verbs=["*"]),
    ),
    Breakage(
        test_rights_are_the_least, "any StatefulSet", lambda m: role(m)[1].pop("resourceNames"),
    ),
    Breakage(
        test_rights_are_the_least, "another Lease",
        lambda m: role(m)[3].update(resourceNames=["leader"]),
    ),
    Breakage(
        test_rights_are_the_least, "the whole cluster",
        lambda m: m.one("Role", "gateway").update(kind="ClusterRole"),
    ),
    Breakage(
        test_rights_are_the_least, "expert workers with a token",
        lambda m: m.one("ServiceAccount", "expert-worker").update(
            automountServiceAccountToken=True
        ),
    ),
    Breakage(
        test_only_the_gateway_has_a_token, "a token in every container",
        lambda m: pod_of(m.gateway).update(automountServiceAccountToken=True),
    ),
    Breakage(
        test_only_the_gateway_has_a_token, "a token in the init container",
        lambda m: pod_of(m.gateway)["initContainers"][0]["volumeMounts"].append(
            {"name": "api-token", "mountPath": "/token"}
        ),
    ),
    Breakage(
        test_secrets_are_files, "keys in a manifest",
        lambda m: m.objects.append({"kind": "Secret", "metadata": {"name": "keys"}}),
    ),
    Breakage(
        test_secrets_are_files, "keys in the environment",
        lambda m: m.container("gateway")["env"].append(
            {"name": "EXPERTMESH_API_KEYS", "valueFrom": {"secretKeyRef": {}}}
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES, ids=str)
def test_breakage_is_noticed(breakage: Breakage, rendered: dict[str, Manifests]) -> None:
    """Each check can fail."""
    breakage.assert_noticed(rendered)
