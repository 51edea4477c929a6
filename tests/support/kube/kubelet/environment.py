"""What a container sees of its pod: environment, arguments, folders, as its manifest says."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.kube.client import KubeClient
from tests.support.kube.resources import CONFIG_MAPS, SECRETS, ApiError, Json
from tests.support.manifests import quantity

_VARIABLE = re.compile(r"\$(\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")
_FIELD = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")
_ANY_ADDRESS = "0.0.0.0"


@dataclass(frozen=True)
class Sandbox:
    """Stands in for a pod's own network and file system.

    Args:
        address: Of the pod: what is bound to any address is bound to this one.
        folders: Path in the container to the folder on this machine.
    """

    address: str
    folders: Mapping[str, Path]

    def translate(self, text: str) -> str:
        """A value or argument with addresses and paths of this machine."""
        text = text.replace(_ANY_ADDRESS, self.address)
        if not self.folders:
            return text
        # All at once: what a path is replaced by may begin like another path. Long ones first.
        paths = "|".join(re.escape(path) for path in sorted(self.folders, key=len, reverse=True))
        return re.sub(
            rf"(^|[=:,])({paths})(?=$|[/:,])",
            lambda found: found[1] + str(self.folders[found[2]]),
            text,
        )


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces `$(NAME)` of variables that there are; `$$` is a dollar sign."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else variables.get(found[2], found[0])

    return _VARIABLE.sub(value, text)


async def variables_of(
    client: KubeClient, pod: Json, container: Json, address: str
) -> dict[str, str]:
    """The environment that a manifest gives to a container; ApiError if a source is not there."""
    namespace = pod["metadata"]["namespace"]
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        reference = source.get("configMapRef") or source["secretRef"]
        data = await read_data(client, namespace, source, reference)
        variables |= {source.get("prefix", "") + name: value for name, value in data.items()}
    for item in container.get("env", []):
        if "valueFrom" not in item:
            variables[item["name"]] = expand(item.get("value", ""), variables)
            continue
        value = await _value_from(client, pod, container, address, item["valueFrom"])
        if value is not None:
            variables[item["name"]] = value
    return variables


async def _value_from(
    client: KubeClient, pod: Json, container: Json, address: str, source: Json
) -> str | None:
    if "fieldRef" in source:
        return field_of(pod, address, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource_of(container, source["resourceFieldRef"])
    reference = source.get("configMapKeyRef") or source["secretKeyRef"]
    named = {"configMapRef": 1} if "configMapKeyRef" in source else {"secretRef": 1}
    data = await read_data(client, pod["metadata"]["namespace"], named, reference)
    return data.get(reference["key"])


async def read_data(
    client: KubeClient, namespace: str, source: Json, reference: Json
) -> dict[str, str]:
    """Of the ConfigMap or Secret that is referred to; empty if it is optional and missing."""
    is_secret = "secretRef" in source or "secret" in source
    name = reference.get("name") or reference["secretName"]
    try:
        item = await client.get(SECRETS if is_secret else CONFIG_MAPS, namespace, name)
    except ApiError as error:
        if error.code == 404 and reference.get("optional"):
            return {}
        raise
    data = item.get("data") or {}
    if is_secret:
        return {key: base64.b64decode(value).decode() for key, value in data.items()}
    return data


def field_of(pod: Json, address: str, path: str) -> str:
    """A field of the downward API."""
    metadata, spec = pod["metadata"], pod["spec"]
    if found := _FIELD.match(path):
        return metadata.get(found[1], {}).get(found[2], "")
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": address,
        "status.podIPs": address,
        "status.hostIP": "127.0.0.1",
    }
    return values[path]


def resource_of(container: Json, reference: Json) -> str:
    """A limit or request of the container, rounded up to a multiple of the divisor."""
    kind, name = reference["resource"].split(".", 1)
    amount = quantity(container["resources"][kind][name])
    return str(math.ceil(amount / quantity(reference.get("divisor", "1"))))


def command_of(container: Json, variables: Mapping[str, str]) -> list[str]:
    """What is run: the manifest's command, which all of ours name, and its arguments."""
    parts = [*container["command"], *container.get("args", [])]
    return [expand(part, variables) for part in parts]
