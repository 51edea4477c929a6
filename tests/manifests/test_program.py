"""Flags, variables, ports, paths and times in manifests are those of the programs."""

from __future__ import annotations

import functools
from pathlib import PurePosixPath

import pytest

from expert_worker import hand_over
from expert_worker.probes import LIVENESS, READINESS, STARTUP
from expertmesh import __version__
from expertmesh.cores import THREADS
from expertmesh.errors import SettingsError
from expertmesh.settings import (
    EngineSettings,
    ExpertWorkerOptions,
    HttpSettings,
    LogSettings,
    MeshOptions,
    ModelOptions,
)
from expertmesh.transport import EXPERT_WORKER_NAME
from gateway.command.cli import app
from gateway.status_handlers import OPEN_PATHS
from tests.support.manifests import Breakage, Manifests, named, pod_of, variable
from tests.support.pod_programs import (
    POD,
    environment,
    expert_settings,
    gateway_settings,
    hand_over_arguments,
    parsed_command,
)

EXPERT, GATEWAY = "expert-worker", "gateway"
OTHER_VARIABLES = {"EXPERTMESH_HOME", "EXPERTMESH_MODEL", THREADS}
"""Of ours, those that are not flags; the model is an argument."""


@functools.cache
def known_variables() -> frozenset[str]:
    """Variables that the command line reads for a gateway."""
    arguments = app["gateway"].assemble_argument_collection()
    flags = {name for each in arguments for name in each.names if name.startswith("--")}
    return frozenset(
        "EXPERTMESH_" + flag.removeprefix("--").replace("-", "_").upper() for flag in flags
    )


def test_variables_are_flags(found: Manifests) -> None:
    """The command line ignores variables that it does not know, so a slip would go unnoticed."""
    for container in found.all_containers():
        ours = {name for name in environment(found, container) if name.startswith("EXPERTMESH_")}
        assert ours - known_variables() - OTHER_VARIABLES == set()


def test_every_command_line_can_be_read(found: Manifests) -> None:
    """By the programs themselves, with no flag that they lack and no value out of range."""
    expert_settings(found)
    gateway_settings(found)
    hand_over_arguments(found)


def test_init_containers_see_to_the_model(found: Manifests) -> None:
    """To the one that the pod serves, with a command that there is."""
    for pod in found.pods():
        for container in pod["initContainers"]:
            values = environment(found, container)
            assert values["EXPERTMESH_MODEL"] in parsed_command(found, container).values()


def test_ports_of_expert_workers(found: Manifests) -> None:
    """Those that the program is told are those that the pod declares; the first is as usual."""
    settings, metrics_port = expert_settings(found)
    declared = {port["name"]: port["containerPort"] for port in found.container(EXPERT)["ports"]}
    assert declared == {
        "grpc": settings.port,
        "direct": settings.direct_port,
        "health": settings.health_port,
        "metrics": metrics_port,
    }
    assert settings.port == ExpertWorkerOptions.port
    assert len(set(declared.values())) == 4


def test_expert_workers_start_empty_as_pods(found: Manifests) -> None:
    """They get their experts from the leader, and say where they are and on which device."""
    settings, _ = expert_settings(found)
    assert settings.experts == "none"
    assert settings.expert_slots is None
    assert settings.host == POD["status.podIP"]
    assert settings.worker_id == POD["metadata.name"]
    assert settings.node == POD["spec.nodeName"]
    assert settings.device == ("cuda" if "gpu" in found.name else "cpu")


def test_both_programs_agree(found: Manifests) -> None:
    """On the model and on types of weights, which expert workers are refused for otherwise."""
    settings, _ = expert_settings(found)
    given = parsed_command(found, found.container(GATEWAY))
    options = given.get("options", ModelOptions())
    assert isinstance(options, ModelOptions)
    assert settings.model == given["model"]
    assert settings.dtype == options.dtype
    assert settings.expert_dtype == options.expert_dtype
    assert settings.log == given.get("log", LogSettings())


