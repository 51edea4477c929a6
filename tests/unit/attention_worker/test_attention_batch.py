"""Rows of a step: positions, tokens and classes gathered from the request slots."""

from __future__ import annotations

import numpy as np
import torch

from attention_worker.batch import Schedule, make_batch
from attention_worker.request_slots import RequestSlots
from attention_worker.sampling_spec import SlotSampling

CPU = torch.device("cpu")
GREEDY = SlotSampling(temperature=0.0)


def _slots(*requests: tuple[int, list[int], int]) -> RequestSlots:
    """Slots filled from (slot, token ids, num_prompt_tokens)."""
    slots = RequestSlots(num_slots=8, max_model_len=32)
    for slot, token_ids, num_prompt in requests:
        slots.add(slot, np.array(token_ids, np.int32), num_prompt, GREEDY)
    return slots


def _schedule(*work: tuple[int, int, int, bool]) -> Schedule:
    """A schedule from (slot, start, num_tokens, sample)."""
    slots, starts, nums, sample = zip(*work, strict=True)
    return Schedule(np.array(slots), np.array(starts), np.array(nums), np.array(sample))


def test_generated_rows_come_first_and_classes_are_ranges() -> None:
    """A prompt chunk between two decodes is moved behind them; order is kept within a class."""
    slots = _slots((3, [30, 31, 32, 33], 4), (1, [10, 11, 12], 2), (5, [50, 51], 1))
    batch = make_batch(_schedule((1, 2, 1, True), (3, 1, 3, True), (5, 1, 1, True)), slots, CPU)
    assert batch.num_generated_rows == 2
    assert batch.token_ids_T.tolist() == [12, 51, 31, 32, 33]
    assert batch.positions_T.tolist() == [2, 1, 1, 2, 3]
    assert batch.sequence_of_row_T.tolist() == [0, 2, 1, 1, 1]
    assert batch.sample_rows_R.tolist() == [0, 4, 1]
    assert batch.sample.slots_P.tolist() == [1, 3, 5]
    assert batch.sample.positions_R.tolist() == [3, 4, 2]


def test_recomputation_splits_one_sequence_into_both_classes() -> None:
    """Tokens past the prompt count as generated although they are computed in a chunk."""
    slots = _slots((0, [1, 2, 3, 4, 5], 3))
    batch = make_batch(_schedule((0, 0, 5, True)), slots, CPU)
    assert batch.num_generated_rows == 2
    assert batch.token_ids_T.tolist() == [4, 5, 1, 2, 3]
    assert batch.positions_T.tolist() == [3, 4, 0, 1, 2]
    assert batch.sample_rows_R.tolist() == [1]


def test_only_sampled_sequences_get_logits() -> None:
    """A chunk that does not end its prompt has no row among the last rows."""
    slots = _slots((0, [1, 2, 3], 3), (1, [4, 5], 2))
    batch = make_batch(_schedule((0, 0, 2, False), (1, 0, 2, True)), slots, CPU)
    assert batch.sample_rows_R.tolist() == [3]
    assert batch.sample.slots_P.tolist() == [1]


def test_commit_appends_tokens_and_counts_computed() -> None:
    """A committed step advances lengths; a freed slot starts from nothing."""
    slots = _slots((0, [1, 2], 2), (1, [3], 1))
    slots.commit_computed(np.array([0, 1]), np.array([2, 1]))
    slots.commit_sampled(np.array([1]), np.array([1]), np.array([9]))
    assert slots.length_S[:2].tolist() == [2, 2]
    assert slots.num_computed_S[:2].tolist() == [2, 1]
    assert slots.token_ids_SL[1, :2].tolist() == [3, 9]
    slots.free(1)
    assert not slots.in_use_S[1]
    assert slots.num_computed_S[1] == 0


def test_drafts_are_rows_of_their_own() -> None:
    """Each is a generated row after its sequence's last token, and each gets logits."""
    slots = _slots((3, [30, 31, 32, 33], 4), (1, [10, 11, 12], 2))
    slots.token_ids_SL[1, 3:6] = [13, 14, 15]
    slots.num_drafts_S[1] = 3
    batch = make_batch(_schedule((3, 1, 3, True), (1, 2, 3, True)), slots, CPU)
    assert batch.token_ids_T.tolist() == [12, 13, 14, 31, 32, 33]
    assert batch.num_generated_rows == 3
    assert batch.sample_rows_R.tolist() == [5, 0, 1, 2]
    assert batch.sample.slots_R.tolist() == [3, 1, 1, 1]
    assert batch.sample.positions_R.tolist() == [4, 3, 4, 5]
    assert batch.sample.num_rows_P.tolist() == [1, 3]
    assert batch.sample.leading(np.array([0, 2])).tolist() == [1, 2]
