"""What pods of others died of: probes, ends, caches, environments, rights."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from tests.support.kube.resources import Json
from tests.support.manifests import (
    GPU,
    Breakage,
    Manifests,
    named,
    pod_of,
    quantity,
    variable,
)
from tests.support.pod_programs import expert_settings, gateway_settings, hand_over_arguments

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
SLOWEST_START_S = 600
"""A large model may take so long to load."""
SHELLS = ("sh", "bash", "dash", "ash")
CACHES = (
    "HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "EXPERTMESH_HOME", "HF_HOME",
)  # fmt: skip
PLAIN_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
"""Of those that Pod Security "restricted" allows, the ones that are used."""
END_S = 10
"""After the drain, for the rest of an orderly end."""


def probes(container: Json) -> list[Json]:
    """Those of a container that must have all three."""
    assert container.keys() >= set(PROBES), container["name"]
    return [container[name] for name in PROBES]


# --- start and health ---


def test_a_slow_start_is_not_killed(found: Manifests) -> None:
    """A start-up probe gives loading all the time it may need; nothing else delays checks."""
    for container in found.containers():
        for probe in probes(container):
            assert "initialDelaySeconds" not in probe
        start = container["startupProbe"]
        assert start["failureThreshold"] * start["periodSeconds"] >= SLOWEST_START_S


def test_probes_do_not_kill_busy_pods(found: Manifests) -> None:
    """Probes are patient, and a pod that is not ready is not therefore restarted."""
    for container in found.containers():
        for probe in probes(container):
            assert probe.get("timeoutSeconds", 1) >= 5
        live = container["livenessProbe"]
        assert live["failureThreshold"] * live["periodSeconds"] >= 60
        assert question(live) != question(container["readinessProbe"])


def question(probe: Json) -> object:
    """What a probe asks."""
    return probe["grpc"]["service"] if "grpc" in probe else probe["httpGet"]["path"]


def test_probes_of_expert_workers_are_apart_from_data(found: Manifests) -> None:
    """No load of calls can hold them up: they have a port of their own, which is declared."""
    container = found.container("expert-worker")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in probes(container):
        assert type(probe["grpc"]["port"]) is int
        assert probe["grpc"]["port"] == ports["health"]
        assert probe["grpc"]["port"] not in (ports["grpc"], ports["direct"])


# --- end ---


def grace_s(workload: Json) -> int:
    """Seconds from the wish to end a pod to its death."""
    return pod_of(workload).get("terminationGracePeriodSeconds", 30)


def test_gateways_have_time_to_drain(found: Manifests) -> None:
    """A gateway answers until it is forgotten, then its requests end, then it has time to stop."""
    hook = found.container("gateway").get("lifecycle", {}).get("preStop", {})
    pause_s = hook.get("sleep", {}).get("seconds", 0)
    assert pause_s > 0
    _, _, engine = gateway_settings(found)
    assert grace_s(found.gateway) >= pause_s + engine.drain_grace_s + END_S


def test_expert_workers_have_time_to_hand_over(found: Manifests) -> None:
    """So does an expert worker, whose experts are loaded elsewhere meanwhile."""
    pause_s = hand_over_arguments(found).timeout_s
    settings, _ = expert_settings(found)
    assert pause_s >= settings.drain_grace_s
    assert grace_s(found.experts) >= pause_s + settings.drain_grace_s + END_S


def test_signals_arrive(found: Manifests) -> None:
    """No shell stands between Kubernetes and a program, or it makes way."""
    for container in found.all_containers():
        line = [*container["command"], *container.get("args", ())]
        if PurePosixPath(line[0]).name in SHELLS:
            script = line[-1].strip().splitlines()
            assert script[-1].lstrip().startswith("exec "), container["name"]


# --- files and rights ---


def test_caches_can_be_written(found: Manifests) -> None:
    """Whatever keeps files finds a volume for them, whoever the user is."""
    for pod in found.pods():
        writable = {
            v["name"] for v in pod["volumes"] if {"emptyDir", "persistentVolumeClaim"} & v.keys()
        }
        for container in (*pod["containers"], *pod["initContainers"]):
            folders = [
                mount["mountPath"]
                for mount in container["volumeMounts"]
                if mount["name"] in writable and not mount.get("readOnly")
            ]
            assert "/tmp" in folders
            for name in CACHES:
                path = PurePosixPath(variable(container, name)["value"])
                assert any(path.is_relative_to(folder) for folder in folders), name


def test_every_mount_has_its_volume(found: Manifests) -> None:
    """Kubernetes takes a pod without, and then never starts it."""
    for pod in found.pods():
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert len(volumes) == len(set(volumes))
        for volume in pod["volumes"]:
            assert len(volume) == 2, f"volume {volume['name']} is of two kinds"
        for container in (*pod["containers"], *pod["initContainers"]):
            mounts = [mount["name"] for mount in container["volumeMounts"]]
            assert set(mounts) <= set(volumes), container["name"]


def test_roots_are_read_only_but_with_gpus(found: Manifests) -> None:
    """What a pod writes goes to volumes. NVIDIA's hook needs a root that can be written, and the
    manifest says so."""
    for workload in found.workloads:
        for container in pod_of(workload)["containers"]:
            has_gpu = GPU in container["resources"]["limits"]
            assert container["securityContext"]["readOnlyRootFilesystem"] is not has_gpu
            notes = workload["spec"]["template"]["metadata"].get("annotations", {})
            assert ("expertmesh.io/writable-root" in notes) == has_gpu


def test_pods_are_restricted(found: Manifests) -> None:
    """They pass Pod Security "restricted", which the namespace enforces."""
    labels = found.one("Namespace", "expertmesh")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in found.pods():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for volume in pod["volumes"]:
            assert volume.keys() - {"name"} <= PLAIN_VOLUMES
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod["initContainers"]):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert own.keys() <= {
                "allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem",
            }  # fmt: skip
            assert not any("hostPort" in port for port in container.get("ports", ()))


# --- environment and resources ---


def test_the_environment_holds_no_surprises(found: Manifests) -> None:
    """Kubernetes adds no variables, ours look like none that it adds, and threads are as many as
    the cores that a container may use."""
    services = {service["metadata"]["name"] for service in found.of("Service")}
    added = tuple(f"{name.upper().replace('-', '_')}_PORT" for name in services)
    for pod in found.pods():
        assert pod.get("enableServiceLinks") is False
        for container in (*pod["containers"], *pod["initContainers"]):
            names = [entry["name"] for entry in container["env"]]
            assert len(names) == len(set(names))
            assert not any(name.startswith(added) for name in (*names, *found.settings(container)))
            source = variable(container, "OMP_NUM_THREADS").get("valueFrom", {})
            assert source.get("resourceFieldRef", {}).get("resource") == "limits.cpu"
    for container in found.containers():
        source = variable(container, "EXPERTMESH_THREADS").get("valueFrom", {})
        assert source.get("resourceFieldRef", {}).get("resource") == "limits.cpu"


def test_resources_are_requested(found: Manifests) -> None:
    """The scheduler knows what pods need, and memory that they may use is theirs."""
    for container in found.all_containers():
        asked, most = container["resources"]["requests"], container["resources"]["limits"]
        assert asked.keys() >= {"cpu", "memory", "ephemeral-storage"}
        assert asked["memory"] == most["memory"]
        assert quantity(asked["cpu"]) <= quantity(most["cpu"])
        assert quantity(asked["memory"]) >= 2**28


def test_shared_memory_is_bounded(found: Manifests) -> None:
    """No pod uses /dev/shm; one that did would need a bound and a program that tidies up."""
    for container in found.all_containers():
        assert all(mount["mountPath"] != "/dev/shm" for mount in container["volumeMounts"])


def test_images_are_pinned(found: Manifests) -> None:
    """The same manifest is the same program, and a node that has it asks nobody."""
    for container in found.all_containers():
        name, _, tag = container["image"].rpartition(":")
        assert name, container["image"]
        assert tag[0].isdigit()
        assert not {"latest", "nightly", "main"} & set(tag.split("-"))
        assert container["imagePullPolicy"] == "IfNotPresent"


GATEWAY, EXPERT = "gateway", "expert-worker"

BREAKAGES = [
    Breakage(
        test_a_slow_start_is_not_killed, "no start-up probe",
        lambda m: m.container(EXPERT).pop("startupProbe"),
    ),
    Breakage(
        test_a_slow_start_is_not_killed, "a short start",
        lambda m: m.container(GATEWAY)["startupProbe"].update(failureThreshold=30),
    ),
    Breakage(
        test_a_slow_start_is_not_killed, "a first check that waits",
        lambda m: m.container(EXPERT)["livenessProbe"].update(initialDelaySeconds=30),
    ),
    Breakage(
        test_probes_do_not_kill_busy_pods, "the usual second",
        lambda m: m.container(EXPERT)["readinessProbe"].pop("timeoutSeconds"),
    ),
    Breakage(
        test_probes_do_not_kill_busy_pods, "an impatient liveness probe",
        lambda m: m.container(GATEWAY)["livenessProbe"].update(failureThreshold=3),
    ),
    Breakage(
        test_probes_do_not_kill_busy_pods, "liveness asks for readiness",
        lambda m: m.container(EXPERT)["livenessProbe"]["grpc"].update(service="readiness"),
    ),
    Breakage(
        test_probes_of_expert_workers_are_apart_from_data, "a name for a port",
        lambda m: m.container(EXPERT)["startupProbe"]["grpc"].update(port="health"),
    ),
    Breakage(
        test_probes_of_expert_workers_are_apart_from_data, "the port of data",
        lambda m: m.container(EXPERT)["readinessProbe"]["grpc"].update(port=50061),
    ),
    Breakage(
        test_gateways_have_time_to_drain, "no preStop",
        lambda m: m.container(GATEWAY).pop("lifecycle"),
    ),
    Breakage(
        test_gateways_have_time_to_drain, "too short a grace",
        lambda m: pod_of(m.gateway).update(terminationGracePeriodSeconds=60),
    ),
    Breakage(
        test_expert_workers_have_time_to_hand_over, "no preStop",
        lambda m: m.container(EXPERT).pop("lifecycle"),
    ),
    Breakage(
        test_expert_workers_have_time_to_hand_over, "the usual grace",
        lambda m: pod_of(m.experts).pop("terminationGracePeriodSeconds"),
    ),
    Breakage(
        test_expert_workers_have_time_to_hand_over, "a drain that takes longer",
        lambda m: m.container(EXPERT)["args"].append("--drain-grace-s=600"),
    ),
    Breakage(
        test_signals_arrive, "a shell",
        lambda m: m.container(EXPERT).update(command=["/bin/sh", "-c"], args=["python -m x"]),
    ),
    Breakage(
        test_caches_can_be_written, "a cache in the image",
        lambda m: variable(m.container(EXPERT), "TRITON_CACHE_DIR").update(value="/opt/triton"),
    ),
    Breakage(
        test_caches_can_be_written, "a cache that cannot be written",
        lambda m: named(m.container(GATEWAY)["volumeMounts"], "cache").update(readOnly=True),
    ),
    Breakage(
        test_every_mount_has_its_volume, "a volume forgotten",
        lambda m: pod_of(m.experts)["volumes"].pop(),
    ),
    Breakage(
        test_every_mount_has_its_volume, "a volume of two kinds",
        lambda m: pod_of(m.experts)["volumes"][0].update(secret={"secretName": "x"}),
    ),
    Breakage(
        test_roots_are_read_only_but_with_gpus, "a root that can be written",
        lambda m: m.container(GATEWAY)["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    Breakage(
        test_roots_are_read_only_but_with_gpus, "a read-only root with a GPU",
        lambda m: m.container(EXPERT)["securityContext"].update(readOnlyRootFilesystem=True),
        "gpu-prod",
    ),
    Breakage(
        test_pods_are_restricted, "root",
        lambda m: pod_of(m.gateway)["securityContext"].update(runAsUser=0),
    ),
    Breakage(
        test_pods_are_restricted, "a folder of the node",
        lambda m: pod_of(m.experts)["volumes"].append(
            {"name": "proc", "hostPath": {"path": "/proc"}}
        ),
    ),
    Breakage(
        test_pods_are_restricted, "a capability",
        lambda m: m.container(EXPERT)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
    ),
    Breakage(
        test_pods_are_restricted, "a namespace that takes anything",
        lambda m: m.one("Namespace", "expertmesh")["metadata"]["labels"].update(
            {"pod-security.kubernetes.io/enforce": "privileged"}
        ),
    ),
    Breakage(
        test_the_environment_holds_no_surprises, "variables of Services",
        lambda m: pod_of(m.experts).pop("enableServiceLinks"),
    ),
    Breakage(
        test_the_environment_holds_no_surprises, "a variable like those of Services",
        lambda m: m.container(GATEWAY)["env"].append({"name": "GATEWAY_PORT", "value": "8000"}),
    ),
    Breakage(
        test_the_environment_holds_no_surprises, "threads by guess",
        lambda m: variable(m.container(EXPERT), "OMP_NUM_THREADS").update(value="4", valueFrom={}),
    ),
    Breakage(
        test_resources_are_requested, "memory that others may take",
        lambda m: m.container(EXPERT)["resources"]["requests"].update(memory="1Gi"),
    ),
    Breakage(
        test_resources_are_requested, "more than the limit",
        lambda m: m.container(GATEWAY)["resources"]["requests"].update(cpu="8"),
    ),
    Breakage(
        test_resources_are_requested, "4Gb",
        lambda m: [
            m.container(EXPERT)["resources"][part].update(memory="4Gb")
            for part in ("requests", "limits")
        ],
    ),
    Breakage(
        test_shared_memory_is_bounded, "shared memory without a bound",
        lambda m: m.container(EXPERT)["volumeMounts"].append(
            {"name": "tmp", "mountPath": "/dev/shm"}
        ),
    ),
    Breakage(
        test_images_are_pinned, "whatever is newest",
        lambda m: m.container(EXPERT).update(image="expertmesh/expert-worker:latest"),
    ),
    Breakage(
        test_images_are_pinned, "no tag",
        lambda m: m.container(EXPERT).update(image="expertmesh/expert-worker"),
    ),
    Breakage(
        test_images_are_pinned, "pulled each time",
        lambda m: m.container(GATEWAY).update(imagePullPolicy="Always"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES, ids=str)
def test_breakage_is_noticed(breakage: Breakage, rendered: dict[str, Manifests]) -> None:
    """Each check can fail."""
    breakage.assert_noticed(rendered)
