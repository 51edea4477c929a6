"""Which experts an expert worker loads at start: the words of its `experts` setting."""

from __future__ import annotations

import re

from expertmesh.errors import SettingsError
from expertmesh.model_config import ModelConfig
from expertmesh.placement import expert_share

_SHARE = re.compile(r"(\d{1,9})/(\d{1,9})")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_EXPECTED = "expected all, none, a share i/n (from 0/n to n-1/n) or ids such as 0-3,6"


def chosen_experts(
    text: str, config: ModelConfig, num_slots: int | None
) -> tuple[tuple[int, int], ...]:
    """(layer, expert) of all that is loaded at start, in the order of layers.

    Args:
        text: See `parse_experts`.
        config: The model.
        num_slots: Most experts at a time; None for no limit.

    Raises:
        SettingsError: Malformed, names an expert that the model does not have, or too many.
    """
    experts = parse_experts(text, config.num_experts)
    chosen = tuple((layer, expert) for layer in config.moe_layers for expert in experts)
    if num_slots is not None and len(chosen) > num_slots:
        raise SettingsError(
            f"experts is {text!r}, {len(chosen)} of all layers, but expert_slots is {num_slots}",
            fix=f"use --expert-slots {len(chosen)} or more, or fewer experts",
        )
    return chosen


def parse_experts(text: str, num_experts: int) -> tuple[int, ...]:
    """Experts, ascending, the same for every MoE layer.

    Args:
        text: `all`, `none`, `i/n` (the i-th of n contiguous shares, from 0) or `0-3,6`.
        num_experts: Experts per MoE layer of the model.

    Raises:
        SettingsError: Malformed, or names an expert that the model does not have.
    """
    text = text.strip()
    if text == "all":
        return tuple(range(num_experts))
    if text == "none":
        return ()
    if share := _SHARE.fullmatch(text):
        return _share(text, int(share[1]), int(share[2]), num_experts)
    chosen: set[int] = set()
    for part in text.split(","):
        chosen.update(_range(text, part.strip(), num_experts))
    return tuple(sorted(chosen))


def _share(text: str, index: int, num_shares: int, num_experts: int) -> tuple[int, ...]:
    if index >= num_shares:
        raise SettingsError(f"experts is {text!r}: {_EXPECTED}")
    return tuple(expert_share(index, num_shares, num_experts))


def _range(text: str, part: str, num_experts: int) -> range:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise SettingsError(f"experts is {text!r}: {_EXPECTED}")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise SettingsError(f"experts has {part!r}, expected the lower id first")
    if last >= num_experts:
        raise SettingsError(
            f"experts has {part!r}, but the model has {num_experts} experts per layer",
            fix=f"use ids from 0 to {num_experts - 1}" if num_experts else "use none",
        )
    return range(first, last + 1)
