"""Who is suspected of taking expert workers down, who comes next, and who is convicted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from gateway.engine.inquiry import CALM_S, MAX_GROUPS, MAX_LONE_LOSSES, TURN_S, Inquiry, InquiryTurn
from gateway.engine.request_state import RequestState
from gateway.sequence import GenerationRequest, SamplingParams

LAYER = 3


def running(num_requests: int) -> list[RequestState]:
    """Requests that have a slot each."""
    states = []
    for slot in range(num_requests):
        params = SamplingParams(max_tokens=1)
        request = GenerationRequest(f"r{slot}", (1,), params, lambda output: None, 0.0)
        states.append(RequestState(request))
        states[-1].slot = slot
    return states


def investigate(
    suspects: Sequence[RequestState], kills: Callable[[RequestState], bool]
) -> tuple[list[RequestState], int, int]:
    """Who is convicted, and what that costs: expert workers, and steps."""
    inquiry = Inquiry(InquiryTurn())
    convicted: list[RequestState] = []
    num_lost = num_steps = 0
    inquiry.lost(suspects, LAYER, 0.0)
    while group := inquiry.next_suspects():
        num_steps += 1
        if not any(map(kills, group)):
            inquiry.clear_next()
            continue
        num_lost += 1
        guilty = inquiry.lost(group, LAYER, 0.0)
        if guilty is not None:
            convicted.append(guilty)
            guilty.slot = None
    return convicted, num_lost, num_steps


@pytest.mark.parametrize(
    ("num_suspects", "most_lost"),
    [(1, 1), (2, 1), (9, 1), (MAX_GROUPS, 1), (MAX_GROUPS + 1, 2), (256, 2), (300, 3)],
)
def test_the_guilty_one_is_found(num_suspects: int, most_lost: int) -> None:
    """Whoever it is; each level costs one expert worker, and one step for each group."""
    for guilty in {0, num_suspects // 2, num_suspects - 1}:
        states = running(num_suspects)
        culprit = states[guilty]
        convicted, num_lost, num_steps = investigate(states, lambda s, c=culprit: s is c)
        assert convicted == [culprit]
        assert num_lost <= most_lost
        assert num_steps <= most_lost * MAX_GROUPS


@pytest.mark.parametrize("num_suspects", [1, 9, 300])
def test_nobody_is_convicted_if_nobody_does_it(num_suspects: int) -> None:
    """Expert workers that died by chance cost suspects a step each, at most."""
    convicted, num_lost, num_steps = investigate(running(num_suspects), lambda s: False)
    assert (convicted, num_lost) == ([], 0)
    assert num_steps <= MAX_GROUPS


def test_all_guilty_ones_are_found() -> None:
    """Several at a time, in one inquiry, and nobody else."""
    chance = random.Random(5)
    for _ in range(50):
        states = running(chance.randint(2, 120))
        culprits = set(chance.sample(states, min(3, len(states))))
        convicted, num_lost, _ = investigate(states, culprits.__contains__)
        assert set(convicted) == culprits
        assert num_lost <= 2 * len(culprits)


def test_a_loss_of_many_convicts_nobody() -> None:
    """Neither the first loss, though one request is suspected, nor that of a group."""
    inquiry, states = Inquiry(InquiryTurn()), running(40)
    assert inquiry.lost(states[:1], LAYER, 0.0) is None
    inquiry.end()
    assert inquiry.lost(states, LAYER, 0.0) is None
    group = inquiry.next_suspects()
    assert len(group) > 1
    assert inquiry.lost(group, LAYER, 0.0) is None


def test_a_loss_in_another_layer_is_no_proof() -> None:
    """Rows have the same bits each time, so they do the same harm in the same layer; whoever loses
    one expert worker after the other all the same is ended in the end.
    """
    inquiry, (state,) = Inquiry(InquiryTurn()), running(1)
    inquiry.lost([state], LAYER, 0.0)
    for loss in range(1, MAX_LONE_LOSSES):
        assert inquiry.lost([state], LAYER + loss, 0.0) is None
        assert inquiry.next_suspects() == [state]
    assert inquiry.lost([state], LAYER + MAX_LONE_LOSSES, 0.0) is state
    assert not inquiry.active


def test_a_passed_step_clears() -> None:
    """After a loss by chance, also one in the middle of the inquiry, all go on together."""
    inquiry, (state,) = Inquiry(InquiryTurn()), running(1)
    inquiry.lost([state], LAYER, 0.0)
    inquiry.lost([state], LAYER + 1, 0.0)
    inquiry.clear_next()
    assert inquiry.next_suspects() == []
    assert not inquiry.active


def test_who_has_ended_is_passed_over() -> None:
    """Cancelled and preempted requests have no slot: their group shrinks, or is left out."""
    inquiry, states = Inquiry(InquiryTurn()), running(3)
    inquiry.lost(states, LAYER, 0.0)
    states[0].slot = states[1].slot = None
    assert inquiry.next_suspects() == [states[2]]
    inquiry.lost([], LAYER, 0.0)  # it was cancelled while it was computed
    assert inquiry.next_suspects() == []


def test_no_step_before_all_deaths_of_a_moment_are_known() -> None:
    """Who comes next waits a moment after each loss."""
    inquiry, states = Inquiry(InquiryTurn()), running(2)
    assert inquiry.wait_s(100.0) == 0.0
    inquiry.lost(states, LAYER, 100.0)
    assert inquiry.wait_s(100.0) == CALM_S
    assert inquiry.wait_s(101.0) == 0.0


def test_one_engine_at_a_time() -> None:
    """Suspects of another engine wait until the first inquiry is over, however it ends."""
    turn = InquiryTurn()
    first, second, (state,) = Inquiry(turn), Inquiry(turn), running(1)
    ends: list[Callable[[], object]] = [
        first.clear_next,
        first.end,
        lambda: first.lost([state], LAYER, 0.0),
    ]
    for end in ends:
        first.lost([state], LAYER, 0.0)
        assert first.wait_s(10.0) == 0.0
        second.lost([state], LAYER, 0.0)
        assert second.wait_s(10.0) == TURN_S
        end()
        assert second.wait_s(10.0) == 0.0
        second.end()
