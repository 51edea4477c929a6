"""Prometheus metrics of requests, counted from the engine's events; and where all others come in.

Every series has the prefix `moe_`; those for which vLLM has a name are repeated under it, so that
dashboards and load balancers made for vLLM work. Labels have fixed sets of values: nothing that a
client sends becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.registry import Collector

from gateway.engine.engine_observer import EngineObserver, RequestTimes
from gateway.engine_metrics import EngineCollector
from gateway.mesh.mesh_metrics import MeshCollector
from gateway.mesh.mesh_status import MeshStatus
from gateway.sequence import EngineStats, FinishReason, GenerationRequest
from gateway.telemetry.latencies import RequestTotals
from gateway.vllm_names import VllmMirror

_LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
_FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_NEXT_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)

_NO_CACHE: Mapping[str, str] = {}


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
        self._most_output = self._histogram(
            "request_params_max_tokens", "Most tokens that a request may generate", _TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a request",
            _NEXT_TOKEN_BUCKETS,
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From request slot to first token", _LATENCY_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From first token to last", _LATENCY_BUCKETS
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From request slot to last token", _LATENCY_BUCKETS
        )
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens found in the prefix cache, of ended requests"
        )
        self._step_tokens = self._histogram("iteration_tokens", "Tokens of a step", _TOKEN_BUCKETS)
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
        registry.register(VllmMirror(self._mirrored))

    def watch(
        self,
        stats: Callable[[], EngineStats],
        mesh: Callable[[], MeshStatus],
        cache: Mapping[str, str] = _NO_CACHE,
    ) -> None:
        """Adds what is read at each scrape: the engine's load and the expert workers.

        Args:
            stats: Load of the engine; called in any thread.
            mesh: State of the expert workers; called in any thread.
            cache: What the KV cache is like: labels of `moe_cache_config_info`.
        """
        load = EngineCollector(stats, mesh, self._labels[0], cache)
        self._registry.register(load)
        self._registry.register(VllmMirror([load]))
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
        self._most_output.labels(*self._labels).observe(request.params.max_tokens)
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

    def request_timed(self, request: GenerationRequest, times: RequestTimes) -> None:
        """Where the time of a request went, at its end."""
        self._prefill.labels(*self._labels).observe(times.prefill_s)
        self._decode.labels(*self._labels).observe(times.decode_s)
        self._inference.labels(*self._labels).observe(times.prefill_s + times.decode_s)
        self._cached_tokens.labels(*self._labels).inc(times.num_cached_tokens)
        if times.num_generated > 1:
            per_token_s = times.decode_s / (times.num_generated - 1)
            self._per_token.labels(*self._labels).observe(per_token_s)

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
        self._step_tokens.labels(*self._labels).observe(num_tokens)
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
