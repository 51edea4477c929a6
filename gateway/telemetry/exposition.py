"""The full matrix of experts in Prometheus' text format, written by hand.

A client library takes hundreds of milliseconds for as many series, here it is a join of strings.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gateway.telemetry.expert_use import copies_LE
from gateway.telemetry.sources import Sources

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ExpertExposition:
    """Writes /metrics/experts.

    Args:
        sources: What is counted.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        experts = sources.experts
        self._labels = [
            [f'{{layer="{layer}",expert="{expert}"}} ' for expert in range(experts.num_experts)]
            for layer in experts.layers
        ]

    def pieces(self) -> Iterator[bytes]:
        """All series as of now, a layer at a time, so that others can be served in between."""
        yield from self._family(
            "moe_expert_tokens_total",
            "counter",
            "Rows for which the gates chose an expert, in committed steps",
            self._sources.gate_rows(),
        )
        yield from self._family(
            "moe_expert_replicas",
            "gauge",
            "Usable copies of an expert",
            copies_LE(self._sources),
        )

    def _family(
        self, name: str, kind: str, text: str, values_LE: npt.NDArray[np.int64]
    ) -> Iterator[bytes]:
        yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n".encode()
        for labels_E, values_E in zip(self._labels, values_LE.tolist(), strict=True):
            lines = (f"{name}{of}{value}" for of, value in zip(labels_E, values_E, strict=True))
            yield "\n".join([*lines, ""]).encode()
