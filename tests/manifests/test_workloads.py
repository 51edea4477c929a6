"""What keeps workloads running while nodes, versions and numbers of pods change."""

from __future__ import annotations

import pytest

from expertmesh.grpc_options import channel_options, server_options
from tests.support.kube.resources import Json
from tests.support.manifests import (
    GPU,
    Breakage,
    Manifests,
    labels_of,
    named,
    pod_of,
    selects,
)
from tests.support.pod_programs import environment

HOSTNAME = "kubernetes.io/hostname"


def discovery(found: Manifests) -> str:
    """What gateways are told to look for."""
    return environment(found, found.container("gateway"))["EXPERTMESH_EXPERTS"]


# --- discovery ---


def test_gateways_discover_pods_that_answer(found: Manifests) -> None:
    """Their Service tells ready pods from others and from leaving ones, which the governing Service
    of the StatefulSet does not."""
    kind, _, name = discovery(found).partition(":")
    assert kind == "k8s"
    service = found.one("Service", name)["spec"]
    assert not service.get("publishNotReadyAddresses")
    assert name != found.experts["spec"]["serviceName"]
    assert selects(service["selector"], labels_of(found.experts))
    port = named(service["ports"], "grpc")["targetPort"]
    assert named(found.container("expert-worker")["ports"], port)["containerPort"] == 50061


def test_gateways_connect_to_pods_and_never_to_a_service(found: Manifests) -> None:
    """A long-lived connection to a Service's address would keep new pods without calls; nor does
    either end close connections by age."""
    assert discovery(found).startswith(("k8s:", "dns:"))
    assert found.one("Service", "expert-worker")["spec"]["clusterIP"] == "None"
    options = {name for name, _ in (*server_options(1024), *channel_options(1024))}
    assert not any("connection_age" in name or "connection_idle" in name for name in options)


# --- rollouts, drains of nodes ---


def test_gpus_do_not_block_a_rollout(found: Manifests) -> None:
    """Where GPUs are all taken, a further pod would wait for ever. GPUs are asked for in one way
    only, and not at all without the component."""
    limits = [
        each["resources"]["limits"][GPU]
        for each in found.all_containers()
        if GPU in each["resources"]["limits"]
    ]
    assert bool(limits) == ("gpu" in found.name)
    for container in found.all_containers():
        asked, most = container["resources"]["requests"], container["resources"]["limits"]
        assert asked.get(GPU, most.get(GPU)) == most.get(GPU)
        assert GPU not in most or int(most[GPU]) >= 1
    for workload in found.of("Deployment"):
        strategy = workload["spec"]["strategy"]
        rolling = strategy.get("rollingUpdate", {})
        waits = strategy["type"] == "Recreate" or (
            rolling["maxSurge"] == 0 and rolling["maxUnavailable"] >= 1
        )
        assert waits or not limits


def test_a_stateful_set_cannot_get_stuck(found: Manifests) -> None:
    """Pods do not wait for one another, and names, selectors and labels fit."""
    for workload in found.of("StatefulSet"):
        spec = workload["spec"]
        assert spec["podManagementPolicy"] == "Parallel"
        assert spec["updateStrategy"]["type"] == "RollingUpdate"
        assert spec.get("minReadySeconds", 0) > 0
        governing = found.one("Service", spec["serviceName"])["spec"]
        assert governing["clusterIP"] == "None"
        assert governing["publishNotReadyAddresses"] is True
        assert selects(governing["selector"], labels_of(workload))


def test_selectors_are_part_of_labels(found: Manifests) -> None:
    """Of workloads and Services; Services name ports that pods have."""
    for workload in found.workloads:
        assert selects(workload["spec"]["selector"], labels_of(workload))
    for service in found.of("Service"):
        chosen = [
            workload
            for workload in found.workloads
            if selects(service["spec"]["selector"], labels_of(workload))
        ]
        assert len(chosen) == 1
        (container,) = pod_of(chosen[0])["containers"]
        for port in service["spec"]["ports"]:
            assert named(container["ports"], port["targetPort"])["containerPort"] == port["port"]


