"""A request while the engine works on it, and what one step computes of it.

Owner: the scheduler, in the engine thread.

    token_ids         prompt ............ | generated ... |
    num_committed     ------- KV is there to stay ->
    num_computed      ------- KV is there (or scheduled) -->
    num_placeholders  tokens that steps in flight will append
    num_drafts        tokens that the attention worker proposes to verify after the last one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.engine.block_hashes import BlockHashes
from gateway.engine.block_manager import BlockAppend
from gateway.sequence import GenerationRequest, SamplingParams


class RequestState:
    """What the scheduler knows of a request.

    Args:
        request: The request.
        turn: Its place in the queue: lower goes first, everywhere.
    """

    def __init__(self, request: GenerationRequest, turn: tuple[float, int] = (0.0, 0)) -> None:
        self.request = request
        self.turn = turn
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed = 0
        self.num_committed = 0
        self.num_placeholders = 0
        self.num_drafts = 0
        self.slot: int | None = None
        """Request slot while it runs; None while it waits."""
        self.life = 0
        """Counts admissions: results of an earlier life are dropped."""
        self.num_cached_tokens = 0
        """Tokens found in the prefix cache at the first admission."""
        self.num_kept_blocks = 0
        """Leading blocks of its table that the prefix cache knows, in this life."""
        self.hashes: BlockHashes | None = None
        """Names of its blocks, once they were needed."""
        self.num_losses = 0
        """Steps of it that ended with the life of their attention worker."""

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def in_flight(self) -> bool:
        """True while a step computes tokens of it."""
        return self.num_committed < self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def num_wanted(self, max_model_len: int) -> int:
        """Known tokens left to compute; 0 if the last possible token is in flight."""
        if self.num_placeholders and self.room(max_model_len) <= 0:
            return 0
        return len(self.token_ids) + self.num_placeholders - self.num_computed

    def room(self, max_model_len: int) -> int:
        """Tokens that may still be generated, besides those in flight."""
        generated = self.num_generated + self.num_placeholders
        known = len(self.token_ids) + self.num_placeholders
        return min(self.request.params.max_tokens - generated, max_model_len - known)


@dataclass(frozen=True)
class SlotOpening:
    """A request that becomes known to the attention worker."""

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached: int
    """Leading tokens whose keys and values are there."""
    params: SamplingParams


@dataclass(frozen=True)
class ScheduledEntry:
    """Tokens [start, start + num_tokens) of a request, to be computed in one step."""

    state: RequestState
    life: int
    slot: int
    start: int
    num_tokens: int
    new_blocks: tuple[BlockAppend, ...]
    sample: bool
    num_drafts: int = 0
    """The last ones of the tokens, which may turn out to be wrong."""

    @property
    def current(self) -> bool:
        """False if the request ended or was preempted since."""
        return self.state.slot == self.slot and self.state.life == self.life


@dataclass(frozen=True)
class ScheduledStep:
    """One step: deltas against what the attention worker knows."""

    step: int
    freed_slots: tuple[int, ...]
    opened: tuple[SlotOpening, ...]
    entries: tuple[ScheduledEntry, ...]
    preempted: tuple[RequestState, ...] = ()
    admitted: tuple[RequestState, ...] = ()
    cautious: bool = False
    """Its requests are suspected of taking expert workers down."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def current_states(self) -> list[RequestState]:
        """Requests that still are where they were when the step was scheduled."""
        return [entry.state for entry in self.entries if entry.current]


def advance(
    state: RequestState, num_tokens: int, blocks: tuple[BlockAppend, ...], num_drafts: int = 0
) -> ScheduledEntry:
    """Schedules the next `num_tokens` known tokens of a running request, and drafts after them."""
    assert state.slot is not None
    start = state.num_computed
    known = len(state.token_ids) + state.num_placeholders
    sample = start + num_tokens == known
    assert sample or not num_drafts, "drafts follow the last known token"
    state.num_computed = start + num_tokens
    state.num_placeholders += sample
    return ScheduledEntry(
        state, state.life, state.slot, start, num_tokens + num_drafts, blocks, sample, num_drafts
    )


def commit_entry(entry: ScheduledEntry, tokens: Sequence[int]) -> int:
    """Appends what was sampled: one token, and one more for each accepted draft.

    Returns:
        How many tokens of the request are computed for good.
    """
    num_accepted = max(0, len(tokens) - 1)
    if entry.sample:
        entry.state.num_placeholders -= 1
        entry.state.token_ids.extend(tokens)
        entry.state.num_computed += num_accepted
    return entry.start + entry.num_tokens - entry.num_drafts + num_accepted


def opening(entry: ScheduledEntry) -> SlotOpening:
    """What the attention worker must know of a request before its first work."""
    state = entry.state
    return SlotOpening(
        entry.slot,
        tuple(state.token_ids),
        state.num_prompt_tokens,
        entry.start,
        state.request.params,
    )
