"""The placement of experts as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.placement.report import PlacementReport


class PlacementCollector(Collector):
    """What is placed and moved, as of the moment of a scrape.

    Args:
        report: Says how things are; from any thread.
    """

    def __init__(self, report: Callable[[], PlacementReport]) -> None:
        self._report = report

    def describe(self) -> tuple[Metric, ...]:
        """Nothing: otherwise registering would read the values once."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters."""
        report = self._report()
        copies = report.num_copies
        waiting = {"load": 0, "unload": 0}
        for kind, _, _ in report.moves:
            waiting[kind] += 1
        gauges = {
            "placement_leader": ("1 if this gateway leads the placement", report.token is not None),
            "expert_copies": ("Usable copies of experts, of all layers", sum(copies.values())),
            "expert_copies_min": ("Usable copies of the expert with least", report.fewest_copies()),
            "expert_imbalance": (
                "Time of the slowest expert worker to the mean, from late load",
                report.imbalance(),
            ),
        }
        for name, (help_text, value) in gauges.items():
            yield GaugeMetricFamily(f"moe_{name}", help_text, float(value))
        planned = GaugeMetricFamily(
            "moe_placement_planned_moves", "Experts that are to be moved", labels=("kind",)
        )
        for kind, count in waiting.items():
            planned.add_metric((kind,), count)
        yield planned
        moved = CounterMetricFamily(
            "moe_placement_moves", "Experts that expert workers were told to move, by outcome",
            labels=("outcome",),
        )  # fmt: skip
        counts = report.moved
        for outcome in ("loaded", "unloaded", "failed"):
            moved.add_metric((outcome,), getattr(counts, outcome))
        yield moved
