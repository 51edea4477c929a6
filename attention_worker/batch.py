"""A step's rows: which token, which position, which sequence. No Python loop over tokens.

Row order: generated tokens first, prompt tokens after them; within a class by sequence as
scheduled, then by position. So a token class is a range of rows.

    sequences (S)     rows (T)                                last_rows_P
    0: prompt  4..6   [ 1: pos 9 | 2: pos 3 | 0: 4, 5, 6 ]    0, 1, 4
    1: decode  9        generated rows        prompt rows
    2: decode  3
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Batch:
    """Rows of one forward pass, and the P sequences of it that get a token."""

    token_ids_T: Tensor
    """int64"""
    positions_T: npt.NDArray[np.int32]
    sequence_of_row_T: npt.NDArray[np.int32]
    num_generated_rows: int
    last_rows_P: Tensor
    """int64: rows whose logits are needed."""
    sample_slots_P: npt.NDArray[np.int64]
    sample_positions_P: npt.NDArray[np.int64]
    """Where the sampled tokens go; the noise of a token depends on it."""


def make_batch(schedule: Schedule, slots: RequestSlots, device: torch.device) -> Batch:
    """Gathers the rows of a non-empty schedule from the request slots."""
    num_tokens_S = schedule.num_tokens_S
    ends_S = np.cumsum(num_tokens_S)
    sequence_T = np.repeat(np.arange(len(num_tokens_S)), num_tokens_S)
    first_rows_S = ends_S - num_tokens_S
    position_T = np.arange(ends_S[-1]) + (schedule.starts_S - first_rows_S)[sequence_T]
    slot_T = schedule.slots_S[sequence_T]
    generated_T = position_T >= slots.num_prompt_S[slot_T]
    order_T = np.argsort(~generated_T, kind="stable")
    row_of_T = np.empty_like(order_T)
    row_of_T[order_T] = np.arange(len(order_T))
    token_ids_T = slots.token_ids_SL[slot_T[order_T], position_T[order_T]]
    sample_S = schedule.sample_S
    return Batch(
        token_ids_T=torch.from_numpy(token_ids_T.astype(np.int64)).to(device),
        positions_T=position_T[order_T].astype(np.int32),
        sequence_of_row_T=sequence_T[order_T].astype(np.int32),
        num_generated_rows=int(generated_T.sum()),
        last_rows_P=torch.from_numpy(row_of_T[ends_S[sample_S] - 1]).to(device),
        sample_slots_P=schedule.slots_S[sample_S],
        sample_positions_P=(schedule.starts_S + num_tokens_S)[sample_S],
    )
