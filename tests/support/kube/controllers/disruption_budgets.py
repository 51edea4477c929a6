"""The controller of PodDisruptionBudgets: how many pods may be evicted now."""

from __future__ import annotations

from tests.support.kube.controllers import pods
from tests.support.kube.resources import DISRUPTION_BUDGETS, PODS, Json
from tests.support.kube.selectors import matches_labels
from tests.support.kube.store import Store


def reconcile(store: Store) -> None:
    """Counts healthy pods of each budget."""
    for item in store.list(DISRUPTION_BUDGETS):
        pods.set_status(store, DISRUPTION_BUDGETS, item, _status(store, item))


def _status(store: Store, item: Json) -> Json:
    spec = item["spec"]
    wanted = spec["selector"].get("matchLabels", {})
    members = [
        pod
        for pod in store.list(PODS, item["metadata"]["namespace"])
        if matches_labels(wanted, pod)
    ]
    num_healthy = sum(pods.is_ready(pod) and not pods.is_terminating(pod) for pod in members)
    if "minAvailable" in spec:
        num_needed = pods.share(spec["minAvailable"], len(members), up=True)
    else:
        num_needed = len(members) - pods.share(spec.get("maxUnavailable", 0), len(members), up=True)
    return {
        "expectedPods": len(members),
        "currentHealthy": num_healthy,
        "desiredHealthy": num_needed,
        "disruptionsAllowed": max(0, num_healthy - num_needed),
    }
