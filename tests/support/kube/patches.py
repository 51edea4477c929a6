"""How a patch changes an object: the three kinds of patches that kubectl and clients send."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.kube.resources import ApiError, Json, bad_request

_MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
    "topologySpreadConstraints": ("topologyKey",),
    "imagePullSecrets": ("name",),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
    "hostAliases": ("ip",),
}
"""Lists that are merged item by item, and what tells items apart; other lists are replaced."""
_ORDER, _DELETE_FROM, _RETAIN = "$setElementOrder/", "$deleteFromPrimitiveList/", "$retainKeys"


def patched(item: Json, patch: Any, content_type: str) -> Json:
    """A changed copy of an object; ApiError for a patch that is none."""
    try:
        apply = _KINDS[content_type]
    except KeyError:
        message = f"the body of the request was in an unknown format: {content_type}"
        raise ApiError(415, "UnsupportedMediaType", message) from None
    return apply(copy.deepcopy(item), patch)


def _merge(item: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(item) if isinstance(item, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), value)
    return merged


def _strategic(item: Any, patch: Any) -> Any:
    """As a merge patch, but for lists whose items have a key, and for directives."""
    if not isinstance(patch, dict):
        return patch
    if patch.get("$patch") == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    merged = dict(item) if isinstance(item, dict) else {}
    if (kept := patch.get(_RETAIN)) is not None:
        merged = {name: value for name, value in merged.items() if name in kept}
    for name, value in patch.items():
        if name.startswith(_DELETE_FROM):
            field = name.removeprefix(_DELETE_FROM)
            merged[field] = [each for each in merged.get(field, []) if each not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            merged.pop(name, None)
        elif isinstance(value, list) and name in _MERGE_KEYS:
            order = patch.get(_ORDER + name)
            merged[name] = _merge_list(merged.get(name) or [], value, _MERGE_KEYS[name], order)
        else:
            merged[name] = _strategic(merged.get(name), value)
    return merged


def _merge_list(
    items: list[Json], changes: list[Json], keys: Sequence[str], order: list[Json] | None
) -> list[Json]:
    sample = next((each for each in (*changes, *items) if each.keys() & set(keys)), None)
    if sample is None:
        return changes
    key = next(name for name in keys if name in sample)
    by_key = {each[key]: each for each in items}
    for change in changes:
        if change.get("$patch") == "delete":
            by_key.pop(change[key], None)
        else:
            by_key[change[key]] = _strategic(by_key.get(change[key]), change)
    if order is not None:
        places = {each[key]: place for place, each in enumerate(order)}
        return sorted(by_key.values(), key=lambda each: places.get(each[key], len(places)))
    return list(by_key.values())


def _operations(item: Any, patch: list[Json]) -> Any:
    """RFC 6902: add, remove, replace and test."""
    for operation in patch:
        *path, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        parent = item
        try:
            for part in path:
                parent = parent[int(part) if isinstance(parent, list) else part]
            _operate(parent, last, operation)
        except (KeyError, IndexError, ValueError) as error:
            raise bad_request(f"cannot apply {operation}: {error}") from error
    return item


def _operate(parent: Any, last: str, operation: Json) -> None:
    place: Any = last
    if isinstance(parent, list):
        place = len(parent) if last == "-" else int(last)
    match operation["op"]:
        case "add" if isinstance(parent, list):
            parent.insert(place, operation["value"])
        case "add":
            parent[place] = operation["value"]
        case "replace":
            del parent[place]
            _operate(parent, last, {**operation, "op": "add"})
        case "remove":
            del parent[place]
        case "test":
            if parent[place] != operation["value"]:
                raise ValueError("the test failed")
        case other:
            raise ValueError(f"operation {other!r} is not known")


_KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "application/merge-patch+json": _merge,
    "application/strategic-merge-patch+json": _strategic,
    "application/json-patch+json": _operations,
}
