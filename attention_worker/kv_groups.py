"""Partitions a model's layers into KV groups that share one pool of equal blocks.

A KV block belongs to one group at a time and holds `block_size` tokens in that group's layers. A
group has layers of one kind: they remember alike and see equally far. As all blocks are equal, a
group that fills less than a block wastes the rest, so a kind of many layers makes several groups:

    5 layers that see all, 29 with a window, alike      1 group of 5, 6 groups of 5 (the last of 4)
    12 and 12, alike                                    1 group of 12, 1 group of 12
    9 that see all, 39 with a window of twice the size  1 group of 9, 8 groups of 5 (the last of 4)
    one kind                                            1 group: a block has all layers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from expertmesh.model_config import KvLayout, ModelConfig

MAX_GROUPS = 16
"""More only if there are more kinds: a request has a block table in each."""
GOOD_OVERHEAD = 1.125
"""Memory per token in terms of what is used, that is good enough for fewer groups."""


class KvKind(NamedTuple):
    """What layers of a group have in common."""

    layout: KvLayout
    sliding_window: int | None
    """Tokens that a token sees, itself included; None for all."""


@dataclass(frozen=True)
class KvGroup:
    """Layers whose keys and values are in the same blocks."""

    kind: KvKind
    layers: tuple[int, ...]
    """Indices, ascending; they follow each other in a block."""

    @property
    def width(self) -> int:
        """Elements of a token in all layers."""
        return self.kind.layout.width * len(self.layers)


@dataclass(frozen=True)
class KvPlan:
    """The groups of a model; those that see all come first."""

    groups: tuple[KvGroup, ...]

    @property
    def block_width(self) -> int:
        """Elements of a block per token: those of the largest group."""
        return max(group.width for group in self.groups)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Per group: how many tokens a token sees; None for all."""
        return tuple(group.kind.sliding_window for group in self.groups)

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index of each layer's group."""
        return self._by_layer(
            {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        )

    @property
    def layout_of_layer(self) -> tuple[KvLayout, ...]:
        """What each layer remembers, as it is held."""
        return tuple(self.groups[group].kind.layout for group in self.group_of_layer)

    @property
    def offset_of_layer(self) -> tuple[int, ...]:
        """Per layer: elements per token of those before it in a block."""
        return self._by_layer(
            {
                layer: place * group.kind.layout.width
                for group in self.groups
                for place, layer in enumerate(group.layers)
            }
        )

    @staticmethod
    def _by_layer(values: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(values[layer] for layer in sorted(values))


def as_it_is(layout: KvLayout) -> KvLayout:
    """For pools of the model's own type."""
    return layout


def plan_kv_groups(config: ModelConfig, hold: Callable[[KvLayout], KvLayout] = as_it_is) -> KvPlan:
    """The KV groups of a model.

    Args:
        config: The model.
        hold: How a pool holds what a layer remembers.
    """
    attentions = (layer.attention for layer in config.layers)
    kinds = (KvKind(hold(attention.kv), attention.sliding_window) for attention in attentions)
    return plan_groups(dict(enumerate(kinds)))


def plan_groups(kind_of: Mapping[int, KvKind]) -> KvPlan:
    """Groups for layers of these kinds: few of them, that waste little.

    Args:
        kind_of: Layer to kind; at least one layer.
    """
    layers_of: defaultdict[KvKind, list[int]] = defaultdict(list)
    for layer in sorted(kind_of):
        layers_of[kind_of[layer]].append(layer)
    kinds = sorted(layers_of, key=lambda kind: (-_reach(kind), layers_of[kind]))
    counts = {kind: len(layers_of[kind]) for kind in kinds}
    block_width = min(_block_widths(counts), key=lambda width: _cost(counts, width))
    groups = [
        KvGroup(kind, layers)
        for kind in kinds
        for layers in _shares(layers_of[kind], _num_groups(kind, counts[kind], block_width))
    ]
    return KvPlan(tuple(groups))


def overhead(counts: Mapping[KvKind, int], block_width: int) -> float:
    """Memory per token in terms of what is used, where that is more: of a sequence within the
    windows, or of one that is so long that only layers without a window count.

    Args:
        counts: Kind to number of layers.
        block_width: Elements of a block per token.
    """
    whole = {kind: count for kind, count in counts.items() if kind.sliding_window is None}
    return max(_overhead(part, block_width) for part in (whole or counts, counts))


def _overhead(counts: Mapping[KvKind, int], block_width: int) -> float:
    used = sum(kind.layout.width * count for kind, count in counts.items())
    return _total_groups(counts, block_width) * block_width / used


def _block_widths(counts: Mapping[KvKind, int]) -> set[int]:
    """Widths at which a number of some kind's layers fills a block, with room for any layer."""
    widths = {kind.layout.width * n for kind, count in counts.items() for n in range(1, count + 1)}
    widest = max(kind.layout.width for kind in counts)
    return {width for width in widths if width >= widest}


def _cost(counts: Mapping[KvKind, int], block_width: int) -> tuple[float, ...]:
    """Smaller is better: not too many groups, then little waste, then few groups."""
    num_groups = _total_groups(counts, block_width)
    excess = max(0, num_groups - max(MAX_GROUPS, len(counts)))
    wasted = overhead(counts, block_width)
    return excess, max(wasted, GOOD_OVERHEAD), num_groups, wasted


def _total_groups(counts: Mapping[KvKind, int], block_width: int) -> int:
    return sum(_num_groups(kind, count, block_width) for kind, count in counts.items())


def _num_groups(kind: KvKind, count: int, block_width: int) -> int:
    return -(-count // (block_width // kind.layout.width))


def _shares(layers: Sequence[int], num_groups: int) -> list[tuple[int, ...]]:
    """Consecutive layers for each group; their numbers differ by one at most."""
    count = len(layers)
    ends = [count * (group + 1) // num_groups for group in range(num_groups)]
    return [tuple(layers[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _reach(kind: KvKind) -> float:
    return float("inf") if kind.sliding_window is None else kind.sliding_window
