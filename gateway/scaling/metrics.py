"""The scaling of expert workers as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.scaling.autoscaler import ScalingReport


class ScalingCollector(Collector):
    """What was asked for and why, as of the moment of a scrape.

    Gauges are there while this gateway leads and knows the number; counters are there always.

    Args:
        report: Says how things are; from any thread.
    """

    def __init__(self, report: Callable[[], ScalingReport]) -> None:
        self._report = report

    def describe(self) -> tuple[Metric, ...]:
        """Nothing: otherwise registering would read the values once."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters."""
        report = self._report()
        for name, (help_text, value) in _gauges(report).items():
            yield GaugeMetricFamily(f"moe_scaling_{name}", help_text, float(value))
        decisions = CounterMetricFamily(
            "moe_scaling_decisions", "Decisions other than the one before, by what and why",
            labels=("direction", "reason"),
        )  # fmt: skip
        for (direction, reason), count in report.decisions.items():
            decisions.add_metric((direction, reason), count)
        yield decisions
        errors = CounterMetricFamily(
            "moe_scaling_errors", "Turns that failed, by cause", labels=("cause",)
        )
        for cause, count in report.errors.items():
            errors.add_metric((cause,), count)
        yield errors


def _gauges(report: ScalingReport) -> dict[str, tuple[str, float]]:
    gauges: dict[str, tuple[str, float]] = {}
    if report.fleet is not None:
        gauges["desired"] = "Expert workers asked for", report.fleet.desired
        gauges["present"] = "Expert workers that serve, of those asked for", report.fleet.present
        if report.sample is not None:
            gauges["busy_ratio"] = "Share of time that devices compute", report.sample.busy
            gauges["queue_wait_p95_seconds"] = "Wait for the device", report.sample.wait_s
    return gauges