def test_nodes_can_be_drained(found: Manifests) -> None:
    """One pod of a workload may be evicted at a time, always, a broken one too."""
    budgets = [budget["spec"] for budget in found.of("PodDisruptionBudget")]
    for workload in found.workloads:
        own = [each for each in budgets if selects(each["selector"], labels_of(workload))]
        assert len(own) == 1, workload["metadata"]["name"]
        assert own[0]["selector"] == workload["spec"]["selector"]
        assert "minAvailable" not in own[0]
        assert own[0]["maxUnavailable"] >= 1
        assert own[0]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert len(budgets) == len(found.workloads)


def test_copies_do_not_share_a_node(found: Manifests) -> None:
    """Pods are spread over nodes, strictly in production, and tell their node to the gateway, which
    puts copies of an expert on different ones."""
    for workload in found.workloads:
        spread = [
            each
            for each in pod_of(workload)["topologySpreadConstraints"]
            if each["topologyKey"] == HOSTNAME
        ]
        assert len(spread) == 1
        assert selects(spread[0]["labelSelector"], labels_of(workload))
        strict = "DoNotSchedule" if found.name == "gpu-prod" else "ScheduleAnyway"
        assert spread[0]["whenUnsatisfiable"] == strict
    container = found.container("expert-worker")
    assert "--node=$(NODE_NAME)" in container["args"]
    source = named(container["env"], "NODE_NAME")["valueFrom"]
    assert source["fieldRef"]["fieldPath"] == "spec.nodeName"


def test_batch_work_makes_room(found: Manifests) -> None:
    """Pods name a PriorityClass that is there and is nobody's default."""
    for pod in found.pods():
        own = found.one("PriorityClass", pod["priorityClassName"])
        assert own["globalDefault"] is False
        assert 0 < own["value"] < 1_000_000_000


# --- models ---


def test_a_shared_model_volume_can_be_shared(found: Manifests) -> None:
    """A claim that several pods use can be mounted by all of them, and all may write: downloads
    take locks there."""
    claims = {
        claim["metadata"]["name"]: claim["spec"] for claim in found.of("PersistentVolumeClaim")
    }
    for workload in found.workloads:
        pod = pod_of(workload)
        for volume in pod["volumes"]:
            used = volume.get("persistentVolumeClaim")
            if used is None:
                continue
            assert claims[used["claimName"]]["accessModes"] == ["ReadWriteMany"]
            assert not used.get("readOnly")
            for container in (*pod["containers"], *pod["initContainers"]):
                for mount in container["volumeMounts"]:
                    assert mount["name"] != volume["name"] or not mount.get("readOnly")


def test_claims_are_used(found: Manifests) -> None:
    """Components that bring a claim have it mounted."""
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in found.pods()
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == {claim["metadata"]["name"] for claim in found.of("PersistentVolumeClaim")}
    is_shared = "model-pvc" in found.name or found.name.startswith("gpu-")
    assert bool(used) == is_shared


def budget(found: Manifests) -> Json:
    """The disruption budget of the expert workers."""
    return found.one("PodDisruptionBudget", "expert-worker")["spec"]


