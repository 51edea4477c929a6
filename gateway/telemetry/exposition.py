"""The full matrix of experts in Prometheus' text format, written by hand.

A client library takes hundreds of milliseconds for as many series, here it is a join of strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.telemetry.expert_use import copies_LE
from gateway.telemetry.sources import Sources

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def escaped(value: str) -> str:
    """A label's value as it stands between its quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class ExpertExposition:
    """Writes /metrics/experts.

    Args:
        sources: What is counted.
        model_name: Value of the label `model_name`.
    """

    def __init__(self, sources: Sources, model_name: str) -> None:
        self._sources = sources
        experts, model = sources.experts, escaped(model_name)
        self._labels = [
            f'{{model_name="{model}",layer="{layer}",expert="{expert}"}} '
            for layer in experts.layers
            for expert in range(experts.num_experts)
        ]

    def text(self) -> bytes:
        """All series, as of now."""
        sources = self._sources
        lines = [
            *self._family(
                "moe_expert_tokens_total",
                "counter",
                "Rows for which the gates chose an expert, in committed steps",
                sources.gate_rows().ravel().tolist(),
            ),
            *self._family(
                "moe_expert_replicas",
                "gauge",
                "Usable copies of an expert",
                copies_LE(sources).ravel().tolist(),
            ),
        ]
        return "".join(lines).encode()

    def _family(self, name: str, kind: str, text: str, values: Iterable[int]) -> Iterator[str]:
        yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        for labels, value in zip(self._labels, values, strict=True):
            yield f"{name}{labels}{value}\n"
