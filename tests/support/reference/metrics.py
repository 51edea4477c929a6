"""docs/metrics.md, made from the registries of a gateway and of an expert worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.vllm_names import VLLM_NAMES
from tests.support.metric_families import (
    MetricFamily,
    expert_worker_families,
    gateway_families,
    matrix_families,
)
from tests.support.reference.markdown import page, table

INTRODUCTION = """\
All names begin with `moe_`, units are seconds, bytes and ratios from 0 to 1 unless the text says
otherwise. No label has a value that a client has sent. A histogram has `_bucket`, `_sum` and
`_count`, a summary `_sum` and `_count`. A *row* is a token in one layer; what goes to expert
workers is counted in rows and in (row, expert) pairs. `worker` is the name of an expert worker,
`--worker-id`. Rules, monitors and a dashboard for all of it:
[deploy/components/monitoring](../deploy/components/monitoring/README.md)."""

GATEWAY = """\
`http://GATEWAY:8000/metrics`, without a key. What vLLM has too is there a second time under its
name, with the label `engine="0"` as well."""

MATRIX = """\
`http://GATEWAY:8000/metrics/experts`: a series for each expert of each layer, and so apart: scrape
it seldom, or not at all. `/v1/moe/experts` has the same for windows of time, as JSON."""

WORKER = """\
`http://EXPERT_WORKER:PORT/metrics`, with the port of `python -m expert_worker --metrics-port`;
there is none by default."""


def metrics_page() -> str:
    """The whole document."""
    return page(
        "Metrics",
        INTRODUCTION,
        "## Gateway",
        GATEWAY,
        table(("metric", "type", "labels", "vLLM's name", "what"), _gateway_rows()),
        "## Gateway: every expert",
        MATRIX,
        table(("metric", "type", "labels", "what"), _rows(matrix_families())),
        "## Expert worker",
        WORKER,
        table(("metric", "type", "labels", "what"), _rows(expert_worker_families())),
    )


def _gateway_rows() -> Iterator[tuple[str, ...]]:
    families = {family.name: family for family in gateway_families()}
    for family in families.values():
        if family.name.startswith("moe_"):
            *first, text = _row(family)
            mirror = families.get(VLLM_NAMES.get(family.name, ""))
            yield (*first, f"`{mirror.exposed_name}`" if mirror else "", text)


def _rows(families: Iterable[MetricFamily]) -> Iterator[tuple[str, ...]]:
    return map(_row, families)


def _row(family: MetricFamily) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"`{family.exposed_name}`", family.kind, labels, f"{family.text}."