def test_the_mesh_is_encrypted_where_it_says_so(found: Manifests) -> None:
    """With the component, all three programs show certificates that are mounted, and none of them
    would do without; the expert worker's is for the name that is asked for."""
    settings, _ = expert_settings(found)
    _, mesh, _ = gateway_settings(found)
    asked = hand_over.tls_of(hand_over_arguments(found)).tls_files
    encrypted = "mtls" in found.name or found.name == "gpu-prod"
    assert (settings.tls_files is not None) == encrypted
    assert settings.insecure is not encrypted
    assert settings.tls_files == mesh.tls_files == asked
    if settings.tls_files is None:
        return
    names = found.one("Certificate", "expert-worker-mesh")["spec"]["dnsNames"]
    assert names == [EXPERT_WORKER_NAME]
    for container, workload in ((GATEWAY, found.gateway), (EXPERT, found.experts)):
        mount = named(found.container(container)["volumeMounts"], "mesh-tls")
        volume = named(pod_of(workload)["volumes"], "mesh-tls")["secret"]
        assert volume["secretName"] == f"{container}-mesh-tls"
        certificate = found.one("Certificate", f"{container}-mesh")["spec"]
        assert certificate["secretName"] == volume["secretName"]
        files = vars(settings.tls_files).values()
        assert set(files) == {
            f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")
        }


def test_ports_of_gateways(found: Manifests) -> None:
    """They are the usual ones, and reachable from outside of the pod."""
    http, mesh, _ = gateway_settings(found)
    declared = {port["name"]: port["containerPort"] for port in found.container(GATEWAY)["ports"]}
    assert declared == {"http": http.port, "grpc": http.grpc_port}
    assert (http.port, http.grpc_port) == (HttpSettings.port, HttpSettings.grpc_port)
    assert http.host == "0.0.0.0"
    assert mesh.placement == "auto"
    assert mesh.min_copies == MeshOptions.min_copies


def test_health_checks_are_answered(found: Manifests) -> None:
    """Paths need no key, and services are those that the expert worker has."""
    gateway, expert = found.container(GATEWAY), found.container(EXPERT)
    paths = {name: gateway[name]["httpGet"]["path"] for name in gateway if name.endswith("Probe")}
    assert set(paths.values()) <= OPEN_PATHS
    assert paths["readinessProbe"] == "/ready"
    assert paths["livenessProbe"] == paths["startupProbe"] == "/health"
    asked = {name: expert[name]["grpc"]["service"] for name in expert if name.endswith("Probe")}
    assert asked == {
        "startupProbe": STARTUP, "readinessProbe": READINESS, "livenessProbe": LIVENESS,
    }  # fmt: skip
    for monitor in found.of("ServiceMonitor"):
        assert all(each["path"] == "/metrics" for each in monitor["spec"]["endpoints"])


def test_times_are_the_programs_own(found: Manifests) -> None:
    """An expert worker's drain and hand-over take what the programs say; a gateway, which `serve`
    ends quickly, gets more behind a load balancer."""
    settings, _ = expert_settings(found)
    assert settings.drain_grace_s == ExpertWorkerOptions.drain_grace_s
    asked = hand_over_arguments(found)
    assert asked.timeout_s == hand_over.TIMEOUT_S
    assert (asked.host, asked.port) == (settings.host, settings.port)
    _, _, engine = gateway_settings(found)
    assert engine.drain_grace_s > EngineSettings.drain_grace_s
    start = found.container(GATEWAY)["startupProbe"]
    assert start["failureThreshold"] * start["periodSeconds"] > engine.startup_timeout_s


def test_images_are_of_this_version(found: Manifests) -> None:
    """A tag says version and variant."""
    for container in found.all_containers():
        name, _, tag = container["image"].rpartition(":")
        has_gpu = "gpu" in found.name and name == "expertmesh/expert-worker"
        assert tag == __version__ + "-cuda" * has_gpu
        assert name in ("expertmesh/gateway", "expertmesh/expert-worker")
        by_name = {"gateway": "expertmesh/gateway", "expert-worker": "expertmesh/expert-worker"}
        assert name == by_name.get(container["name"], "expertmesh/gateway")


def test_models_are_kept_in_their_volume(found: Manifests) -> None:
    """Init container and program look in the same folders."""
    for pod in found.pods():
        (container,), (init,) = pod["containers"], pod["initContainers"]
        for name in ("EXPERTMESH_HOME", "HF_HOME"):
            folder = variable(container, name)["value"]
            assert folder == variable(init, name)["value"]
            mount = named(container["volumeMounts"], "models")["mountPath"]
            assert PurePosixPath(folder).is_relative_to(mount)