BREAKAGES = [
    Breakage(
        test_gateways_discover_pods_that_answer, "discovery by the governing Service",
        lambda m: m.shared_settings.update(EXPERTMESH_EXPERTS="k8s:expert-worker-pods"),
    ),
    Breakage(
        test_gateways_discover_pods_that_answer, "pods that are not ready",
        lambda m: m.one("Service", "expert-worker")["spec"].update(publishNotReadyAddresses=True),
    ),
    Breakage(
        test_gateways_connect_to_pods_and_never_to_a_service, "the name of a Service",
        lambda m: m.shared_settings.update(EXPERTMESH_EXPERTS="expert-worker:50061"),
    ),
    Breakage(
        test_gpus_do_not_block_a_rollout, "a surge",
        lambda m: m.gateway["spec"]["strategy"]["rollingUpdate"].update(maxSurge=1),
        "gpu-prod",
    ),
    Breakage(
        test_gpus_do_not_block_a_rollout, "another request",
        lambda m: m.container("expert-worker")["resources"]["requests"].update({GPU: 2}),
        "gpu-single-node",
    ),
    Breakage(
        test_gpus_do_not_block_a_rollout, "a GPU on kind",
        lambda m: m.container("expert-worker")["resources"]["limits"].update({GPU: 1}),
    ),
    Breakage(
        test_a_stateful_set_cannot_get_stuck, "one pod after the other",
        lambda m: m.experts["spec"].update(podManagementPolicy="OrderedReady"),
    ),
    Breakage(
        test_a_stateful_set_cannot_get_stuck, "no governing Service",
        lambda m: m.experts["spec"].update(serviceName="experts"),
    ),
    Breakage(
        test_a_stateful_set_cannot_get_stuck, "other pods",
        lambda m: m.one("Service", "expert-worker-pods")["spec"]["selector"].update(extra="label"),
    ),
    Breakage(
        test_selectors_are_part_of_labels, "a label that pods lack",
        lambda m: m.gateway["spec"]["selector"]["matchLabels"].update(tier="front"),
    ),
    Breakage(
        test_selectors_are_part_of_labels, "a port that pods lack",
        lambda m: m.one("Service", "gateway")["spec"]["ports"][0].update(targetPort="web"),
    ),
    Breakage(
        test_nodes_can_be_drained, "no budget",
        lambda m: m.objects.remove(m.one("PodDisruptionBudget", "gateway")),
    ),
    Breakage(
        test_nodes_can_be_drained, "a budget that blocks",
        lambda m: budget(m).update(minAvailable=2),
    ),
    Breakage(
        test_nodes_can_be_drained, "a budget of nothing",
        lambda m: budget(m).update(maxUnavailable=0),
    ),
    Breakage(
        test_nodes_can_be_drained, "broken pods that stay",
        lambda m: budget(m).update(unhealthyPodEvictionPolicy="IfHealthyBudget"),
    ),
    Breakage(
        test_nodes_can_be_drained, "a budget for more than the workload",
        lambda m: budget(m)["selector"]["matchLabels"].pop("app.kubernetes.io/component"),
    ),
    Breakage(
        test_copies_do_not_share_a_node, "a wish in production",
        lambda m: pod_of(m.experts)["topologySpreadConstraints"][0].update(
            whenUnsatisfiable="ScheduleAnyway"
        ),
        "gpu-prod",
    ),
    Breakage(
        test_copies_do_not_share_a_node, "pods of others",
        lambda m: pod_of(m.gateway)["topologySpreadConstraints"][0].update(
            labelSelector={"matchLabels": {"app.kubernetes.io/name": "expert-worker"}}
        ),
    ),
    Breakage(
        test_copies_do_not_share_a_node, "a node that is not told",
        lambda m: m.container("expert-worker")["args"].remove("--node=$(NODE_NAME)"),
    ),
    Breakage(
        test_batch_work_makes_room, "everybody's class",
        lambda m: m.one("PriorityClass", "expertmesh-serving").update(globalDefault=True),
    ),
    Breakage(
        test_a_shared_model_volume_can_be_shared, "a volume of one node",
        lambda m: m.one("PersistentVolumeClaim", "models")["spec"].update(
            accessModes=["ReadWriteOnce"]
        ),
        "local-cpu+model-pvc",
    ),
    Breakage(
        test_a_shared_model_volume_can_be_shared, "a volume that cannot be written",
        lambda m: named(m.container("gateway")["volumeMounts"], "models").update(readOnly=True),
        "gpu-prod",
    ),
    Breakage(
        test_claims_are_used, "a claim that nobody mounts",
        lambda m: [
            pod["volumes"].remove(named(pod["volumes"], "models")) for pod in m.pods()
        ],
        "local-cpu+model-pvc",
    ),
]  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES, ids=str)
def test_breakage_is_noticed(breakage: Breakage, rendered: dict[str, Manifests]) -> None:
    """Each check can fail."""
    breakage.assert_noticed(rendered)
