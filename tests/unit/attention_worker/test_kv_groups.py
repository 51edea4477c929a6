"""How layers are put into KV groups that share one pool of equal blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_worker.kv_groups import (
    GOOD_OVERHEAD,
    MAX_GROUPS,
    KvKind,
    KvPlan,
    overhead,
    plan_groups,
)
from expertmesh.model_config import KvLayout


def kind(width: int, window: int | None = None) -> KvKind:
    """Layers with this many elements per token."""
    return KvKind(KvLayout(1, width // 2, width - width // 2), window)


def interleaved(*runs: tuple[KvKind, int], repeats: int = 1) -> dict[int, KvKind]:
    """Layers of each kind in turn, over and over."""
    layers = [kind for _ in range(repeats) for kind, count in runs for _ in range(count)]
    return dict(enumerate(layers))


def shape(plan: KvPlan) -> list[tuple[int | None, int]]:
    """Window and number of layers of each group."""
    return [(group.kind.sliding_window, len(group.layers)) for group in plan.groups]


@pytest.mark.parametrize(
    ("kind_of", "groups", "most_overhead"),
    [
        (interleaved((kind(2048), 32)), [(None, 32)], 1.0),
        (interleaved((kind(2048, 4096), 32)), [(4096, 32)], 1.0),
        (
            interleaved((kind(1024), 1), (kind(1024, 128), 1), repeats=12),
            [(None, 12), (128, 12)],
            1,
        ),
        (
            interleaved((kind(2048, 1024), 5), (kind(2048), 1), repeats=5)
            | dict.fromkeys(range(30, 34), kind(2048, 1024)),
            [(None, 5), (1024, 4), *[(1024, 5)] * 5],
            1.03,
        ),
        (
            interleaved((kind(1280), 9), (kind(2560, 128), 39)),
            [(None, 9), (128, 4), *[(128, 5)] * 7],
            1.12,
        ),
    ],
    ids=["llama", "mistral", "gpt-oss", "gemma-3", "mimo"],
)
def test_known_models(
    kind_of: dict[int, KvKind], groups: list[tuple[int | None, int]], most_overhead: float
) -> None:
    """One kind is one group; others are cut so that blocks are nearly full."""
    plan = plan_groups(kind_of)
    assert shape(plan) == groups
    assert overhead(Counter(kind_of.values()), plan.block_width) <= most_overhead


kinds = st.builds(
    kind, st.integers(1, 40).map(lambda n: 64 * n), st.sampled_from([None, None, 128, 512, 4096])
)
models = st.lists(st.tuples(kinds, st.integers(1, 40)), min_size=1, max_size=4).map(
    lambda runs: interleaved(*runs)
)


@given(kind_of=models)
@settings(max_examples=200, deadline=None)
def test_any_model(kind_of: dict[int, KvKind]) -> None:
    """Every layer is in one group, which has one kind and fits into a block; there are few groups;
    no other width of blocks is better, and little is wasted wherever that is possible."""
    plan = plan_groups(kind_of)
    layers = [layer for group in plan.groups for layer in group.layers]
    assert sorted(layers) == sorted(kind_of)
    for index, group in enumerate(plan.groups):
        assert group.layers
        assert {kind_of[layer] for layer in group.layers} == {group.kind}
        places = sorted(plan.offset_of_layer[layer] for layer in group.layers)
        assert places == [group.kind.layout.width * place for place in range(len(group.layers))]
        assert group.width <= plan.block_width
        assert {plan.group_of_layer[layer] for layer in group.layers} == {index}
    counts = Counter(kind_of.values())
    most_groups = max(MAX_GROUPS, len(counts))
    assert len(plan.groups) <= most_groups
    wasted = overhead(counts, plan.block_width)
    for width in range(64, 64 * 40 * 40 + 1, 64):
        if width < max(kind.layout.width for kind in counts):
            continue
        num_groups = sum(
            -(-count // (width // kind.layout.width)) for kind, count in counts.items()
        )
        if num_groups > most_groups:
            continue
        other = overhead(counts, width)
        assert wasted <= max(other, GOOD_OVERHEAD)
        if other <= max(wasted, GOOD_OVERHEAD):
            assert len(plan.groups) <= num_groups
        if num_groups == len(counts):
            break


def test_groups_that_see_all_come_first() -> None:
    """Then those that see farther: the order does not depend on that of the layers."""
    plan = plan_groups(interleaved((kind(64, 8), 1), (kind(64, 32), 1), (kind(64), 1), repeats=3))
    assert plan.sliding_windows == (None, 32, 8)
