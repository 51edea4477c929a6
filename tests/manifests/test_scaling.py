"""Who decides how many pods there are, and who is told what they do."""

from __future__ import annotations

import json

import pytest

from tests.support.kube.resources import Json
from tests.support.manifests import Breakage, Manifests, labels_of, named, pod_of, selects
from tests.support.metric_names import known_metrics, metrics_in
from tests.support.pod_programs import environment

# --- replicas ---


def autoscalers(found: Manifests) -> list[tuple[str, str]]:
    """Kind and name of what autoscalers of the cluster write."""
    return [
        (target["kind"], target["name"])
        for each in found.of("ScaledObject", "HorizontalPodAutoscaler")
        for target in [each["spec"]["scaleTargetRef"]]
    ]


def gateway_scales(found: Manifests) -> bool:
    """Whether the leading gateway writes the number of expert workers."""
    return environment(found, found.container("gateway")).get("EXPERTMESH_AUTOSCALE") == "on"


def test_replicas_have_one_writer(found: Manifests) -> None:
    """Nobody but the leading gateway scales expert workers, each workload has one autoscaler at
    most, and a manifest says a number only where nobody else does."""
    targets = autoscalers(found)
    assert ("StatefulSet", "expert-worker") not in targets
    assert len(targets) == len(set(targets))
    written = [*targets, ("StatefulSet", "expert-worker")] if gateway_scales(found) else targets
    for workload in found.workloads:
        own = (workload["kind"], workload["metadata"]["name"])
        assert ("replicas" in workload["spec"]) == (own not in written)
        assert workload["spec"].get("replicas", 1) >= 1


def test_autoscaling_is_on_where_it_says_so(found: Manifests) -> None:
    """The overlay for production scales expert workers, within limits; others do not."""
    values = environment(found, found.container("gateway"))
    assert gateway_scales(found) == (found.name == "gpu-prod")
    if gateway_scales(found):
        kind, _, name = values["EXPERTMESH_SCALE_TARGET"].partition("/")
        assert kind == "statefulset"
        assert name == found.experts["metadata"]["name"]
        fewest, most = (int(values[f"EXPERTMESH_{end}_EXPERT_WORKERS"]) for end in ("MIN", "MAX"))
        assert int(values["EXPERTMESH_MIN_COPIES"]) <= fewest < most


