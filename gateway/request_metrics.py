"""Prometheus metrics of a gateway: counted from the engine's events, or read when scraped.

Every series has the prefix `moe_`; those for which vLLM has a name are repeated under it, so that
dashboards and load balancers made for vLLM work. Labels have fixed sets of values: nothing that a
client sends becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from expertmesh import __version__
from gateway.engine.engine_observer import EngineObserver
from gateway.mesh.mesh_status import ExpertWorkerState, MeshStatus
from gateway.sequence import DispatchStats, EngineStats, FinishReason, GenerationRequest
from gateway.telemetry.latencies import RequestTotals

_LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
_FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_NEXT_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)

_VLLM_NAMES = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    }
)
"""Without prefix: what vLLM calls the same."""


class RequestMetrics(EngineObserver):
    """Counters and histograms of requests; told by the engine, in its thread.

    Args:
        registry: Where they are registered.
        model_name: Value of the label `model_name`.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.totals = RequestTotals()
        """The same for windows of time."""
        self._registry = registry
        self._labels = (model_name,)
        self._mirrored: list[Collector] = []
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self._success = Counter(
            "moe_request_success",
            "Requests that ended, by reason",
            ("model_name", "finished_reason"),
            registry=registry,
        )
        self._mirrored.append(self._success)
        self._first = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_BUCKETS
        )
        self._next = self._histogram(
            "inter_token_latency_seconds", "Between tokens of a request", _NEXT_TOKEN_BUCKETS
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token", _LATENCY_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival to the first request slot", _LATENCY_BUCKETS
        )
        self._prompt_len = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request", _TOKEN_BUCKETS
        )
        self._output_len = self._histogram(
            "request_generation_tokens", "Generated tokens per request", _TOKEN_BUCKETS
        )
        self._step = self._histogram("step_duration_seconds", "Time of a step", _STEP_BUCKETS)
        self._wait = self._histogram(
            "combine_wait_seconds", "Time of a step spent waiting for expert workers", _STEP_BUCKETS
        )
        self._pauses = self._counter("step_paused", "Steps abandoned for missing experts")
        self._lethal = self._by_layer("steps_lethal", "Steps that took expert workers down")
        self._quarantined = self._by_layer(
            "requests_quarantined", "Requests ended as they take expert workers down"
        )
        self._failures = self._counter("engine_failures", "Steps or attention workers that failed")
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
            self._success.labels(*self._labels, reason.value)
        registry.register(_VllmMirror(self._mirrored))

    def watch(self, stats: Callable[[], EngineStats], mesh: Callable[[], MeshStatus]) -> None:
        """Adds what is read at each scrape: the engine's load and the expert workers.

        Args:
            stats: Load of the engine; called in any thread.
            mesh: State of the expert workers; called in any thread.
        """
        load = EngineCollector(stats, self._labels[0])
        self._registry.register(load)
        self._registry.register(_VllmMirror([load]))
        self._registry.register(MeshCollector(mesh))

    def _counter(self, name: str, help_text: str) -> Counter:
        metric = Counter(f"moe_{name}", help_text, ("model_name",), registry=self._registry)
        metric.labels(*self._labels)
        self._mirrored.append(metric)
        return metric

    def _by_layer(self, name: str, help_text: str) -> Counter:
        labels = ("model_name", "layer")
        return Counter(f"moe_{name}", help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(
            f"moe_{name}", help_text, ("model_name",), registry=self._registry, buckets=buckets
        )
        metric.labels(*self._labels)
        self._mirrored.append(metric)
        return metric

    def request_started(self, request: GenerationRequest, queue_s: float) -> None:
        """A request got its first request slot."""
        num_tokens = len(request.prompt_token_ids)
        self.totals.started(num_tokens, queue_s)
        self._queue.labels(*self._labels).observe(queue_s)
        self._prompt_len.labels(*self._labels).observe(num_tokens)
        self.prompt_tokens.labels(*self._labels).inc(num_tokens)

    def first_token(self, request: GenerationRequest, since_arrival_s: float) -> None:
        """The first token was sampled."""
        self.totals.first_token(since_arrival_s)
        self._first.labels(*self._labels).observe(since_arrival_s)
        self.generation_tokens.labels(*self._labels).inc()

    def next_token(self, request: GenerationRequest, since_last_s: float) -> None:
        """A further token was sampled."""
        self.totals.next_token(since_last_s)
        self._next.labels(*self._labels).observe(since_last_s)
        self.generation_tokens.labels(*self._labels).inc()

    def request_finished(
        self,
        request: GenerationRequest,
        reason: FinishReason,
        num_generated: int,
        since_arrival_s: float,
    ) -> None:
        """A request ended."""
        self.totals.finished(since_arrival_s, failed=reason is FinishReason.ERROR)
        self._success.labels(*self._labels, reason.value).inc()
        self._whole.labels(*self._labels).observe(since_arrival_s)
        self._output_len.labels(*self._labels).observe(num_generated)

    def step_done(self, num_tokens: int, duration_s: float, expert_wait_s: float) -> None:
        """A step was committed."""
        self._step.labels(*self._labels).observe(duration_s)
        self._wait.labels(*self._labels).observe(expert_wait_s)

    def step_paused(self, missing: tuple[tuple[int, int], ...]) -> None:
        """A step was abandoned for missing experts."""
        self._pauses.labels(*self._labels).inc()

    def step_lethal(self, layer: int) -> None:
        """A step was abandoned for the expert workers that it took down."""
        self._lethal.labels(*self._labels, layer).inc()

    def request_quarantined(self, request: GenerationRequest, layer: int) -> None:
        """A request ends for the expert workers that it takes down."""
        self._quarantined.labels(*self._labels, layer).inc()

    def engine_failed(self, message: str) -> None:
        """A step or the attention worker failed."""
        self._failures.labels(*self._labels).inc()


class _ReadWhenScraped(Collector):
    """A collector whose names need not be known when it is registered."""

    def describe(self) -> Iterable[Metric]:
        """Nothing: otherwise registering would read the values once."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The metrics right now."""
        raise AssertionError("a subclass says which")


class EngineCollector(_ReadWhenScraped):
    """Load of the engine."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._stats = stats
        self._labels = (model_name,)

    def collect(self) -> Iterator[Metric]:
        """Gauges of the moment."""
        stats = self._stats()
        gauges: dict[str, tuple[str, float]] = {
            "num_requests_running": ("Requests being computed", stats.num_running),
            "num_requests_waiting": ("Requests waiting", stats.num_waiting),
            "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1", stats.kv_cache_usage),
            "kv_blocks_used": ("KV blocks in use", stats.kv_blocks_used),
            "kv_blocks_total": ("KV blocks", stats.kv_blocks_total),
            "request_slots_used": ("Request slots in use", stats.request_slots_used),
            "request_slots_total": ("Request slots", stats.request_slots_total),
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
        yield _step_parts(stats)
        yield from _dispatch_metrics(stats.dispatch)


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
    for call in calls:
        amount.add_metric((call.worker_id, "out"), call.bytes_out)
        amount.add_metric((call.worker_id, "back"), call.bytes_back)
        rows.add_metric((call.worker_id, "out"), call.rows_out)
        rows.add_metric((call.worker_id, "back"), call.rows_back)
        for name, counter in zip(_DISPATCH_TROUBLES, troubles, strict=True):
            counter.add_metric((call.worker_id,), getattr(call, name))
        times.add_metric((call.worker_id,), call.calls, call.round_trip_s)
        compute.add_metric((call.worker_id,), call.calls, call.compute_s)
    yield from (amount, rows, *troubles, times, compute)


class MeshCollector(_ReadWhenScraped):
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


class _VllmMirror(_ReadWhenScraped):
    """Repeats series under vLLM's names and with its labels."""

    def __init__(self, sources: Iterable[Collector]) -> None:
        self._sources = tuple(sources)

    def collect(self) -> Iterator[Metric]:
        """The series that vLLM has, too."""
        for source in self._sources:
            for metric in source.collect():
                if metric.name.removeprefix("moe_") in _VLLM_NAMES:
                    yield _renamed(metric)


def _renamed(metric: Metric) -> Metric:
    name = metric.name.replace("moe_", "vllm:", 1)
    copy = Metric(name, metric.documentation, metric.type)
    copy.samples = [
        Sample(
            sample.name.replace("moe_", "vllm:", 1),
            {**sample.labels, "engine": "0"},
            sample.value,
            sample.timestamp,
        )
        for sample in metric.samples
    ]
    return copy
