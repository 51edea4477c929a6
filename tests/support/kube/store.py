"""What the API server of the tests remembers: objects, and the history of their changes.

All belongs to one event loop. Objects are copied on their way in and out, so nobody changes them
behind the back of a watch.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from tests.support.kube.defaults import filled_in
from tests.support.kube.resources import (
    PODS,
    ApiError,
    Json,
    Resource,
    already_exists,
    conflict,
    expired,
    not_found,
)
from tests.support.kube.selectors import Matches

Change = Callable[[Json], Json]


@dataclass(frozen=True)
class Key:
    """Names one object."""

    resource: Resource
    namespace: str
    name: str


@dataclass(frozen=True)
class Event:
    """One change: an object before and after it; None where there was none."""

    version: int
    key: Key
    before: Json | None
    after: Json | None
    is_hidden: bool
    """No watch tells of it."""


def now() -> str:
    """The time as objects have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """All objects.

    Attributes:
        version: Of the last change; objects and lists carry it as `resourceVersion`.
        hides_changes: Watches are told nothing of what changes now.
    """

    def __init__(self) -> None:
        self.version = 1
        self.hides_changes = False
        self._objects: dict[Key, Json] = {}
        self._history: list[Event] = []
        self._known_since = 0
        self._changed = asyncio.Event()

    def get(self, key: Key) -> Json:
        """A copy of an object; ApiError if there is none."""
        try:
            return copy.deepcopy(self._objects[key])
        except KeyError:
            raise not_found(key.resource, key.name) from None

    def list(
        self, resource: Resource, namespace: str = "", matches: Matches | None = None
    ) -> list[Json]:
        """Copies of all objects of a kind, by name; of all namespaces if none is given."""
        found = [
            item
            for key, item in self._objects.items()
            if key.resource == resource
            and namespace in ("", key.namespace)
            and (matches is None or matches(item))
        ]
        return copy.deepcopy(sorted(found, key=lambda item: item["metadata"]["name"]))

    def create(self, resource: Resource, item: Json, namespace: str = "") -> Json:
        """Adds an object as the server would: with uid, times, version, and what is left out."""
        item = filled_in(resource, copy.deepcopy(item))
        metadata = item["metadata"]
        if "name" not in metadata and "generateName" in metadata:
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        if resource.namespaced:
            metadata["namespace"] = namespace or metadata.get("namespace") or "default"
        key = Key(resource, metadata.get("namespace", ""), metadata["name"])
        if key in self._objects:
            raise already_exists(resource, key.name)
        metadata.update(uid=str(uuid.uuid4()), creationTimestamp=now())
        if resource.has_generation:
            metadata["generation"] = 1
        return self._put(key, item)

    def update(self, key: Key, change: Change) -> Json:
        """Replaces an object by what `change` makes of it, if that is anything else.

        ApiError if there is none, or if the new one names another version or uid.
        """
        before = self.get(key)
        after = change(copy.deepcopy(before))
        given, old = after["metadata"], before["metadata"]
        if given.get("resourceVersion") not in (None, "", old["resourceVersion"]):
            raise conflict(key.resource, key.name)
        if given.get("uid") not in (None, "", old["uid"]):
            raise conflict(key.resource, key.name)
        given.update({name: old[name] for name in _KEPT if name in old})
        if key.resource.has_generation and after.get("spec") != before.get("spec"):
            given["generation"] += 1
        return before if after == before else self._put(key, after)

    def delete(self, key: Key, grace_s: int | None = None) -> Json:
        """Removes an object; a pod that runs is only marked, and removed with a grace of 0.

        Args:
            key: Of the object; ApiError if there is none.
            grace_s: Seconds that a pod has; None for what it asks for.

        Returns:
            The object as it was last; with a `deletionTimestamp` if it is still there.
        """
        before = self.get(key)
        if grace_s is None:
            grace_s = before.get("spec", {}).get("terminationGracePeriodSeconds", 30)
        if key.resource == PODS and grace_s > 0 and before["spec"].get("nodeName"):
            if "deletionTimestamp" in before["metadata"]:
                return before
            marks = {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace_s}
            return self._put(key, {**before, "metadata": {**before["metadata"], **marks}})
        del self._objects[key]
        self.version += 1
        before["metadata"]["resourceVersion"] = str(self.version)
        self._tell(Event(self.version, key, before, None, self.hides_changes))
        self._collect_garbage(before["metadata"]["uid"])
        return before

    def _collect_garbage(self, uid: str) -> None:
        """Deletes what belonged to a deleted object."""
        for key, item in list(self._objects.items()):
            owners = item["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == uid for owner in owners) and key in self._objects:
                self.delete(key)

    def _put(self, key: Key, item: Json) -> Json:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        before = self._objects.get(key)
        self._objects[key] = copy.deepcopy(item)
        self._tell(Event(self.version, key, before, self._objects[key], self.hides_changes))
        return item

    def _tell(self, event: Event) -> None:
        self._history.append(event)
        self.wake()

    def wake(self) -> None:
        """Has all that wait for a change look."""
        self._changed.set()
        self._changed = asyncio.Event()

    def forget_history(self) -> None:
        """Nobody can watch from an earlier version any more."""
        self._history.clear()
        self._known_since = self.version

    def since(self, version: int) -> list[Event]:
        """All changes after a version; ApiError if they are forgotten."""
        if version < self._known_since:
            raise expired(version)
        return [event for event in self._history if event.version > version]

    @property
    def next_change(self) -> asyncio.Event:
        """Is set with the next change or `wake`."""
        return self._changed


_KEPT = ("name", "namespace", "uid", "creationTimestamp", "generation", "resourceVersion")
"""Of an object's metadata, what writers cannot change."""


def refuse_unknown_version(store: Store, version: str) -> None:
    """ApiError for a list at a version that is not there yet."""
    if version and int(version) > store.version:
        message = f"Timeout: Too large resource version: {version}, current: {store.version}"
        cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
        raise ApiError(504, "Timeout", message, {"causes": [cause], "retryAfterSeconds": 1})
