"""Metrics of the expert workers as the gateway sees them, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from expertmesh import __version__
from gateway.mesh.mesh_status import ExpertWorkerState, MeshStatus
from gateway.scraped import ReadWhenScraped


class MeshCollector(ReadWhenScraped):
    """State of the expert workers."""

    def __init__(self, mesh: Callable[[], MeshStatus]) -> None:
        self._mesh = mesh

    def collect(self) -> Iterator[Metric]:
        """Gauges of the moment."""
        mesh = self._mesh()
        states = [worker.state for worker in mesh.workers]
        workers = GaugeMetricFamily("moe_workers", "Expert workers, by state", labels=("state",))
        for state in ExpertWorkerState:
            workers.add_metric((state.value,), states.count(state))
        yield workers
        uncovered = sum(len(experts) for experts in mesh.uncovered.values())
        yield GaugeMetricFamily(
            "moe_uncovered_experts", "(layer, expert) pairs without a usable copy", uncovered
        )
        yield CounterMetricFamily(
            "moe_wrong_expert_copies",
            "Copies of experts with other bytes than this gateway's checkpoint, found and left out",
            mesh.num_wrong_copies,
        )
        yield GaugeMetricFamily("moe_placement_version", "Epoch of the expert map", mesh.epoch)
        yield GaugeMetricFamily("moe_ready", "1 if requests can be served", float(mesh.ready))
        info = GaugeMetricFamily("moe_build_info", "Always 1", labels=("version",))
        info.add_metric((__version__,), 1)
        yield info
