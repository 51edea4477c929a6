"""Whether running requests hold just the KV blocks that they need, counted token by token."""

from __future__ import annotations

from gateway.engine.block_manager import NO_BLOCK
from gateway.engine.request_state import RequestState
from gateway.engine.scheduler import Scheduler


def check_seen_tokens(scheduler: Scheduler) -> None:
    """Every token that the next one after the committed ones sees is in a block, and no block is
    held of which it sees nothing."""
    for state in scheduler.running:
        for group, window in enumerate(scheduler.limits.sliding_windows):
            table = scheduler.blocks.table(state.request_id, group)
            first = first_token_seen(state, window)
            size = scheduler.limits.kv_block_size
            for position in range(first, state.num_computed):
                assert table[position // size] != NO_BLOCK, f"token {position} was freed"
            for index, block in enumerate(table):
                assert block == NO_BLOCK or (index + 1) * size > first, f"block {index} is held"


def first_token_seen(state: RequestState, window: int | None) -> int:
    """Position of the first token that the next one to compute sees."""
    return 0 if window is None else max(0, state.num_committed - window + 1)
