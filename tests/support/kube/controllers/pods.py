"""What controllers ask of pods, and how they make them."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from datetime import UTC, datetime

from tests.support.kube.resources import PODS, Json, Resource
from tests.support.kube.store import Key, Store


def condition(pod: Json, kind: str) -> Json:
    """A condition of a pod; empty if it has none of this type."""
    conditions = pod.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def is_ready(pod: Json) -> bool:
    """Whether it says so itself."""
    return condition(pod, "Ready").get("status") == "True"


def is_terminating(pod: Json) -> bool:
    """Whether it was told to end."""
    return "deletionTimestamp" in pod["metadata"]


def is_finished(pod: Json) -> bool:
    """Whether it has ended by itself."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_available(pod: Json, min_ready_s: float) -> bool:
    """Whether it is ready for so long and goes on."""
    if not is_ready(pod) or is_terminating(pod):
        return False
    since = datetime.fromisoformat(condition(pod, "Ready")["lastTransitionTime"])
    return (datetime.now(UTC) - since).total_seconds() >= min_ready_s


def owned(store: Store, owner: Json) -> list[Json]:
    """All pods that an object has made."""
    uid = owner["metadata"]["uid"]

    def is_owned(pod: Json) -> bool:
        return any(each["uid"] == uid for each in pod["metadata"].get("ownerReferences", []))

    return store.list(PODS, owner["metadata"]["namespace"], is_owned)


def create(store: Store, owner: Json, name: Json, labels: dict[str, str], **spec: object) -> None:
    """Makes a pod of the owner's template.

    Args:
        store: Where to.
        owner: Has `spec.template`.
        name: `name` or `generateName`.
        labels: Besides the template's.
        spec: Besides the template's.
    """
    template, metadata = copy.deepcopy(owner["spec"]["template"]), owner["metadata"]
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    inner = template.get("metadata", {})
    pod = {
        "metadata": {
            **name,
            "labels": {**inner.get("labels", {}), **labels},
            "annotations": inner.get("annotations", {}),
            "ownerReferences": [reference],
        },
        "spec": {**template["spec"], **spec},
    }
    store.create(PODS, pod, metadata["namespace"])


def delete(store: Store, pod: Json) -> None:
    """Tells a pod to end, once."""
    if not is_terminating(pod):
        store.delete(Key(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"]))


def template_hash(owner: Json) -> str:
    """Tells one version of a template from another."""
    text = json.dumps(owner["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def set_status(store: Store, resource: Resource, item: Json, status: Json) -> None:
    """Writes what a controller has seen of an object, if that is new."""
    metadata = item["metadata"]
    key = Key(resource, metadata["namespace"], metadata["name"])
    status = {**status, "observedGeneration": metadata["generation"]}
    store.update(key, lambda old: {**old, "status": status})


def share(value: int | str, whole: int, *, up: bool) -> int:
    """A number of pods, given as such or in per cent."""
    if isinstance(value, int):
        return value
    part = whole * int(value.removesuffix("%")) / 100
    return math.ceil(part) if up else math.floor(part)