def test_scaled_objects_are_careful(found: Manifests) -> None:
    """No answer of Prometheus is no load of nothing; there is always a pod; pods go slowly."""
    for each in found.of("ScaledObject"):
        spec = each["spec"]
        assert found.one(spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
        assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
        assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
        assert spec["fallback"]["replicas"] >= spec["minReplicaCount"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 300
        for trigger in spec["triggers"]:
            assert trigger["metadata"].get("ignoreNullValues", "true") == "false"


# --- monitoring ---


def test_monitors_find_their_services(found: Manifests) -> None:
    """Each ServiceMonitor selects one Service that has the port, and every workload has one."""
    monitored = set()
    for monitor in found.of("ServiceMonitor"):
        spec = monitor["spec"]
        chosen = [
            each
            for each in found.of("Service")
            if selects(spec["selector"], each["metadata"]["labels"])
        ]
        assert len(chosen) == 1, monitor["metadata"]["name"]
        service = chosen[0]["spec"]
        for endpoint in spec["endpoints"]:
            port = named(service["ports"], endpoint["port"])
            workload = next(
                each for each in found.workloads if selects(service["selector"], labels_of(each))
            )
            (container,) = pod_of(workload)["containers"]
            named(container["ports"], port["targetPort"])
            monitored.add(workload["metadata"]["name"])
    if found.of("ServiceMonitor"):
        assert monitored == {workload["metadata"]["name"] for workload in found.workloads}


def asked_metrics(found: Manifests) -> set[str]:
    """Names of our metrics in rules, dashboards and triggers."""
    texts = [json.dumps(each["spec"]) for each in found.of("PrometheusRule", "ScaledObject")]
    for each in found.of("ConfigMap"):
        texts += [text for name, text in each["data"].items() if name.endswith(".json")]
    return {name for text in texts for name in metrics_in(text)}


def test_metrics_that_are_asked_for_exist(found: Manifests) -> None:
    """A rule over a metric that nobody has never fires."""
    assert asked_metrics(found) - known_metrics() == set()
    assert bool(asked_metrics(found)) == bool(found.of("PrometheusRule", "ScaledObject"))


KEDA = "local-cpu+keda-gateway"


def scaled(found: Manifests) -> Json:
    """The specification of the ScaledObject."""
    return found.one("ScaledObject", "gateway")["spec"]


def alert(found: Manifests) -> Json:
    """A rule of the PrometheusRule."""
    return found.one("PrometheusRule", "expertmesh")["spec"]["groups"][0]["rules"][0]


BREAKAGES = [
    Breakage(
        test_replicas_have_one_writer, "an autoscaler of expert workers",
        lambda m: scaled(m)["scaleTargetRef"].update(kind="StatefulSet", name="expert-worker"),
        KEDA,
    ),
    Breakage(
        test_replicas_have_one_writer, "two autoscalers",
        lambda m: m.objects.append(m.one("ScaledObject", "gateway")), KEDA,
    ),
    Breakage(
        test_replicas_have_one_writer, "a number that KEDA writes",
        lambda m: m.gateway["spec"].update(replicas=2), KEDA,
    ),
    Breakage(
        test_replicas_have_one_writer, "a number that the gateway writes",
        lambda m: m.experts["spec"].update(replicas=4), "gpu-prod",
    ),
    Breakage(
        test_replicas_have_one_writer, "a number that nobody writes",
        lambda m: m.experts["spec"].pop("replicas"),
    ),
    Breakage(
        test_autoscaling_is_on_where_it_says_so, "another StatefulSet",
        lambda m: m.shared_settings.update(EXPERTMESH_SCALE_TARGET="statefulset/experts"),
        "gpu-prod",
    ),
    Breakage(
        test_autoscaling_is_on_where_it_says_so, "fewer than copies need",
        lambda m: m.shared_settings.update(EXPERTMESH_MIN_EXPERT_WORKERS="1"), "gpu-prod",
    ),
    Breakage(
        test_scaled_objects_are_careful, "no answer is no load",
        lambda m: scaled(m)["triggers"][0]["metadata"].pop("ignoreNullValues"), KEDA,
    ),
    Breakage(
        test_scaled_objects_are_careful, "down to nothing",
        lambda m: scaled(m).update(minReplicaCount=0), KEDA,
    ),
    Breakage(
        test_scaled_objects_are_careful, "fewer pods without Prometheus",
        lambda m: scaled(m)["fallback"].update(behavior="static"), KEDA,
    ),
    Breakage(
        test_scaled_objects_are_careful, "down at once",
        lambda m: scaled(m)["advanced"]["horizontalPodAutoscalerConfig"]["behavior"][
            "scaleDown"
        ].update(stabilizationWindowSeconds=0),
        KEDA,
    ),
    Breakage(
        test_metrics_that_are_asked_for_exist, "a metric that nobody has",
        lambda m: alert(m).update(expr="moe_unheard_of > 0"), "gpu-prod",
    ),
    Breakage(
        test_metrics_that_are_asked_for_exist, "a suffix that nobody has",
        lambda m: alert(m).update(expr="rate(moe_generation_tokens_totals[1m]) > 0"), "gpu-prod",
    ),
    Breakage(
        test_monitors_find_their_services, "a port that the Service lacks",
        lambda m: m.one("ServiceMonitor", "gateway")["spec"]["endpoints"][0].update(port="web"),
        "gpu-prod",
    ),
    Breakage(
        test_monitors_find_their_services, "an unmonitored workload",
        lambda m: m.objects.remove(m.one("ServiceMonitor", "expert-worker")), "gpu-prod",
    ),
    Breakage(
        test_monitors_find_their_services, "two Services",
        lambda m: m.one("Service", "expert-worker-pods")["metadata"]["labels"].update(
            {"app.kubernetes.io/name": "expert-worker"}
        ),
        "gpu-prod",
    ),
]  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES, ids=str)
def test_breakage_is_noticed(breakage: Breakage, rendered: dict[str, Manifests]) -> None:
    """Each check can fail."""
    breakage.assert_noticed(rendered)
