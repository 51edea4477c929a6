"""Metrics of the engines and of their calls to expert workers, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from expertmesh.settings import EngineSettings
from gateway.engine.scheduler_limits import SchedulerLimits
from gateway.mesh.mesh_status import MeshStatus
from gateway.scraped import ReadWhenScraped
from gateway.sequence import DispatchStats, EngineStats


class EngineCollector(ReadWhenScraped):
    """Load of the engine.

    Args:
        stats: Load; called in any thread.
        mesh: State of the expert workers: requests may wait for those.
        model_name: Value of the label `model_name`.
        cache: What the KV cache is like, as labels; none if that is not told.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        mesh: Callable[[], MeshStatus],
        model_name: str,
        cache: Mapping[str, str],
    ) -> None:
        self._stats, self._mesh = stats, mesh
        self._labels = (model_name,)
        self._cache = dict(cache)

    def collect(self) -> Iterator[Metric]:
        """Gauges of the moment."""
        stats = self._stats()
        gauges: dict[str, tuple[str, float]] = {
            "num_requests_running": ("Requests being computed", stats.num_running),
            "num_requests_waiting": ("Requests waiting", stats.num_waiting),
            "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1", stats.kv_cache_usage),
            "kv_blocks_used": ("KV blocks in use", stats.kv_blocks_used),
            "kv_blocks": ("KV blocks", stats.kv_blocks_total),
            "request_slots_used": ("Request slots in use", stats.request_slots_used),
            "request_slots": ("Request slots", stats.request_slots_total),
            "engine_alive": ("0 once the engine can no longer serve", float(stats.alive)),
        }
        for name, (help_text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"moe_{name}", help_text, labels=("model_name",))
            gauge.add_metric(self._labels, value)
            yield gauge
        counters: dict[str, tuple[str, int]] = {
            "num_preemptions": ("Requests computed again for lack of KV", stats.num_preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up", stats.num_prefix_queried),
            "prefix_cache_hits": ("Prompt tokens found", stats.num_prefix_hit),
            "dropped_pairs": ("(row, expert) pairs left out, degraded", stats.num_dropped_pairs),
            "spec_decode_num_draft_tokens": ("Drafts verified", stats.num_drafts_verified),
            "spec_decode_num_accepted_tokens": ("Drafts accepted", stats.num_drafts_accepted),
        }
        for name, (help_text, count) in counters.items():
            counter = CounterMetricFamily(f"moe_{name}", help_text, labels=("model_name",))
            counter.add_metric(self._labels, count)
            yield counter
        yield self._waiting(stats)
        info = GaugeMetricFamily(
            "moe_cache_config_info", "Always 1", labels=("model_name", *self._cache)
        )
        info.add_metric((*self._labels, *self._cache.values()), 1)
        yield info
        yield _step_parts(stats)
        yield from _dispatch_metrics(stats.dispatch)

    def _waiting(self, stats: EngineStats) -> Metric:
        """Requests that wait: for room, or, while an expert has no copy, for that."""
        mesh = self._mesh()
        is_held = bool(mesh.uncovered) and not mesh.ready
        metric = GaugeMetricFamily(
            "moe_num_requests_waiting_by_reason", "Requests waiting: for room, or for experts",
            labels=("model_name", "reason"),
        )  # fmt: skip
        for reason, counts in (("capacity", not is_held), ("deferred", is_held)):
            metric.add_metric((*self._labels, reason), stats.num_waiting if counts else 0)
        return metric


def _step_parts(stats: EngineStats) -> Metric:
    """Where the attention workers' time goes."""
    parts = {
        "dispatch": stats.dispatch_us,
        "expert_wait": stats.expert_wait_us,
        "sampling": stats.sampling_us,
    }
    parts["attention"] = max(0, stats.step_us - sum(parts.values()))
    metric = CounterMetricFamily(
        "moe_step_part_seconds", "Time of steps, by what it was spent on", labels=("part",)
    )
    for part, microseconds in parts.items():
        metric.add_metric((part,), microseconds / 1e6)
    return metric


_DISPATCH_TROUBLES = {
    "faults": "Calls that were late or failed",
    "hedges": "Late calls whose rows were asked of other copies too",
    "retries": "Failed calls whose rows were asked of other copies",
    "late_replies": "Replies that came too late or twice",
    "ejections": "Times that it was not asked for a while, since it was silent or wrong",
    "damaged": "Calls and replies that were changed on the way, as their checksums tell",
    "late_calls": "Calls not answered within three times what such calls take",
}


def _dispatch_metrics(calls: Iterable[DispatchStats]) -> Iterator[Metric]:
    """What went to and came from each expert worker."""
    amount = CounterMetricFamily(
        "moe_dispatch_bytes", "Payload bytes, out to and back from an expert worker",
        labels=("worker", "direction"),
    )  # fmt: skip
    rows = CounterMetricFamily(
        "moe_dispatch_tokens", "Token rows out, and (token, expert) rows back",
        labels=("worker", "direction"),
    )  # fmt: skip
    troubles = [
        CounterMetricFamily(f"moe_dispatch_{name}", help_text, labels=("worker",))
        for name, help_text in _DISPATCH_TROUBLES.items()
    ]
    times = SummaryMetricFamily(
        "moe_dispatch_duration_seconds", "Round trips to an expert worker", labels=("worker",)
    )
    compute = SummaryMetricFamily(
        "moe_worker_compute_seconds", "Part of it that was computing", labels=("worker",)
    )
    causes = CounterMetricFamily(
        "moe_retries", "Failed calls whose rows were asked of other copies, of all expert workers",
        labels=("reason",),
    )  # fmt: skip
    calls = tuple(calls)
    for cause in ("late", "lost", "damaged", "refused"):
        causes.add_metric((cause,), sum(call.retry_causes.get(cause, 0) for call in calls))
    network = CounterMetricFamily(
        "moe_dispatch_network_seconds", "Round trips less computing: the way, and waiting",
        labels=("worker",),
    )  # fmt: skip
    slowness = GaugeMetricFamily(
        "moe_worker_slowness_ratio", "Time of its calls of late, to what such calls take",
        labels=("worker",),
    )  # fmt: skip
    for call in calls:
        amount.add_metric((call.worker_id, "out"), call.bytes_out)
        amount.add_metric((call.worker_id, "back"), call.bytes_back)
        rows.add_metric((call.worker_id, "out"), call.rows_out)
        rows.add_metric((call.worker_id, "back"), call.rows_back)
        for name, counter in zip(_DISPATCH_TROUBLES, troubles, strict=True):
            counter.add_metric((call.worker_id,), getattr(call, name))
        times.add_metric((call.worker_id,), call.calls, call.round_trip_s)
        compute.add_metric((call.worker_id,), call.calls, call.compute_s)
        network.add_metric((call.worker_id,), max(0.0, call.round_trip_s - call.compute_s))
        if call.slowness:
            slowness.add_metric((call.worker_id,), call.slowness)
    yield from (amount, rows, *troubles, times, compute, network, causes, slowness)


def cache_config(settings: EngineSettings, limits: SchedulerLimits) -> Mapping[str, str]:
    """What a KV cache is like, in the words of vLLM, which calls all blocks those of a GPU."""
    return {
        "block_size": str(limits.kv_block_size),
        "cache_dtype": settings.kv_cache_dtype,
        "enable_prefix_caching": str(settings.prefix_caching),
        "num_gpu_blocks": str(limits.num_kv_blocks),
    }
