"""What the benchmark of meshes computes from what it reads."""

from __future__ import annotations

import pytest

from bench.load import Workload, percentile, read_metrics
from bench.mesh import workers_of_a_row


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_workers", "expected"),
    [
        (8, 2, 1, 1.0),
        (8, 2, 2, 1.57),
        (8, 2, 8, 2.0),
        (8, 8, 3, 3.0),
        (128, 8, 2, 1.99),
        (128, 8, 4, 3.63),
        (128, 8, 16, 6.60),
    ],
)
def test_expert_workers_that_a_token_visits(
    num_experts: int, top_k: int, num_workers: int, expected: float
) -> None:
    """On average, if experts are chosen evenly."""
    assert workers_of_a_row(num_experts, top_k, num_workers) == pytest.approx(expected, abs=0.005)


def test_metrics_are_summed_by_a_label() -> None:
    """Other labels do not matter; samples without the label are there, too."""
    text = "\n".join(
        [
            "# HELP moe_x_total Things",
            'moe_x_total{model_name="m",part="a"} 1.5',
            'moe_x_total{model_name="n",part="a"} 2.0',
            'moe_x_total{part="b",model_name="m"} 4e-3',
            "moe_y 7",
        ]
    )
    assert read_metrics(text, "part") == {
        ("moe_x_total", "a"): 3.5,
        ("moe_x_total", "b"): 0.004,
        ("moe_y", ""): 7.0,
    }


def test_workloads_are_the_same_every_time() -> None:
    """And another seed gives other prompts."""
    load = Workload(8, 9, 64, 4, 512)
    assert load.prompts() == Workload(8, 9, 64, 4, 512).prompts()
    assert len({tuple(prompt) for prompt in load.prompts()}) == 9
    assert load.prompts()[0] != Workload(8, 9, 64, 4, 512, seed=1).prompts()[0]


def test_percentiles() -> None:
    """The 99th of 100 values is the largest but one at least."""
    assert percentile(range(100), 0.99) == 99
    assert percentile([3.0], 0.5) == 3.0
