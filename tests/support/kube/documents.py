"""What a client asks before anything else: which kinds there are, and what the server can do."""

from __future__ import annotations

from tests.support.kube.resources import RESOURCES, Json, Resource

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_SUBRESOURCE_KINDS = {
    "scale": ("autoscaling", "v1", "Scale"),
    "eviction": ("policy", "v1", "Eviction"),
    "binding": ("", "v1", "Binding"),
}
VERSION: Json = {"major": "1", "minor": "37", "gitVersion": "v1.37.0", "platform": "linux/amd64"}


def core_versions() -> Json:
    """Of `/api`."""
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}


def groups() -> Json:
    """Of `/apis`."""
    found = {(each.group, each.version) for each in RESOURCES if each.group}
    return {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group(group, version) for group, version in sorted(found)],
    }


def _group(group: str, version: str) -> Json:
    named = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [named], "preferredVersion": named}


def resources_of(root: str) -> Json:
    """Of `/api/v1` or `/apis/GROUP/VERSION`."""
    members = [each for each in RESOURCES if each.root == root]
    listed = []
    for each in members:
        listed.append(_listed(each))
        listed += [_listed_subresource(each, name) for name in each.subresources]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": members[0].api_version,
        "resources": listed,
    }


def _listed(resource: Resource) -> Json:
    return {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": _VERBS,
        "shortNames": list(resource.short),
    }


def _listed_subresource(resource: Resource, name: str) -> Json:
    listed = {
        "name": f"{resource.plural}/{name}",
        "singularName": "",
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": ["get", "patch", "update"],
    }
    if name in _SUBRESOURCE_KINDS:
        group, version, kind = _SUBRESOURCE_KINDS[name]
        listed.update(group=group, version=version, kind=kind, verbs=["create", *listed["verbs"]])
    return listed


def open_api_index() -> Json:
    """Of `/openapi/v3`."""
    roots = sorted({each.root for each in RESOURCES})
    urls = {root[1:]: {"serverRelativeURL": f"/openapi/v3{root}?hash=0"} for root in roots}
    return {"paths": urls}


def open_api(root: str) -> Json:
    """Of one group: just that patches take `fieldValidation`, so that kubectl leaves it to us."""
    validation = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {
        f"{each.path('{namespace}', '{name}')}": {
            "patch": {
                "parameters": [validation],
                "responses": {"200": {"description": "OK"}},
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": {
                    "group": each.group,
                    "version": each.version,
                    "kind": each.kind,
                },
            }
        }
        for each in RESOURCES
        if each.root == root
    }
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.37.0"},
        "paths": paths,
    }
