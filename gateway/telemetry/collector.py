"""Use of experts, processes and devices as Prometheus metrics, read when scraped.

Numbers are of the last minute, and a few for each layer. The full matrix has its own endpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from expertmesh.process_usage import ProcessUsage, usage_of
from gateway.scraped import ReadWhenScraped
from gateway.telemetry.devices import Devices, NoDevices
from gateway.telemetry.expert_use import ExpertUse
from gateway.telemetry.stragglers import WINDOW_S, call_times, find_straggler
from gateway.telemetry.telemetry import Telemetry

USE_WINDOW_S = 60.0
NUM_HOTTEST = 3
"""Experts of each layer that are named."""


class TelemetryCollector(ReadWhenScraped):
    """What telemetry knows.

    Args:
        telemetry: Knows it.
        devices: GPUs of this machine.
    """

    def __init__(self, telemetry: Telemetry, devices: Devices | None = None) -> None:
        self._telemetry = telemetry
        self._devices = devices or NoDevices()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        window = self._telemetry.window(USE_WINDOW_S)
        use = ExpertUse.of(self._telemetry.sources, window)
        yield _imbalance(use)
        yield _by_layer(
            use, "moe_expert_load_entropy", use.entropy_L.tolist(),
            "Evenness of the load of a layer's experts in the last minute, 0 to 1",
        )  # fmt: skip
        yield _by_layer(
            use, "moe_dead_experts", use.dead_L.tolist(),
            "Experts of a layer that no row chose in the last minute",
        )  # fmt: skip
        yield _hottest(use)
        yield self._stragglers()
        yield from self._processes()
        yield from _device_metrics(self._devices)

    def _stragglers(self) -> Metric:
        calls = call_times(self._telemetry.window(WINDOW_S))
        straggler = find_straggler(calls)
        metric = GaugeMetricFamily(
            "moe_worker_straggler", "1 if an expert worker is slower than others with such calls",
            labels=("worker",),
        )  # fmt: skip
        for one in calls:
            is_slow = straggler is not None and straggler.worker_id == one.worker_id
            metric.add_metric((one.worker_id,), float(is_slow))
        return metric

    def _processes(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily(
            "moe_process_cpu_seconds", "Processor time of a process", labels=("process",)
        )
        memory = GaugeMetricFamily(
            "moe_process_resident_memory_bytes", "Memory of a process in RAM", labels=("process",)
        )
        for name, usage in self._usages():
            cpu.add_metric((name,), usage.cpu_s)
            memory.add_metric((name,), usage.rss_bytes)
        yield from (cpu, memory)

    def _usages(self) -> Iterator[tuple[str, ProcessUsage]]:
        """Of this process and its children, and what expert workers tell of themselves."""
        sources = self._telemetry.sources
        yield "gateway", usage_of()
        for name, pid in sources.children().items():
            yield name, usage_of(pid)
        for known in sources.known_workers():
            yield known.view.worker_id, ProcessUsage(known.work.cpu_s, known.work.rss_bytes)


def _imbalance(use: ExpertUse) -> Metric:
    metric = GaugeMetricFamily(
        "moe_expert_imbalance_ratio",
        "Load of the most loaded expert, or expert worker, to the mean, in the last minute",
        labels=("layer", "scope"),
    )
    for scope, ratio_L in (("expert", use.expert_imbalance_L), ("worker", use.worker_imbalance_L)):
        for layer, ratio in zip(use.experts.layers, ratio_L.tolist(), strict=True):
            metric.add_metric((str(layer), scope), ratio)
    return metric


def _by_layer(use: ExpertUse, name: str, values: list[float], text: str) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=("layer",))
    for layer, value in zip(use.experts.layers, values, strict=True):
        metric.add_metric((str(layer),), value)
    return metric


def _hottest(use: ExpertUse) -> Metric:
    metric = GaugeMetricFamily(
        "moe_hot_expert_tokens_rate",
        "Rows a second, in the last minute, of the most used experts of a layer",
        labels=("layer", "expert", "rank"),
    )
    hottest_LN = use.hottest_LN(NUM_HOTTEST).tolist()
    for slot, layer in enumerate(use.experts.layers):
        for rank, expert in enumerate(hottest_LN[slot], start=1):
            rate = int(use.rows_LE[slot, expert]) / use.seconds
            metric.add_metric((str(layer), str(expert), str(rank)), rate)
    return metric


def _device_metrics(devices: Devices) -> Iterator[Metric]:
    labels = ("device", "name")
    busy = GaugeMetricFamily(
        "moe_device_utilisation_ratio", "Part of the time that a GPU computes", labels=labels
    )
    used = GaugeMetricFamily("moe_device_memory_used_bytes", "Of a GPU", labels=labels)
    total = GaugeMetricFamily("moe_device_memory_size_bytes", "Of a GPU", labels=labels)
    for use in devices.read():
        of = (str(use.index), use.name)
        busy.add_metric(of, use.utilisation)
        used.add_metric(of, use.memory_used)
        total.add_metric(of, use.memory_total)
    yield from (busy, used, total)
