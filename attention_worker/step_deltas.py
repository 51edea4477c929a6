"""Takes what a step says: frees slots, adds requests, appends blocks, checks the schedule.

These deltas outlive the outcome of their step. A gateway that retries an abandoned step sends the
same `scheduled` work under a new step number without repeating freed slots, new requests and
block appends. Repeating them is harmless all the same:

    freed slot       a free slot stays free
    new request      equal to what the slot holds, with no committed step: the slot starts afresh
    block append     the slot's table ends with just these blocks there: nothing changes

A step is sent before the outcome of the one before it is known. What it computes of a request that
got no token there, although one was due, is left out: that request is about to be freed.

A malformed step is refused with a message that names slot and value. What stands before the
offending entry was applied, so the gateway ends the requests of the step and frees their slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attention_worker.batch import Schedule
from attention_worker.model_states.model_state import ModelState
from attention_worker.request_slots import RequestSlots
from attention_worker.sampling_spec import SlotSampling, read_sampling
from expertmesh.v1 import attention_service_pb2 as pb


class MalformedStepError(ValueError):
    """A step that the gateway should not have sent; the message names slot and value."""


class StepDeltas:
    """Applies the deltas of steps to the tables of slots and blocks.

    Args:
        slots: Table of requests.
        state: What the model's layers remember.
        vocab_size: Token ids are below.
        max_step_tokens: Most tokens of a step.
    """

    def __init__(
        self, slots: RequestSlots, state: ModelState, vocab_size: int, max_step_tokens: int
    ) -> None:
        self._slots = slots
        self._state = state
        self._vocab_size = vocab_size
        self._max_step_tokens = max_step_tokens

    def reset(self) -> None:
        """Forgets all requests."""
        self._slots.reset()
        self._state.reset()

    def skip(self, step: pb.StepRequest) -> None:
        """Applies the deltas of a step that is not computed.

        Raises:
            MalformedStepError: An entry of the step is impossible.
        """
        self._open_and_free(step)
        for entry in step.scheduled:
            self._check_slot(entry.slot)
            self._append_blocks(entry)

    def apply(self, step: pb.StepRequest) -> Schedule:
        """Applies a step's deltas and returns what to compute.

        Raises:
            MalformedStepError: An entry of the step is impossible.
        """
        self._open_and_free(step)
        schedule = self._schedule(step)
        for entry in step.scheduled:
            self._append_blocks(entry)
        self._check_blocks(schedule)
        return schedule

    def _open_and_free(self, step: pb.StepRequest) -> None:
        for slot in step.freed_slots:
            self._check_slot(slot)
            self._slots.free(slot)
            self._state.remove(slot)
        for new in step.new_requests:
            self._add(new)

    def _check_slot(self, slot: int) -> None:
        if slot >= self._slots.num_slots:
            raise MalformedStepError(
                f"slot {slot} is out of range: there are {self._slots.num_slots} request slots"
            )

    def _add(self, new: pb.NewRequest) -> None:
        slot = new.slot
        self._check_slot(slot)
        token_ids = self._token_ids(new)
        if new.num_cached >= len(token_ids):
            raise MalformedStepError(
                f"slot {slot}: num_cached is {new.num_cached}, expected less than {len(token_ids)}"
            )
        repeated = self._slots.holds_unstarted(
            slot, token_ids, new.num_prompt_tokens, new.num_cached
        )
        if self._slots.in_use_S[slot] and not repeated:
            raise MalformedStepError(f"slot {slot} is in use, expected a free one")
        sampling = _sampling(slot, new.sampling, self._vocab_size)
        self._slots.add(slot, token_ids, new.num_prompt_tokens, sampling, new.num_cached)
        self._state.begin(slot, new.num_cached)

    def _token_ids(self, new: pb.NewRequest) -> npt.NDArray[np.int32]:
        """Checked token ids of a new request."""
        if len(new.token_ids) % 4:
            raise MalformedStepError(
                f"slot {new.slot}: token_ids has {len(new.token_ids)} bytes, "
                "expected a multiple of 4"
            )
        token_ids = np.frombuffer(new.token_ids, dtype="<i4")
        if not 1 <= len(token_ids) <= self._slots.max_model_len:
            raise MalformedStepError(
                f"slot {new.slot}: {len(token_ids)} tokens, "
                f"expected 1 to max_model_len={self._slots.max_model_len}"
            )
        unknown = token_ids[(token_ids < 0) | (token_ids >= self._vocab_size)]
        if unknown.size:
            raise MalformedStepError(
                f"slot {new.slot}: token id {unknown[0]}, expected 0 to {self._vocab_size - 1}"
            )
        if not 1 <= new.num_prompt_tokens <= len(token_ids):
            raise MalformedStepError(
                f"slot {new.slot}: num_prompt_tokens is {new.num_prompt_tokens}, "
                f"expected 1 to {len(token_ids)}"
            )
        return token_ids

    def _schedule(self, step: pb.StepRequest) -> Schedule:
        """The scheduled work as arrays, checked against the table of requests."""
        work = [entry for entry in step.scheduled if not self._has_ended(entry.slot)]
        schedule = Schedule(
            slots_S=np.array([entry.slot for entry in work], np.int64),
            starts_S=np.array([entry.start for entry in work], np.int64),
            num_tokens_S=np.array([entry.num_tokens for entry in work], np.int64),
            sample_S=np.array([entry.sample for entry in work], np.bool_),
        )
        slots_S = schedule.slots_S
        self._check(schedule, slots_S < self._slots.num_slots, "is out of range")
        self._check(schedule, self._slots.in_use_S[slots_S], "holds no request")
        first_S = np.zeros(len(slots_S), np.bool_)
        first_S[np.unique(slots_S, return_index=True)[1]] = True
        self._check(schedule, first_S, "is scheduled twice")
        self._check_ranges(schedule)
        total = int(schedule.num_tokens_S.sum())
        if total > self._max_step_tokens:
            raise MalformedStepError(
                f"{total} tokens in a step, expected at most {self._max_step_tokens}"
            )
        return schedule

    def _has_ended(self, slot: int) -> bool:
        return slot < self._slots.num_slots and bool(self._slots.ended_S[slot])

    def _check_ranges(self, schedule: Schedule) -> None:
        """Work goes on where the last committed step ended, within known tokens and drafts."""
        slots_S = schedule.slots_S
        computed_S = self._slots.num_computed_S[slots_S]
        length_S = self._slots.length_S[slots_S]
        end_S = schedule.starts_S + schedule.num_tokens_S
        limit = self._slots.max_model_len
        self._check(schedule, schedule.num_tokens_S > 0, "has num_tokens 0")
        self._check(
            schedule,
            schedule.starts_S == computed_S,
            "start is {}, expected {}",
            schedule.starts_S,
            computed_S,
        )
        known_S = length_S + schedule.sample_S * self._slots.num_drafts_S[slots_S]
        self._check(
            schedule, end_S <= known_S, "tokens end at {}, but only {} are known", end_S, known_S
        )
        self._check(
            schedule,
            ~schedule.sample_S | (end_S >= length_S),
            "samples after token {}, but {} tokens are known",
            end_S,
            length_S,
        )
        self._check(
            schedule,
            ~schedule.sample_S | (end_S < limit),
            f"samples a token beyond max_model_len={limit}",
        )

    def _append_blocks(self, entry: pb.ScheduledRequest) -> None:
        position = int(self._slots.num_computed_S[entry.slot])
        for append in entry.new_blocks:
            try:
                self._state.append_blocks(
                    entry.slot, append.group, append.start, append.block_ids, position
                )
            except ValueError as error:
                raise MalformedStepError(str(error)) from error

    def _check_blocks(self, schedule: Schedule) -> None:
        """Every token has a place in the KV pool, in each group."""
        num_covered_S = self._state.num_covered(schedule.slots_S)
        end_S = schedule.starts_S + schedule.num_tokens_S
        self._check(
            schedule,
            end_S <= num_covered_S,
            "tokens end at {}, but its KV blocks hold {}",
            end_S,
            num_covered_S,
        )

    def _check(
        self,
        schedule: Schedule,
        good_S: npt.NDArray[np.bool_],
        problem: str,
        *values_S: npt.NDArray[np.int64],
    ) -> None:
        """Raises MalformedStepError for the first sequence that is not good."""
        if good_S.all():
            return
        index = int(np.argmin(good_S))
        shown = problem.format(*(int(values[index]) for values in values_S))
        raise MalformedStepError(f"slot {int(schedule.slots_S[index])}: {shown}")


def _sampling(slot: int, spec: pb.SamplingSpec, vocab_size: int) -> SlotSampling:
    try:
        return read_sampling(spec, vocab_size)
    except ValueError as error:
        raise MalformedStepError(f"slot {slot}: {error}") from error
