"""An attention worker without a model, which checks every delta that it is sent.

Its "model" is a function of the tokens alone, so the tokens of a request show whether it was
scheduled right, however it was cut, preempted and mixed with others.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from expertmesh.errors import ExpertUnavailableError, PeerError
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2 as expert_pb
from gateway.engine.scheduler_limits import SchedulerLimits

EOS = 1
_WAIT_S = 20.0


def next_token(token_ids: Sequence[int]) -> int:
    """The token that follows; never EOS."""
    return (31 * sum(token_ids) + 7 * len(token_ids)) % 89 + 3


def continuation(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """The tokens that follow a prompt."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return tuple(token_ids[len(prompt) :])


@dataclass
class _Slot:
    token_ids: list[int]
    num_computed: int
    tables: list[list[int | None]]
    """Block table per KV group; None for what was skipped."""
    num_drafts: int = 0
    """Proposed after the last token."""
    ended: bool = False
    """It got no token, and is left out of steps that were sent before that was known."""


class StrictAttention:
    """Applies steps; raises AssertionError for one that a real attention worker would refuse."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.slots: dict[int, _Slot] = {}
        self.num_computed_tokens = 0
        self.num_openings = 0
        self.num_cached_tokens = 0
        self.contents: dict[int, tuple[int, tuple[int, ...]]] = {}
        """KV block to its group, and the sequence up to its last token that was written."""
        self.num_drafts_of: Callable[[Sequence[int]], int] = lambda token_ids: 0
        """How many tokens are proposed after these."""
        self.drafts_hold: Callable[[Sequence[int]], int] = lambda token_ids: 0
        """How many of the tokens proposed after these turn out to be right."""
        self._last_step = 0
        self._last_committed = 0

    def execute(
        self,
        step: pb.StepRequest,
        token_of: Callable[[Sequence[int]], int] = next_token,
        spoiled: Collection[int] = (),
    ) -> pb.StepResponse:
        """Applies deltas, computes and commits; skips a step that builds on an abandoned one.

        Args:
            step: What was sent.
            token_of: Chooses tokens.
            spoiled: Slots whose logits are not finite.
        """
        skipped = self.skips(step)
        self.apply_deltas(step)
        if skipped:
            return pb.StepResponse(step=step.step, status=pb.StepResponse.STATUS_SKIPPED)
        todo = [work for work in step.scheduled if not self.slots[work.slot].ended]
        for work in todo:
            self._check_work(work)
        self._last_committed = step.step
        response = pb.StepResponse(step=step.step, status=pb.StepResponse.STATUS_DONE)
        for work in todo:
            slot = self.slots[work.slot]
            if work.sample and work.slot in spoiled:
                slot.ended = True
                response.nonfinite_slots.append(work.slot)
            else:
                self._compute(slot, work, response, token_of)
        return response

    def skips(self, step: pb.StepRequest) -> bool:
        """True if a step builds on one that was not committed."""
        return bool(step.after_step) and step.after_step != self._last_committed

    def _compute(
        self,
        slot: _Slot,
        work: pb.ScheduledRequest,
        response: pb.StepResponse,
        token_of: Callable[[Sequence[int]], int],
    ) -> None:
        num_drafts = max(0, work.start + work.num_tokens - len(slot.token_ids))
        num_accepted = min(num_drafts, self.drafts_hold(slot.token_ids)) if num_drafts else 0
        response.num_drafts_verified += num_drafts
        response.num_drafts_accepted += num_accepted
        self.num_computed_tokens += work.num_tokens
        for _ in range(1 + num_accepted if work.sample else 0):
            token_id = token_of(slot.token_ids)
            slot.token_ids.append(token_id)
            response.sampled.add(slot=work.slot, token_id=token_id)
        slot.num_computed += work.num_tokens - num_drafts + num_accepted
        self._write(slot, work.start, slot.num_computed)
        slot.num_drafts = self.num_drafts_of(slot.token_ids) if work.sample else 0
        if slot.num_drafts:
            response.drafts.add(slot=work.slot, num_drafts=slot.num_drafts)

    def _write(self, slot: _Slot, start: int, end: int) -> None:
        """Keys and values of [start, end); those that the first token sees must be there."""
        size = self.limits.kv_block_size
        for group, table in enumerate(slot.tables):
            for index in range(self._first_seen(group, start), -(-start // size)):
                known = tuple(slot.token_ids[: min((index + 1) * size, start)])
                block = table[index]
                assert block is not None, "KV is seen, but has no block"
                assert self.contents[block] == (group, known), "KV of another prefix"
            for position in range(start, end):
                block = table[position // size]
                assert block is not None, "KV is written, but has no block"
                self.contents[block] = (group, tuple(slot.token_ids[: position + 1]))

    def _first_seen(self, group: int, position: int) -> int:
        """Index of the first block that the token at a position sees."""
        window = self.limits.sliding_windows[group]
        first = 0 if window is None else max(0, position - window + 1)
        return first // self.limits.kv_block_size

    def apply_deltas(self, step: pb.StepRequest) -> None:
        """Slots and blocks of a step, and all checks."""
        assert step.step > self._last_step, "step numbers go up"
        self._last_step = step.step
        for freed in step.freed_slots:
            assert self.slots.pop(freed, None) is not None, f"slot {freed} was free"
        for new in step.new_requests:
            self._open(new)
        assert sum(work.num_tokens for work in step.scheduled) <= self.limits.max_step_tokens
        slots = Counter(work.slot for work in step.scheduled)
        assert all(count == 1 for count in slots.values()), "a slot is scheduled twice"
        for work in step.scheduled:
            groups = Counter(append.group for append in work.new_blocks)
            assert all(count == 1 for count in groups.values()), "a group is extended twice"
            for append in work.new_blocks:
                self._append(self.slots[work.slot], append)
        self._check_sharing()

    def _append(self, slot: _Slot, append: pb.BlockAppend) -> None:
        table = slot.tables[append.group]
        num_skipped = append.start - len(table)
        assert append.block_ids, "an append without blocks"
        assert num_skipped >= 0, "a block is replaced"
        assert not num_skipped or not table, "blocks are skipped within a table"
        assert num_skipped <= self._first_seen(append.group, slot.num_computed), "KV is missing"
        table += [None] * num_skipped + list(append.block_ids)

    def _check_sharing(self) -> None:
        """A block that the next token of two requests sees is of one group, and both have computed
        the same tokens up to its end."""
        size = self.limits.kv_block_size
        sequences: dict[int, tuple[int, tuple[int, ...]]] = {}
        for slot in self.slots.values():
            seen = list(self._seen_blocks(slot))
            assert len({block for _, _, block in seen}) == len(seen), "a block is twice in tables"
            for group, index, block in seen:
                assert 0 <= block < self.limits.num_kv_blocks
                own = (group, tuple(slot.token_ids[: (index + 1) * size]))
                other = sequences.setdefault(block, own)
                shared = other is not own
                full = len(own[1]) == (index + 1) * size and slot.num_computed >= len(own[1])
                assert not shared or (full and own == other), "a block is in two tables"

    def _seen_blocks(self, slot: _Slot) -> Iterator[tuple[int, int, int]]:
        """Group, index and id of the blocks that the next token to compute sees, or later ones."""
        for group, table in enumerate(slot.tables):
            for index in range(self._first_seen(group, slot.num_computed), len(table)):
                block = table[index]
                assert block is not None, "KV is seen, but has no block"
                yield group, index, block

    def _open(self, new: pb.NewRequest) -> None:
        assert new.slot not in self.slots, f"slot {new.slot} is in use"
        assert new.slot < self.limits.num_request_slots
        token_ids = np.frombuffer(new.token_ids, dtype="<i4").tolist()
        assert 1 <= new.num_prompt_tokens <= len(token_ids) < self.limits.max_model_len
        assert new.num_cached < len(token_ids), "the last token is computed"
        self.num_openings += 1
        self.num_cached_tokens += new.num_cached
        tables: list[list[int | None]] = [[] for _ in self.limits.sliding_windows]
        self.slots[new.slot] = _Slot(token_ids, new.num_cached, tables)

    def _check_work(self, work: pb.ScheduledRequest) -> None:
        slot = self.slots[work.slot]
        end = work.start + work.num_tokens
        known = len(slot.token_ids)
        assert work.num_tokens > 0
        assert work.start == slot.num_computed, "each token is computed exactly once"
        assert end <= known + slot.num_drafts, "only known and proposed tokens are computed"
        assert work.sample == (end >= known), "a token is sampled after the last one"
        assert end < self.limits.max_model_len, "there is room for the sampled token"
        num_blocks = min(len(table) for table in slot.tables)
        assert end <= num_blocks * self.limits.kv_block_size, "every token has a KV block"


class ScriptedPort:
    """An `AttentionPort` to a `StrictAttention`, whose outcomes a test decides."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.num_drafts_of: Callable[[Sequence[int]], int] = lambda token_ids: 0
        """See `StrictAttention`; for each life."""
        self.drafts_hold: Callable[[Sequence[int]], int] = lambda token_ids: 0
        self.worker = self._new_worker(limits)
        self.initial_limits = limits
        self.gate = threading.Event()
        """Clear it to keep the engine waiting for a result."""
        self.gate.set()
        self.waiting = threading.Event()
        """Set while the engine waits for a result that the gate holds."""
        self.steps: list[pb.StepRequest] = []
        """All that were sent; the first ones are answered."""
        self.restarts: list[str] = []
        self.token_of = next_token
        self.kills: Callable[[Sequence[int]], bool] = lambda token_ids: False
        """Whether rows of a request with these tokens take expert workers down."""
        self.num_killed = 0
        """Expert workers so far."""
        self.lethal_layer = 2
        self.auto_restart = True
        self._restarting = False
        self._num_answered = 0
        self._limits: SchedulerLimits | None = limits
        self._missing: tuple[tuple[int, int], ...] = ()
        self._failures: list[str] = []
        self._nonfinite: set[int] = set()
        self._loss = ""
        self._losses: dict[int, str] = {}
        self._spoilers: dict[int | None, Callable[[pb.StepResponse], object]] = {}
        self._num_received = 0
        self._on_change: Callable[[], None] = lambda: None

    def pause(self, *missing: tuple[int, int]) -> None:
        """Steps are abandoned for want of these experts; none to go on."""
        self._missing = missing

    def fail_next(self, *messages: str) -> None:
        """The next steps fail."""
        self._failures.extend(messages)

    def spoil(self, *slots: int) -> None:
        """The next step's logits of these slots are not finite."""
        self._nonfinite.update(slots)

    def lose_next(self, reason: str) -> None:
        """The attention worker is lost during the next step."""
        self._loss = reason

    def lose_at(self, num_results: int, reason: str) -> None:
        """The attention worker is lost instead of giving this result, counted from the first."""
        self._losses[num_results] = reason

    def spoil_result(
        self, num_results: int | None, change: Callable[[pb.StepResponse], object]
    ) -> None:
        """Changes this result, counted from the first; None: all that are not named."""
        self._spoilers[num_results] = change

    def die(self) -> None:
        """The attention worker ends by itself."""
        self._limits = None
        self._on_change()

    def come_and_go(self) -> None:
        """A restart is over, but the new attention worker has ended already."""
        self._restarting = False
        self._on_change()

    def revive(self, limits: SchedulerLimits) -> None:
        """A new attention worker is up; it knows nothing."""
        self.worker = self._new_worker(limits)
        self._num_answered = len(self.steps)
        self._limits = limits
        self._restarting = False
        self._on_change()

    def limits(self) -> SchedulerLimits | None:
        return self._limits

    def subscribe(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def send(self, step: pb.StepRequest) -> None:
        if self._limits is None:
            raise PeerError("attention worker is down")
        self.steps.append(step)

    def receive(self, timeout_s: float) -> pb.StepResponse:
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(_WAIT_S), "the test forgot to open the gate"
            self.waiting.clear()
        step = self.steps[self._num_answered]
        self._num_answered += 1
        self._num_received += 1
        response = self._result(step)
        spoil = self._spoilers.get(self._num_received, self._spoilers.get(None))
        if spoil is not None:
            spoil(response)
        return response

    def _result(self, step: pb.StepRequest) -> pb.StepResponse:
        self._loss = self._losses.pop(self._num_received, self._loss)
        if self._loss:
            reason, self._loss = self._loss, ""
            raise PeerError(reason)
        if self.worker.skips(step):
            return self.worker.execute(step)
        if self._failures:
            self.worker.apply_deltas(step)
            message = self._failures.pop(0)
            status = pb.StepResponse.STATUS_FAILED
            return pb.StepResponse(step=step.step, status=status, message=message)
        if self._missing:
            return self._paused(step)
        if any(map(self.kills, self._tokens(step))):
            return self._lethal(step)
        return self._done(step)

    def restart(self, reason: str) -> None:
        if self._restarting:
            return
        self._restarting = True
        self._limits = None
        self.restarts.append(reason)
        if self.auto_restart:
            self.revive(self.initial_limits)

    def _new_worker(self, limits: SchedulerLimits) -> StrictAttention:
        worker = StrictAttention(limits)
        worker.num_drafts_of = lambda token_ids: self.num_drafts_of(token_ids)
        worker.drafts_hold = lambda token_ids: self.drafts_hold(token_ids)
        return worker

    def _paused(self, step: pb.StepRequest) -> pb.StepResponse:
        self.worker.apply_deltas(step)
        missing = [
            expert_pb.ExpertId(layer=layer, expert=expert) for layer, expert in self._missing
        ]
        error = ExpertUnavailableError(self._missing, detail="expert worker w1 is gone")
        status = pb.StepResponse.STATUS_PAUSED
        return pb.StepResponse(step=step.step, status=status, missing=missing, message=str(error))

    def _tokens(self, step: pb.StepRequest) -> Iterator[Sequence[int]]:
        """Of each request that is computed."""
        new = {new.slot: np.frombuffer(new.token_ids, "<i4") for new in step.new_requests}
        for work in step.scheduled:
            if work.slot in new:
                yield new[work.slot].tolist()
            else:
                yield self.worker.slots[work.slot].token_ids

    def _lethal(self, step: pb.StepRequest) -> pb.StepResponse:
        self.worker.apply_deltas(step)
        self.num_killed += 1 if step.cautious else 2
        return pb.StepResponse(
            step=step.step,
            status=pb.StepResponse.STATUS_LETHAL,
            message="expert worker w1: it ended the stream",
            suspect_slots=[work.slot for work in step.scheduled],
            lethal_layer=self.lethal_layer,
        )

    def _done(self, step: pb.StepRequest) -> pb.StepResponse:
        spoiled, self._nonfinite = self._nonfinite, set()
        response = self.worker.execute(step, self.token_of, spoiled)
        response.duration_us = 1000
        return response
