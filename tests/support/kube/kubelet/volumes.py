"""The volumes of a pod as folders of this machine."""

from __future__ import annotations

from pathlib import Path

from tests.support.kube.client import KubeClient
from tests.support.kube.kubelet.environment import field_of, read_data
from tests.support.kube.resources import Json


async def make_volumes(
    client: KubeClient, pod: Json, address: str, folder: Path, claims: Path
) -> dict[str, Path]:
    """Makes all volumes of a pod.

    Args:
        client: To read ConfigMaps and Secrets.
        pod: Has the volumes.
        address: Of the pod.
        folder: Is gone with the pod.
        claims: For what stays when a pod is gone.

    Returns:
        Name of the volume to its folder.
    """
    made = {}
    for volume in pod["spec"].get("volumes", []):
        path = _place(volume, folder, claims)
        path.mkdir(parents=True, exist_ok=True)
        for source in _sources(volume):
            for name, text in (await _files(client, pod, address, source)).items():
                (path / name).write_text(text)
        made[volume["name"]] = path
    return made


def folders_of(container: Json, volumes: dict[str, Path]) -> dict[str, Path]:
    """Path in the container to folder, of each volume that it mounts."""
    return {
        mount["mountPath"].rstrip("/"): volumes[mount["name"]] / mount.get("subPath", "")
        for mount in container.get("volumeMounts", [])
    }


def _place(volume: Json, folder: Path, claims: Path) -> Path:
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    if "persistentVolumeClaim" in volume:
        return claims / volume["persistentVolumeClaim"]["claimName"]
    return folder / volume["name"]


def _sources(volume: Json) -> list[Json]:
    if "projected" in volume:
        return volume["projected"]["sources"]
    return [volume] if volume.keys() & {"configMap", "secret", "downwardAPI"} else []


async def _files(client: KubeClient, pod: Json, address: str, source: Json) -> dict[str, str]:
    if "downwardAPI" in source:
        items = source["downwardAPI"]["items"]
        return {
            item["path"]: field_of(pod, address, item["fieldRef"]["fieldPath"]) for item in items
        }
    if "serviceAccountToken" in source:
        return {source["serviceAccountToken"]["path"]: "nobody asks for it"}
    reference = source.get("configMap") or source["secret"]
    data = await read_data(client, pod["metadata"]["namespace"], source, reference)
    if "items" in reference:
        return {item["path"]: data[item["key"]] for item in reference["items"]}
    return data
