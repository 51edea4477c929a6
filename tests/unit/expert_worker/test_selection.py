"""The words of the setting `experts`."""

from __future__ import annotations

import pytest

from expert_worker.selection import chosen_experts, parse_experts
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("none", ()),
        ("0-3,6", (0, 1, 2, 3, 6)),
        (" 7 , 1-1 ", (1, 7)),
        ("3,3,2-4", (2, 3, 4)),
        ("0/3", (0, 1)),
        ("1/3", (2, 3, 4)),
        ("2/3", (5, 6, 7)),
        ("9/10", (7,)),
        ("0/10", ()),
    ],
)
def test_selection(text: str, expected: tuple[int, ...]) -> None:
    """Every form of the setting names the experts that it should, each once, ascending."""
    assert parse_experts(text, 8) == expected


@pytest.mark.parametrize("num_shares", [1, 2, 3, 5, 8, 11])
def test_shares_cover_every_expert_once(num_shares: int) -> None:
    """The shares of n expert workers are the experts, in order, none twice."""
    shares = [parse_experts(f"{index}/{num_shares}", 8) for index in range(num_shares)]
    assert [expert for share in shares for expert in share] == list(range(8))


@pytest.mark.parametrize(
    "text", ["", "some", "-1", "3-1", "8", "0-8", "2/2", "1/0", "1.5", "0x1", "1,,2", "9" * 40]
)
def test_bad_selection_is_named(text: str) -> None:
    """A selection that cannot work is refused with the setting and its value."""
    with pytest.raises(SettingsError, match="experts "):
        parse_experts(text, 8)


def test_chosen_experts_are_those_of_every_layer(checkpoint: Checkpoint) -> None:
    """As many as there are slots, and no more."""
    config = checkpoint.config
    assert chosen_experts("0,5", config, 6) == ((0, 0), (0, 5), (1, 0), (1, 5), (2, 0), (2, 5))
    assert chosen_experts("none", config, 1) == ()
    with pytest.raises(SettingsError, match="experts is '0,5', 6 of all layers, but expert_slots"):
        chosen_experts("0,5", config, 5)
