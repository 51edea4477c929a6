"""A step's rows: which token, which position, which sequence. No Python loop over tokens.

Row order: generated tokens first, prompt tokens after them; within a class by sequence as
scheduled, then by position. So a token class is a range of rows.

    sequences (S)      rows (T)                                    sample_rows_R
    0: prompt  4..6    [ 1: 9 | 2: 3, 4 draft | 0: 4, 5, 6 ]       5, 0, 1, 2
    1: decode  9         generated rows         prompt rows
    2: decode  3, draft
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.request_slots import RequestSlots


@dataclass(frozen=True)
class Schedule:
    """What to compute, per sequence: checked, one entry per request slot, S entries."""

    slots_S: npt.NDArray[np.int64]
    starts_S: npt.NDArray[np.int64]
    num_tokens_S: npt.NDArray[np.int64]
    """At least 1."""
    sample_S: npt.NDArray[np.bool_]

    @cached_property
    def first_rows_S(self) -> npt.NDArray[np.int64]:
        """First row of each sequence, with the rows by sequence as scheduled."""
        first_S: npt.NDArray[np.int64] = np.cumsum(self.num_tokens_S) - self.num_tokens_S
        return first_S


@dataclass(frozen=True)
class SampleRows:
    """R rows of logits that P sequences get tokens from: one each, and one more for each draft.

    The rows of a sequence are adjacent. The first follows its last known token, the others follow
    drafts, which count as known there: what a row depends on are the tokens of its slot at
    [0, position).
    """

    slots_R: npt.NDArray[np.int64]
    positions_R: npt.NDArray[np.int64]
    """Where the sampled token goes; its noise depends on it."""
    first_P: npt.NDArray[np.int64]
    """First row of each sequence."""

    def __len__(self) -> int:
        return len(self.slots_R)

    @property
    def slots_P(self) -> npt.NDArray[np.int64]:
        """Request slot of each sequence."""
        return self.slots_R[self.first_P]

    @property
    def num_rows_P(self) -> npt.NDArray[np.int64]:
        """Rows of each sequence."""
        return np.diff(self.first_P, append=len(self.slots_R))

    def leading(self, num_P: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first `num_P` rows of each sequence."""
        index_R = np.arange(len(self)) - np.repeat(self.first_P, self.num_rows_P)
        return np.flatnonzero(index_R < np.repeat(num_P, self.num_rows_P))


@dataclass(frozen=True)
class Batch:
    """Rows of one forward pass."""

    token_ids_T: Tensor
    """int64"""
    positions_T: npt.NDArray[np.int32]
    sequence_of_row_T: npt.NDArray[np.int32]
    num_generated_rows: int
    scheduled_rows_T: npt.NDArray[np.int64]
    """Rows by sequence as scheduled, then by position."""
    sample_rows_R: npt.NDArray[np.int64]
    """Rows whose logits are sampled from."""
    sample: SampleRows


def make_batch(schedule: Schedule, slots: RequestSlots, device: torch.device) -> Batch:
    """Gathers the rows of a non-empty schedule from the request slots."""
    num_tokens_S = schedule.num_tokens_S
    sequence_T = np.repeat(np.arange(len(num_tokens_S)), num_tokens_S)
    first_of_T = (schedule.starts_S - schedule.first_rows_S)[sequence_T]
    position_T = np.arange(len(sequence_T)) + first_of_T
    slot_T = schedule.slots_S[sequence_T]
    generated_T = position_T >= slots.num_prompt_S[slot_T]
    order_T = np.argsort(~generated_T, kind="stable")
    row_of_T = np.empty_like(order_T)
    row_of_T[order_T] = np.arange(len(order_T))
    token_ids_T = slots.token_ids_SL[slot_T[order_T], position_T[order_T]]
    sampled_T = schedule.sample_S[sequence_T] & (position_T >= slots.length_S[slot_T] - 1)
    sequence_R = sequence_T[sampled_T]
    return Batch(
        token_ids_T=torch.from_numpy(token_ids_T.astype(np.int64)).to(device),
        positions_T=position_T[order_T].astype(np.int32),
        sequence_of_row_T=sequence_T[order_T].astype(np.int32),
        num_generated_rows=int(generated_T.sum()),
        scheduled_rows_T=row_of_T,
        sample_rows_R=row_of_T[sampled_T],
        sample=SampleRows(
            slots_R=schedule.slots_S[sequence_R],
            positions_R=position_T[sampled_T] + 1,
            first_P=np.flatnonzero(np.diff(sequence_R, prepend=-1)),
        ),
    )
