"""What the programs of the pods make of the flags and variables in their manifests."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from unittest import mock

from expert_worker import hand_over
from expert_worker.__main__ import parse_settings
from expertmesh.settings import (
    EngineSettings,
    ExpertWorkerSettings,
    HttpSettings,
    MeshOptions,
)
from gateway.command.cli import app
from tests.support.kube.kubelet.environment import command_of, expand, resource_of
from tests.support.kube.resources import Json
from tests.support.manifests import Manifests

POD = {"status.podIP": "10.0.0.7", "metadata.name": "expert-worker-0", "spec.nodeName": "a-node"}
"""What the downward API says of a pod."""


def environment(found: Manifests, container: Json) -> dict[str, str]:
    """The variables of a container, as a kubelet sets them; none from Secrets."""
    values = found.settings(container)
    for entry in container.get("env", ()):
        value = _value(container, entry)
        if value is not None:
            values[entry["name"]] = expand(value, values)
    return values


def _value(container: Json, entry: Json) -> str | None:
    if "value" in entry:
        return str(entry["value"])
    source = entry["valueFrom"]
    if "fieldRef" in source:
        return POD[source["fieldRef"]["fieldPath"]]
    if "resourceFieldRef" in source:
        return resource_of(container, source["resourceFieldRef"])
    return None


def command_line(found: Manifests, container: Json) -> list[str]:
    """Program and arguments of a container, expanded."""
    return command_of(container, environment(found, container))


def expert_settings(found: Manifests) -> tuple[ExpertWorkerSettings, int | None]:
    """Settings of an expert worker and its port of /metrics."""
    line = command_line(found, found.container("expert-worker"))
    assert line[:3] == ["python", "-m", "expert_worker"]
    return parse_settings(line[3:])


def parsed_command(found: Manifests, container: Json) -> Mapping[str, object]:
    """Arguments that the command line `expertmesh` hands to its function."""
    line, values = command_line(found, container), environment(found, container)
    assert line[0] == "expertmesh"
    return _parsed(tuple(line[1:]), tuple(values.items()))


@functools.cache  # slow, and asked for again and again
def _parsed(line: tuple[str, ...], values: tuple[tuple[str, str], ...]) -> Mapping[str, object]:
    with mock.patch.dict("os.environ", dict(values), clear=True):
        _, bound, _ = app.parse_args(list(line), exit_on_error=False, print_error=False)
    return bound.arguments


def gateway_settings(found: Manifests) -> tuple[HttpSettings, MeshOptions, EngineSettings]:
    """Where a gateway listens, what it takes for its mesh, and its limits."""
    given = parsed_command(found, found.container("gateway"))
    http = given.get("http", HttpSettings())
    mesh, engine = given.get("mesh", MeshOptions()), given.get("engine", EngineSettings())
    assert isinstance(http, HttpSettings)
    assert isinstance(mesh, MeshOptions)
    assert isinstance(engine, EngineSettings)
    return http, mesh, engine


def hand_over_arguments(found: Manifests) -> argparse.Namespace:
    """What an expert worker's preStop runs makes of its arguments, in which nothing is expanded."""
    container = found.container("expert-worker")
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    assert command[:3] == ["python", "-m", "expert_worker.hand_over"], "no hand-over"
    with mock.patch.dict("os.environ", environment(found, container), clear=True):
        return hand_over.parse(command[3:])
