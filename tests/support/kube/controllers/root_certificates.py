"""Publishes a ConfigMap that pods mount beside their token. Nobody here speaks TLS: it is empty."""

from __future__ import annotations

from tests.support.kube.resources import CONFIG_MAPS, NAMESPACES
from tests.support.kube.store import Store

_NAME = "kube-root-ca.crt"


def reconcile(store: Store) -> None:
    """Each namespace has one."""
    there = {
        item["metadata"]["namespace"]
        for item in store.list(CONFIG_MAPS)
        if item["metadata"]["name"] == _NAME
    }
    for namespace in store.list(NAMESPACES):
        if (name := namespace["metadata"]["name"]) not in there:
            store.create(CONFIG_MAPS, {"metadata": {"name": _NAME}, "data": {"ca.crt": ""}}, name)
