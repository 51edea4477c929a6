"""Our series once more under vLLM's names, for dashboards and load balancers made for vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gateway.scraped import ReadWhenScraped

_SAME = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("kv_cache_usage_perc", "cache_config_info", "num_preemptions"),
    *("prefix_cache_queries", "prefix_cache_hits"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "request_success"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"),
)
VLLM_NAMES: Mapping[str, str] = {
    **{f"moe_{name}": f"vllm:{name}" for name in _SAME},
    "moe_iteration_tokens": "vllm:iteration_tokens_total",
}
"""Our metrics to what vLLM calls the same. It has a histogram whose name ends as counters' do."""


class VllmMirror(ReadWhenScraped):
    """Repeats series under vLLM's names and with its labels.

    Args:
        sources: Where they come from.
    """

    def __init__(self, sources: Iterable[Collector]) -> None:
        self._sources = tuple(sources)

    def collect(self) -> Iterator[Metric]:
        """The series that vLLM has, too."""
        for source in self._sources:
            for metric in source.collect():
                if metric.name in VLLM_NAMES:
                    yield _renamed(metric, VLLM_NAMES[metric.name])


def _renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, metric.documentation, metric.type)
    copy.samples = [
        Sample(
            sample.name.replace(metric.name, name, 1),
            {**sample.labels, "engine": "0"},
            sample.value,
            sample.timestamp,
        )
        for sample in metric.samples
    ]
    return copy
