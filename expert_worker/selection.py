"""Which experts an expert worker loads at start: the words of its `experts` setting."""

from __future__ import annotations

import re

from expertmesh.errors import SettingsError
from expertmesh.placement import expert_share

_SHARE = re.compile(r"(\d{1,9})/(\d{1,9})")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_EXPECTED = "expected all, none, a share i/n (from 0/n to n-1/n) or ids such as 0-3,6"


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
