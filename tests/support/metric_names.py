"""Names of all metrics, without torch, to be compared with those that somebody asks for."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry

from expertmesh.settings import EngineSettings
from gateway.engine.scheduler_limits import SchedulerLimits
from gateway.engine_metrics import cache_config
from gateway.mesh.discovery import DiscoveryReport
from gateway.mesh.discovery_metrics import DiscoveryCollector
from gateway.mesh.mesh_status import MeshStatus
from gateway.placement.metrics import PlacementCollector
from gateway.placement.operator import StaticPlacement
from gateway.reception import turned_away_counter
from gateway.request_metrics import RequestMetrics
from gateway.scaling.autoscaler import ScalingReport
from gateway.scaling.metrics import ScalingCollector
from gateway.scaling.policy import Fleet, Sample
from gateway.sequence import DispatchStats, EngineStats, GenerationRequest, SamplingParams
from gateway.telemetry.collector import TelemetryCollector
from gateway.telemetry.telemetry import Telemetry
from tests.support.expert_metrics import EXPERT_METRICS
from tests.support.seen_mesh import OneDevice, SeenMesh

_LIMITS = SchedulerLimits(
    num_kv_blocks=1, kv_block_size=1, num_request_slots=1, max_step_tokens=1, model_len=1
)
_STATS = EngineStats(dispatch=(DispatchStats("an-expert-worker", slowness=1.0),))
_REQUEST = GenerationRequest("an-id", (1,), SamplingParams(max_tokens=1), lambda output: None, 0.0)
_METRIC = re.compile(r"\bmoe_[a-z0-9_]+")
_SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def metrics_in(text: str) -> set[str]:
    """Our metrics that a text names, without suffixes."""
    return {_SUFFIX.sub("", name) for name in _METRIC.findall(text)}


def known_metrics() -> set[str]:
    """Those of gateways and of expert workers, without suffixes."""
    return EXPERT_METRICS | {metric.name for metric in gateway_registry().collect()}


def gateway_registry() -> CollectorRegistry:
    """All metrics of a gateway that leads and scales, with a GPU, after rare events too."""
    registry = CollectorRegistry()
    turned_away_counter(registry)
    requests = RequestMetrics(registry, "a-model")
    requests.watch(lambda: _STATS, MeshStatus, cache_config(EngineSettings(), _LIMITS))
    requests.step_lethal(1)
    requests.request_quarantined(_REQUEST, 1)
    mesh = SeenMesh()
    mesh.call("w0", calls=1)
    registry.register(TelemetryCollector(Telemetry(mesh.sources()), OneDevice()))
    registry.register(DiscoveryCollector(lambda: DiscoveryReport(age_s=0.0)))
    registry.register(PlacementCollector(StaticPlacement().report))
    sample = Sample(at_s=0.0, desired=2, present=2, busy=0.5, wait_s=0.0)
    scaling = ScalingReport(
        Fleet(desired=2, present=2), sample, {("up", "busy"): 1}, {"forbidden": 1}
    )
    registry.register(ScalingCollector(lambda: scaling))
    return registry
