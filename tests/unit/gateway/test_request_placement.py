"""Where requests go: least work first, and where their prefix is."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.engine.request_placement import _MAX_PREFIXES, Place, RequestPlacement

BLOCK = 4
PREFIX = list(range(100, 140))


def rank(
    placement: RequestPlacement, prompt: list[int], salt: str = "", usable: Sequence[int] = (0, 1)
) -> list[Place]:
    """The usable ones of the engines, best first."""
    return placement.rank(placement.names(prompt, salt), len(prompt), usable)


def enter(placement: RequestPlacement, prompt: list[int], salt: str = "") -> Place:
    """Gives a request to the best of two engines."""
    place = rank(placement, prompt, salt)[0]
    placement.enter(place, placement.names(prompt, salt))
    return place


def test_requests_without_a_common_prefix_are_spread() -> None:
    """Each goes where less is pending; what was computed does not count any more."""
    placement = RequestPlacement(2, BLOCK)
    long, short = enter(placement, [1] * 100), enter(placement, [2] * 30)
    assert [long.engine, short.engine] == [0, 1]
    assert enter(placement, [3] * 30).engine == 1
    placement.computed(long)
    assert enter(placement, [4] * 30).engine == 0


def test_requests_meet_where_their_prefix_is() -> None:
    """A cached prefix outweighs a little load; only what is not cached is to be computed."""
    placement = RequestPlacement(2, BLOCK)
    first = enter(placement, [*PREFIX, 1])
    placement.computed(first)
    second = enter(placement, [*PREFIX, 2])
    assert second == Place(first.engine, 1)


def test_a_prefix_is_computed_again_rather_than_waited_for() -> None:
    """Where its prefix is known too much is pending: the other engine takes the request."""
    placement = RequestPlacement(2, BLOCK)
    placement.computed(enter(placement, [*PREFIX, 1]))
    placement.enter(Place(0, 500), placement.names([7] * 500, ""))
    assert enter(placement, [*PREFIX, 2]).engine == 1


def test_salts_do_not_share_prefixes() -> None:
    """The prefix of one tenant says nothing about another's."""
    placement = RequestPlacement(2, BLOCK)
    placement.computed(enter(placement, [*PREFIX, 1], "a"))
    assert rank(placement, [*PREFIX, 2], "b")[0] == Place(1, 41)


def test_an_engine_that_starts_over_knows_nothing() -> None:
    """After the loss of its attention worker no prefix is expected there."""
    placement = RequestPlacement(2, BLOCK)
    placement.computed(enter(placement, [*PREFIX, 1]))
    placement.forget(0)
    assert rank(placement, [*PREFIX, 2], "")[0] == Place(1, 41)


def test_only_usable_engines_are_ranked() -> None:
    """One that is down is not in question."""
    assert [place.engine for place in rank(RequestPlacement(3, BLOCK), [1], usable=[2])] == [2]


def test_load_goes_back_to_nothing() -> None:
    """When all have left, the engines are equal again, whatever went where."""
    placement = RequestPlacement(2, BLOCK)
    places = [enter(placement, [token] * 9) for token in range(7)]
    for place in places:
        placement.computed(place)
        placement.leave(place)
    assert rank(placement, [50] * 9, "") == [Place(0, 9), Place(1, 9)]


def test_prefixes_are_bounded() -> None:
    """The oldest prefixes are forgotten, the latest is known."""
    placement = RequestPlacement(2, 1)
    for start in range(0, 3 * _MAX_PREFIXES, 5000):
        names = placement.names(list(range(start, start + 5001)), "")
        placement.enter(Place(0, 0), names)
    assert rank(placement, list(range(start, start + 5001)), usable=[0])[0].num_tokens == 1
    assert rank(placement, list(range(5001)), usable=[0])[0].num_tokens == 5001


def test_a_single_engine_takes_everything_and_costs_nothing() -> None:
    """Without a choice no prefix is remembered, and the load is counted all the same."""
    placement = RequestPlacement(1, BLOCK)
    place = rank(placement, PREFIX, usable=[0])[0]
    placement.enter(place, placement.names(PREFIX, ""))
    assert place == Place(0, len(PREFIX))
    assert rank(placement, PREFIX, usable=[0]) == [place]
    assert not placement._engines_of
