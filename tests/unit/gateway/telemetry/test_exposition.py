"""The full matrix, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.exposition import ExpertExposition
from gateway.telemetry.sources import Sources
from tests.support.seen_mesh import SeenMesh


def _text(sources: Sources) -> str:
    return b"".join(ExpertExposition(sources).pieces()).decode()


def test_what_prometheus_reads_is_what_was_counted() -> None:
    """Every series once, with its type and its help, numbers in full."""
    seen = SeenMesh()
    seen.rows_LE[:] = [[1, 2, 3, 4], [5, 6, 7, 1 << 53]]
    text = _text(seen.sources())
    assert f" {1 << 53}\n" in text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items()} == {
        "moe_expert_tokens": "counter",
        "moe_expert_replicas": "gauge",
    }
    assert all(family.documentation for family in families.values())
    assert [
        (sample.name, sample.labels, sample.value)
        for sample in families["moe_expert_tokens"].samples
    ] == [
        (
            "moe_expert_tokens_total",
            {"layer": layer, "expert": str(expert)},
            seen.rows_LE[slot, expert],
        )
        for slot, layer in enumerate(("1", "3"))
        for expert in range(4)
    ]
    copies = families["moe_expert_replicas"].samples
    assert [sample.value for sample in copies] == [1, 1, 2, 1] * 2


def test_it_comes_in_small_pieces() -> None:
    """A layer at a time: others are served in between."""
    pieces = list(ExpertExposition(SeenMesh().sources()).pieces())
    assert [piece.count(b"\n") for piece in pieces] == [2, 4, 4, 2, 4, 4]


def test_a_dense_model_has_no_series() -> None:
    """Only what they would mean."""
    assert [line[0] for line in _text(Sources()).splitlines()] == ["#"] * 4
