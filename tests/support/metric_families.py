"""All metrics with types, labels and help, as collectors of real processes give them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from expert_worker.call_counters import ROWS_BUCKETS
from expert_worker.metrics import WorkerCollector
from expert_worker.scrubber import ScrubCounts
from expert_worker.state import WorkerState
from expert_worker.store import LayerResidency
from expertmesh.call_waits import WAIT_BOUNDS_S
from expertmesh.v1 import expert_service_pb2 as pb
from gateway.telemetry.exposition import ExpertExposition
from tests.support.metric_names import gateway_registry
from tests.support.seen_mesh import SeenMesh

_INNER = {"histogram": {"le"}, "summary": {"quantile"}}
"""Labels that belong to the type."""


@dataclass(frozen=True)
class MetricFamily:
    """One metric."""

    name: str
    """As clients of a registry name it: without `_total`."""
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def exposed_name(self) -> str:
        """What it is called in an exposition."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def gateway_families() -> list[MetricFamily]:
    """/metrics of a gateway, by name."""
    return _families(gateway_registry().collect())


def expert_worker_families() -> list[MetricFamily]:
    """/metrics of an expert worker, by name."""
    collector = WorkerCollector(cast(WorkerState, _HoldsOneExpert()), ScrubCounts)
    return _families(collector.collect())


def matrix_families() -> list[MetricFamily]:
    """/metrics/experts of a gateway, by name."""
    text = b"".join(ExpertExposition(SeenMesh().sources()).pieces()).decode()
    return _families(text_string_to_metric_families(text))


def _families(metrics: Iterable[Metric]) -> list[MetricFamily]:
    found = []
    for metric in metrics:
        labels = {name for sample in metric.samples for name in sample.labels}
        labels -= _INNER.get(metric.type, set())
        assert metric.samples, f"{metric.name} has no sample that tells its labels"
        family = (metric.name, metric.type, tuple(sorted(labels)), metric.documentation)
        found.append(MetricFamily(*family))
    return sorted(found, key=lambda family: family.name)


class _HoldsOneExpert:
    """What a collector asks of the state of an expert worker, and of its store."""

    num_used_slots = resident_bytes = 1

    @property
    def store(self) -> _HoldsOneExpert:
        """Itself."""
        return self

    def residency(self) -> dict[int, LayerResidency]:
        """One expert of one layer."""
        return {0: LayerResidency((0,), (), ())}

    def load(self) -> pb.LoadCounters:
        """Nothing was done."""
        return pb.LoadCounters(calls_by_wait=[0] * (len(WAIT_BOUNDS_S) + 1))

    def rows_histogram(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """No calls."""
        return np.zeros(len(ROWS_BUCKETS) + 1, np.int64)

    def pairs_LE(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """No rows."""
        return np.zeros((1, 1), np.int64)
