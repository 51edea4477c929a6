"""How an expert worker leaves while others serve.

    handing over   Watch says that it drains; calls are answered, orders to load are refused. Until
                   no expert is left, as long as a gateway watches that hands them over.
    noticed        If some are left: a moment for gateways to turn to other copies.
    refusing       New calls are answered with DRAINING; those in flight are computed.

Owner: the thread that ends the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from expert_worker.state import WorkerState

_NOTICE_SHARE = 0.25
"""Of the time that is left, at most, for gateways to turn to other copies."""
_NOTICE_S = 0.5
_RESERVE_SHARE = 0.5
"""Of the time that is left, at most, for calls in flight when experts could not be handed over."""
_RESERVE_S = 2.0
_UNWATCHED_S = 0.5
"""A gateway whose Watch stream broke is back within this time, or is not waited for."""
_LOOK_S = 0.05


def drain(state: WorkerState, on_refusing: Callable[[], None]) -> None:
    """Returns when nothing is in flight, or the time of the drain is up, which has begun.

    Args:
        state: The expert worker.
        on_refusing: Called when it is about to refuse calls.
    """
    if not _hand_over(state):
        state.wait_no_streams(min(_NOTICE_S, _NOTICE_SHARE * state.drain_left_s))
    on_refusing()
    state.refuse_calls()
    state.wait_idle(state.drain_left_s)


def _hand_over(state: WorkerState) -> bool:
    """True once no expert is left; False if nobody takes them, or time is up."""
    reserve_s = min(_RESERVE_S, _RESERVE_SHARE * state.drain_left_s)
    watched_s = time.monotonic() if state.num_hand_overs else -_UNWATCHED_S
    version = -1
    while not state.is_handed_over:
        now_s = time.monotonic()
        if state.num_hand_overs:
            watched_s = now_s
        if now_s > watched_s + _UNWATCHED_S or state.drain_left_s <= reserve_s:
            return False
        version = state.wait_change(version, _LOOK_S)
    return True
