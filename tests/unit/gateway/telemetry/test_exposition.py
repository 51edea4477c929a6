"""The full matrix, as Prometheus reads it."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.exposition import ExpertExposition, escaped
from gateway.telemetry.sources import Sources
from tests.support.seen_mesh import SeenMesh


@pytest.mark.parametrize("name", ["a-model", 'odd "name"', "back\\slash", "two\nlines", "日本語"])
def test_what_prometheus_reads_is_what_was_counted(name: str) -> None:
    """Every series once, with its type and its help, whatever the model's name is."""
    seen = SeenMesh()
    seen.rows_LE[:] = [[1, 2, 3, 4], [5, 6, 7, 1 << 53]]
    text = ExpertExposition(seen.sources(), name).text().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items()} == {
        "moe_expert_tokens": "counter",
        "moe_expert_replicas": "gauge",
    }
    assert all(family.documentation for family in families.values())
    tokens = families["moe_expert_tokens"].samples
    assert {sample.labels["model_name"] for sample in tokens} == {name}
    assert {
        (sample.name, sample.labels["layer"], sample.labels["expert"]): sample.value
        for sample in tokens
    } == {
        ("moe_expert_tokens_total", layer, str(expert)): seen.rows_LE[slot, expert]
        for slot, layer in enumerate(("1", "3"))
        for expert in range(4)
    }
    copies = families["moe_expert_replicas"].samples
    assert [sample.value for sample in copies] == [1, 1, 2, 1] * 2


def test_a_dense_model_has_no_series() -> None:
    """Only what they would mean."""
    lines = ExpertExposition(Sources(), "m").text().decode().splitlines()
    assert [line[0] for line in lines] == ["#"] * 4


def test_escaping() -> None:
    """As the format asks for: backslash, quote and line feed, nothing else."""
    assert escaped('\\ " \n é') == r"\\ \" \n é"