BREAKAGES = [
    Breakage(
        test_variables_are_flags, "a slip",
        lambda m: m.container(GATEWAY)["env"].append(
            {"name": "EXPERTMESH_MIN_COPYS", "value": "2"}
        ),
    ),
    Breakage(
        test_init_containers_see_to_the_model, "another model",
        lambda m: pod_of(m.experts)["initContainers"][0].update(args=["demo-dense"]),
    ),
    Breakage(
        test_ports_of_expert_workers, "another port",
        lambda m: named(m.container(EXPERT)["ports"], "direct").update(containerPort=50064),
    ),
    Breakage(
        test_ports_of_expert_workers, "metrics where nobody asks",
        lambda m: m.container(EXPERT)["args"].append("--metrics-port=9200"),
    ),
    Breakage(
        test_expert_workers_start_empty_as_pods, "all experts",
        lambda m: m.container(EXPERT)["args"].append("--experts=all"),
    ),
    Breakage(
        test_expert_workers_start_empty_as_pods, "the CPU of a machine with GPUs",
        lambda m: variable(m.container(EXPERT), "DEVICE").update(value="cpu"), "gpu-prod",
    ),
    Breakage(
        test_both_programs_agree, "another type",
        lambda m: m.container(EXPERT)["args"].append("--expert-dtype=int8"),
    ),
    Breakage(
        test_both_programs_agree, "another model",
        lambda m: m.container(GATEWAY)["args"].__setitem__(0, "demo-plain"),
    ),
    Breakage(
        test_the_mesh_is_encrypted_where_it_says_so, "plain text if need be",
        lambda m: m.container(EXPERT)["args"].append("--insecure"), "gpu-prod",
    ),
    Breakage(
        test_the_mesh_is_encrypted_where_it_says_so, "a hand-over in plain text",
        lambda m: m.container(EXPERT)["lifecycle"]["preStop"]["exec"].update(
            command=["python", "-m", "expert_worker.hand_over"]
        ),
        "gpu-prod",
    ),
    Breakage(
        test_the_mesh_is_encrypted_where_it_says_so, "a certificate for another name",
        lambda m: m.one("Certificate", "expert-worker-mesh")["spec"].update(dnsNames=["worker"]),
        "local-cpu+mtls",
    ),
    Breakage(
        test_the_mesh_is_encrypted_where_it_says_so, "a Secret that nobody makes",
        lambda m: named(pod_of(m.gateway)["volumes"], "mesh-tls")["secret"].update(
            secretName="gateway-tls"
        ),
        "gpu-prod",
    ),
    Breakage(
        test_ports_of_gateways, "loopback",
        lambda m: m.container(GATEWAY)["args"].__setitem__(1, "--host=127.0.0.1"),
    ),
    Breakage(
        test_ports_of_gateways, "another port",
        lambda m: m.container(GATEWAY)["ports"][0].update(containerPort=8080),
    ),
    Breakage(
        test_health_checks_are_answered, "a path that is not there",
        lambda m: m.container(GATEWAY)["readinessProbe"]["httpGet"].update(path="/readyz"),
    ),
    Breakage(
        test_health_checks_are_answered, "a service that is not there",
        lambda m: m.container(EXPERT)["startupProbe"]["grpc"].update(service="started"),
    ),
    Breakage(
        test_times_are_the_programs_own, "another drain",
        lambda m: m.container(EXPERT)["args"].append("--drain-grace-s=5"),
    ),
    Breakage(
        test_times_are_the_programs_own, "an impatient preStop",
        lambda m: m.container(EXPERT)["lifecycle"]["preStop"]["exec"]["command"].append(
            "--timeout-s=5"
        ),
    ),
    Breakage(
        test_images_are_of_this_version, "another version",
        lambda m: m.container(GATEWAY).update(image="expertmesh/gateway:0.0.9"),
    ),
    Breakage(
        test_images_are_of_this_version, "no CUDA",
        lambda m: m.container(EXPERT).update(image="expertmesh/expert-worker:0.1.0"), "gpu-prod",
    ),
    Breakage(
        test_models_are_kept_in_their_volume, "two folders",
        lambda m: variable(
            pod_of(m.experts)["initContainers"][0], "HF_HOME"
        ).update(value="/models/hub"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES, ids=str)
def test_breakage_is_noticed(breakage: Breakage, rendered: dict[str, Manifests]) -> None:
    """Each check can fail."""
    breakage.assert_noticed(rendered)


@pytest.mark.parametrize("flag", ["--no-such-flag=1", "--port=70000", "--dtype=fp4"])
def test_wrong_flags_are_noticed(flag: str, rendered: dict[str, Manifests]) -> None:
    """The programs refuse what they do not know; the tests ask them."""
    broken = rendered["local-cpu"].copy()
    broken.container(EXPERT)["args"].append(flag)
    with pytest.raises((SystemExit, SettingsError)):
        test_every_command_line_can_be_read(broken)
