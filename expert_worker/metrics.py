"""Prometheus metrics of an expert worker, read from its state when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from wsgiref.simple_server import WSGIServer

import numpy as np
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from expert_worker.call_counters import ROWS_BUCKETS
from expert_worker.scrubber import ScrubCounts
from expert_worker.state import WorkerState
from expertmesh.call_waits import WAIT_BOUNDS_S
from expertmesh.errors import PortError
from expertmesh.v1 import expert_service_pb2 as pb


class WorkerCollector(Collector):
    """Turns the state of an expert worker into metric families.

    Args:
        state: Of the expert worker.
        scrubbed: What was looked at of its memory; called in any thread.
    """

    def __init__(self, state: WorkerState, scrubbed: Callable[[], ScrubCounts]) -> None:
        self._state = state
        self._scrubbed = scrubbed

    def collect(self) -> Iterator[Metric]:
        """All families."""
        load, store, scrubbed = self._state.load(), self._state.store, self._scrubbed()
        gauges = {
            "resident_experts": ("Experts in memory", store.num_used_slots),
            "resident_bytes": ("Bytes of resident weights", store.resident_bytes),
            "queue_depth": ("Calls waiting for the device", load.queued_calls),
            "inflight_streams": ("Open Forward streams", load.streams),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"moe_worker_{name}", text, value)
        counters = {
            "calls": ("Calls answered with outputs", load.calls),
            "errors": ("Calls answered with an error", load.errors),
            "scrubbed_bytes": ("Bytes of weights in memory that were looked at", scrubbed.nbytes),
            "scrub_passes": ("Times that all weights in memory were looked at", scrubbed.passes),
            "damaged_experts": ("Experts whose memory was changed", scrubbed.damaged),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"moe_worker_{name}", text, value)
        seconds = CounterMetricFamily("moe_worker_kernel_seconds", "Computing", labels=["kernel"])
        seconds.add_metric(["grouped_mlp"], load.compute_us / 1e6)
        yield seconds
        yield self._batch_tokens(load.rows)
        yield _queue_wait(load)
        yield self._expert_tokens()

    def _batch_tokens(self, num_rows: int) -> HistogramMetricFamily:
        counts = np.cumsum(self._state.rows_histogram()).tolist()
        bounds = [*(str(float(bound)) for bound in ROWS_BUCKETS), "+Inf"]
        family = HistogramMetricFamily("moe_worker_batch_tokens", "Token rows of a call")
        family.add_metric([], list(zip(bounds, counts, strict=True)), sum_value=num_rows)
        return family

    def _expert_tokens(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "moe_worker_expert_tokens", "Token rows computed", labels=["layer", "expert"]
        )
        pairs_LE = self._state.pairs_LE()
        for layer, held in self._state.store.residency().items():
            for expert in (*held.resident, *held.retiring):
                family.add_metric([str(layer), str(expert)], int(pairs_LE[layer, expert]))
        return family


def _queue_wait(load: pb.LoadCounters) -> HistogramMetricFamily:
    counts = np.cumsum(load.calls_by_wait).tolist()
    bounds = [*map(str, WAIT_BOUNDS_S), "+Inf"]
    family = HistogramMetricFamily(
        "moe_expert_queue_wait_seconds", "Time that calls waited for the device"
    )
    family.add_metric([], list(zip(bounds, counts, strict=True)), sum_value=load.queue_us / 1e6)
    return family


def serve_metrics(
    state: WorkerState, scrubbed: Callable[[], ScrubCounts], host: str, port: int
) -> tuple[WSGIServer, Thread]:
    """Serves /metrics in a thread named `metrics`; port 0 picks a free one.

    Raises:
        PortError: The address cannot be bound.
    """
    registry = CollectorRegistry()
    registry.register(WorkerCollector(state, scrubbed))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise PortError(
            f"cannot listen on {host}:{port} for metrics: {error.strerror}",
            fix="choose another --metrics-port",
        ) from error
    thread.name = "metrics"
    return server, thread
