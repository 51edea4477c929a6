"""How a patch changes an object: the three kinds of patches that kubectl and clients send."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

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


def patched(item: Json, patch: object, content_type: str) -> Json:
    """A changed copy of an object; ApiError for a patch that is none."""
    item = copy.deepcopy(item)
    if content_type == _JSON_PATCH and isinstance(patch, list):
        return _operations(item, patch)
    if content_type in _MERGES and isinstance(patch, dict):
        return _MERGES[content_type](item, patch)
    if content_type in (_JSON_PATCH, *_MERGES):
        raise bad_request(f"a patch of this format is no {type(patch).__name__}")
    message = f"the body of the request was in an unknown format: {content_type}"
    raise ApiError(415, "UnsupportedMediaType", message)


def _merge(item: object, patch: Json) -> Json:
    """RFC 7386."""
    merged = dict(item) if isinstance(item, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), value) if isinstance(value, dict) else value
    return merged


def _strategic(item: object, patch: Json) -> Json:
    """As a merge patch, but for lists whose items have a key, and for directives."""
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
            merged[name] = _strategic(merged.get(name), value) if isinstance(value, dict) else value
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


def _operations(item: Json, patch: list[Json]) -> Json:
    """RFC 6902: add, remove, replace and test."""
    for operation in patch:
        *path, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        parent: object = item
        try:
            for part in path:
                parent = _child(parent, part)
            _operate(parent, last, operation)
        except (KeyError, IndexError, ValueError) as error:
            raise bad_request(f"cannot apply {operation}: {error}") from error
    return item


def _child(parent: object, name: str) -> object:
    match parent:
        case list():
            return parent[int(name)]
        case dict():
            return parent[name]
    raise ValueError(f"{parent!r} has no parts")


def _operate(parent: object, last: str, operation: Json) -> None:
    match operation["op"], parent:
        case "add", list() as items:
            items.insert(len(items) if last == "-" else int(last), operation["value"])
        case "add", dict() as fields:
            fields[last] = operation["value"]
        case "remove", list() as items:
            del items[int(last)]
        case "remove", dict() as fields:
            del fields[last]
        case "replace", _:
            _operate(parent, last, {"op": "remove"})
            _operate(parent, last, {**operation, "op": "add"})
        case "test", _:
            if _child(parent, last) != operation["value"]:
                raise ValueError("the test failed")
        case other, _:
            raise ValueError(f"operation {other!r} is not known here")


_JSON_PATCH = "application/json-patch+json"
_MERGES: dict[str, Callable[[object, Json], Json]] = {
    "application/merge-patch+json": _merge,
    "application/strategic-merge-patch+json": _strategic,
}
