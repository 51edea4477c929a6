"""Speculative decoding: tokens that may come next, proposed after each step that sampled.

Drafts wait in the request slots behind the known tokens, and are no part of the state: the next
step verifies as many as the gateway schedules, and a token is emitted only if it is the one that
would have been sampled without them. So speculation changes the time of an output and nothing else.

It does not always pay. A step costs as much as `FIXED_COST_ROWS` rows, and one row more for each
sequence and draft. With B sequences a token then costs (F + B) / B rows, so a draft pays if it is
accepted with a probability of at least B / (F + B). The i-th draft is accepted with p ** i, where p
is the recent share of a request: so the number of drafts follows from p and B, down to none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from attention_worker.request_slots import RequestSlots
from attention_worker.sampler import ChosenTokens
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh_kernels.drafts import propose

FIXED_COST_ROWS = 5.0
"""Cost of a step without rows, in rows. Measured with demo-granular, bfloat16, experts in the same
process, on one core: 53 ms with 1 row, 65 with 2, 94 with 5, 117 with 8, 166 with 16. It is higher
where rows travel to expert workers, so this errs on the side of fewer drafts."""
RETRY_TOKENS = 32
"""A request that gets no drafts any more gets one again after this many tokens."""

_FIRST_ACCEPTED, _FIRST_JUDGED = 4.0, 5.0
_MEMORY = 0.8
"""Weight of what was seen before, after each verification."""


@dataclass(frozen=True)
class Speculation:
    """How many drafts are proposed, and when."""

    num_tokens: int = 0
    """Most drafts of a request; 0 turns speculation off."""
    lookup_max: int = 4
    """Longest run of latest tokens that is looked for."""
    lookup_min: int = 2
    """Shortest one."""


class Drafter(Protocol):
    """Proposes drafts."""

    def propose(self, tokens: ChosenTokens, slots: RequestSlots) -> list[pb.SlotDrafts]:
        """Leaves drafts in the slots that just got tokens, and says how many.

        Args:
            tokens: What was sampled and committed.
            slots: Hold tokens and drafts.
        """
        ...


class NoDrafter:
    """Speculation is off."""

    def propose(self, tokens: ChosenTokens, slots: RequestSlots) -> list[pb.SlotDrafts]:
        """None."""
        return []


class NgramDrafter:
    """Looks for the latest tokens in prompt and output, and proposes what followed them there.

    Args:
        speculation: How.
        num_slots: Request slots.
    """

    def __init__(self, speculation: Speculation, num_slots: int) -> None:
        self._speculation = speculation
        self._admission_S: npt.NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        self._accepted_S: npt.NDArray[np.float64] = np.zeros(num_slots)
        self._judged_S: npt.NDArray[np.float64] = np.zeros(num_slots)
        self._num_skipped_S: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)

    def propose(self, tokens: ChosenTokens, slots: RequestSlots) -> list[pb.SlotDrafts]:
        """See `Drafter`."""
        self._forget(tokens.rows.slots_P, slots)
        self._learn(tokens)
        slots_N = tokens.rows.slots_P[tokens.num_emitted_P > 0]
        if not slots_N.size:
            return []
        lengths_N = slots.length_S[slots_N]
        room_N = slots.max_model_len - 1 - lengths_N  # the last draft is followed by a token
        wanted_N = np.minimum(self._num_worthwhile(slots_N), room_N)
        num_drafts_N = propose(
            slots.token_ids_SL,
            slots_N,
            lengths_N,
            np.maximum(wanted_N, 0),
            self._speculation.lookup_max,
            self._speculation.lookup_min,
        )
        slots.num_drafts_S[slots_N] = num_drafts_N
        return [
            pb.SlotDrafts(slot=slot, num_drafts=num)
            for slot, num in zip(slots_N.tolist(), num_drafts_N.tolist(), strict=True)
            if num
        ]

    def _forget(self, slots_P: npt.NDArray[np.int64], slots: RequestSlots) -> None:
        """Begins anew for requests that are new in their slot."""
        new_N = slots_P[self._admission_S[slots_P] != slots.admission_S[slots_P]]
        self._admission_S[new_N] = slots.admission_S[new_N]
        self._accepted_S[new_N] = _FIRST_ACCEPTED
        self._judged_S[new_N] = _FIRST_JUDGED
        self._num_skipped_S[new_N] = 0

    def _learn(self, tokens: ChosenTokens) -> None:
        """Drafts after the first rejected one were not judged."""
        num_drafts_P = tokens.rows.num_rows_P - 1
        verified_P = (num_drafts_P > 0) & (tokens.num_emitted_P > 0)
        slots_N = tokens.rows.slots_P[verified_P]
        num_accepted_N = tokens.num_emitted_P[verified_P] - 1
        num_judged_N = np.minimum(num_accepted_N + 1, num_drafts_P[verified_P])
        self._accepted_S[slots_N] = self._accepted_S[slots_N] * _MEMORY + num_accepted_N
        self._judged_S[slots_N] = self._judged_S[slots_N] * _MEMORY + num_judged_N

    def _num_worthwhile(self, slots_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Drafts that are accepted often enough, where so many sequences share a step."""
        threshold = len(slots_N) / (FIXED_COST_ROWS + len(slots_N))
        rate_N = np.clip(self._accepted_S[slots_N] / self._judged_S[slots_N], 0.01, 0.99)
        num_N = np.floor(np.log(threshold) / np.log(rate_N)).astype(np.int64)
        skipped_N = np.where(num_N > 0, 0, self._num_skipped_S[slots_N] + 1)
        retried_N = skipped_N > RETRY_TOKENS
        self._num_skipped_S[slots_N] = np.where(retried_N, 0, skipped_N)
        return np.minimum(np.where(retried_N, 1, num_N), self._speculation.num_tokens)


def make_drafter(speculation: Speculation, num_slots: int) -> Drafter:
    """The drafter that these settings ask for."""
    return NgramDrafter(speculation, num_slots) if speculation.num_tokens else NoDrafter()
