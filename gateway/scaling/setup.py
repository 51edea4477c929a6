"""What scales the expert workers of a gateway, by its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from expertmesh.errors import SettingsError
from expertmesh.scaling_settings import ScalingSettings
from expertmesh.settings import MeshOptions
from gateway.cluster.access import ClusterAccess
from gateway.cluster.api import ClusterApi
from gateway.mesh.worker_report import KnownWorker
from gateway.placement.controller import PlacementController
from gateway.placement.operator import Operator
from gateway.scaling.autoscaler import Autoscaler
from gateway.scaling.policy import ScalingPolicy
from gateway.scaling.scaler import NoScaler, Scaler, ThreadScaler
from gateway.scaling.stateful_set import StatefulSetScale


def make_scaler(
    settings: ScalingSettings,
    mesh: MeshOptions,
    workers: Callable[[], Sequence[KnownWorker]],
    placement: Operator,
) -> Scaler:
    """The scaler; nothing runs yet. Not for a thread with a running event loop.

    Args:
        settings: What is asked for.
        mesh: How the API server is reached.
        workers: Tells the expert workers that answer and fit.
        placement: What has experts handed over.

    Raises:
        SettingsError: Nothing here could fill new expert workers.
        StartupError: The API server cannot be asked.
    """
    if settings.autoscale == "off":
        return NoScaler()
    if not isinstance(placement, PlacementController):
        raise SettingsError(
            "autoscale is on, but expert workers hold what they were started with",
            fix="use --placement auto with expert workers, and a model that has experts",
        )
    target = StatefulSetScale(ClusterApi.open(ClusterAccess.of(mesh)), settings.target_name)
    policy = ScalingPolicy(
        min_workers=settings.min_expert_workers,
        max_workers=settings.max_expert_workers,
        wait_high_s=settings.scale_up_wait_ms / 1e3,
    )
    autoscaler = Autoscaler(settings.target_name, target, workers, placement, policy)
    return ThreadScaler(autoscaler, target)
