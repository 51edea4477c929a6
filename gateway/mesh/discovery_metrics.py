"""Discovery as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.mesh.discovery import DiscoveryReport


class DiscoveryCollector(Collector):
    """What is known of where expert workers are, as of the moment of a scrape.

    Args:
        report: Says how discovery is doing; from any thread.
    """

    def __init__(self, report: Callable[[], DiscoveryReport]) -> None:
        self._report = report

    def describe(self) -> tuple[Metric, ...]:
        """Nothing: otherwise registering would read the values once."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Gauges and a counter; no age of what cannot become old."""
        report = self._report()
        endpoints = GaugeMetricFamily(
            "moe_discovery_endpoints", "Expert workers that discovery names", labels=("state",)
        )
        endpoints.add_metric(("up",), report.num_up)
        endpoints.add_metric(("draining",), report.num_leaving)
        endpoints.add_metric(("down",), report.num_down)
        yield endpoints
        if report.age_s is not None:
            yield GaugeMetricFamily(
                "moe_discovery_age_seconds",
                "Since whoever knows the expert workers was last heard",
                report.age_s,
            )
        yield CounterMetricFamily(
            "moe_discovery_errors", "Times that discovery failed and kept what it knew",
            report.num_errors,
        )  # fmt: skip
